"""One's own problems: any local JSONL, JSON, CSV or Parquet file, its columns named in the config."""

import functools
import os
import pathlib
from collections.abc import Sequence

from jaxrl_llm.tasks import prompt_template as prompt_template_lib
from jaxrl_llm.tasks.files import columns as columns_lib
from jaxrl_llm.tasks.files import tables, text_files
from jaxrl_llm.tasks.files.columns import Columns
from jaxrl_llm.tasks.problem_set import COLUMNS, Setup, Style, make_task
from jaxrl_llm.tasks.task import Task


def file_task(
  setup: Setup,
  *,
  path: str | os.PathLike | None = None,
  test_path: str | os.PathLike | None = None,
  test_fraction: float | None = None,
  question_column: str = "question",
  answer_column: str = "answer",
  level_column: str | None = None,
  response_column: str | None = None,
  id_column: str | None = None,
  prompt_template: str = "{question}",
  reward: str | Sequence[str] | None = None,
) -> Task:
  """A task made of one's own files, named "file".

  Args:
    setup: what every task is told.
    path: problems to train on.
    test_path: problems to test on; None holds out some of `path`.
    test_fraction: of `path`, held out; None is 0.1.
    question_column: the problem.
    answer_column: the right answer.
    level_column: difficulty, a whole number.
    response_column: a solution to imitate in the warm start.
    id_column: tells rows apart, besides their questions.
    prompt_template: the prompt, with columns in braces.
    reward: name or names of reward functions; the first is the verifier. None is what suits the answers; see `reward_for`.

  Raises:
    ValueError: a file, a column, a template or rows that cannot be used. One line.
  """
  files = check_file(path, test_path, test_fraction)
  others = tuple(name for name in prompt_template_lib.fields(prompt_template) if name not in COLUMNS)
  mapped = Columns(question_column, answer_column, level_column, response_column, id_column, others)
  records = {split: functools.partial(columns_lib.read, file, mapped) for split, file in files.items()}
  key = tables.key_of(list(files.values()), [mapped, list(files), [os.path.splitext(file)[1] for file in files.values()]])
  style = Style(prompt_template, (), test_fraction=0.1 if test_fraction is None else test_fraction).with_settings(reward=reward)
  return make_task("file", records, columns_lib.mapping(mapped), key=key, style=style, setup=setup, columns=others)


def check_file(
  path: str | os.PathLike | None = None, test_path: str | os.PathLike | None = None, test_fraction: float | None = None, **others: object
) -> dict[str, pathlib.Path]:
  """Refuses files of `file_task` that cannot be used; see `text_files.check_splits`. Its other settings are not looked at."""
  del others
  return text_files.check_splits(path, test_path, test_fraction, rows="problems", example="problems.jsonl")
