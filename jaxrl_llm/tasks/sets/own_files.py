"""One's own problems: any local JSONL, JSON, CSV or Parquet file, its columns named in the config."""

import os
from collections.abc import Iterator, Sequence

from jaxrl_llm.messages import Problem
from jaxrl_llm.tasks import prompt_template as prompt_template_lib
from jaxrl_llm.tasks.files import columns as columns_lib
from jaxrl_llm.tasks.files import tables, text_files
from jaxrl_llm.tasks.files.columns import Columns
from jaxrl_llm.tasks.files.report import Tally
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.problem_set import Setup, Style, make_task
from jaxrl_llm.tasks.task import Task

COLUMNS = ("question", "answer", "level", "response", "id", "place")
"""What a stored row has whatever its file."""


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
  reward: str | Sequence[str] = "final_number",
) -> Task:
  """A task made of one's own files.

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
    reward: name or names of reward functions; the first is the verifier.

  Returns:
    The task, named "file".

  Raises:
    ValueError: a file, a column, a template or rows that cannot be used. One line.
  """
  mapped = check_file(
    path=path,
    test_path=test_path,
    test_fraction=test_fraction,
    question_column=question_column,
    answer_column=answer_column,
    level_column=level_column,
    response_column=response_column,
    id_column=id_column,
    prompt_template=prompt_template,
  )
  # Test problems are read first: one that is in both files stays held out.
  files = {split: text_files.check(file) for split, file in (("test", test_path), ("train", path)) if file is not None}
  seen: set[bytes] = set()

  def reading(file: os.PathLike):
    def generate(tally: Tally) -> Iterator[Row]:
      columns_lib.check_columns(text_files.read(file), mapped, str(file))
      yield from columns_lib.problems(text_files.read(file, columns=mapped.named()), columns_lib.mapping(mapped), tally, seen=seen)

    return generate

  sources, found = tables.open_table(
    "file",
    tables.key_of(list(files.values()), [mapped, list(files), [os.path.splitext(file)[1] for file in files.values()]]),
    {split: reading(file) for split, file in files.items()},
    columns=(*COLUMNS, *mapped.others),
    data_dir=setup.data_dir,
    bad_rows=setup.bad_rows,
  )
  rewards = (reward,) if isinstance(reward, str) else tuple(reward)
  style = Style(prompt_template, rewards, test_fraction=0.1 if test_fraction is None else test_fraction)
  return make_task("file", sources, found, style=style, setup=setup)


def check_file(
  *,
  path: str | os.PathLike | None = None,
  test_path: str | os.PathLike | None = None,
  test_fraction: float | None = None,
  prompt_template: str = "{question}",
  **named: str | None,
) -> Columns:
  """Refuses settings of `file_task` that cannot work; opens no file.

  Args:
    path: see `file_task`, as all others.
    test_path: likewise.
    test_fraction: likewise.
    prompt_template: likewise.
    **named: the columns.

  Returns:
    The columns to read.

  Raises:
    ValueError: one line.
  """
  if path is None:
    raise ValueError(Problem("task.path", "None", "a file of problems, such as problems.jsonl"))
  text_files.check(path)
  if test_path is not None:
    text_files.check(test_path)
    if test_fraction is not None:
      found = f"{test_fraction} with test problems of their own in task.test_path; set one of the two"
      raise ValueError(Problem("task.test_fraction", found))
  mapped = Columns(**{name.removesuffix("_column"): column for name, column in named.items()})
  return mapped._replace(others=tuple(name for name in prompt_template_lib.fields(prompt_template) if name not in COLUMNS))
