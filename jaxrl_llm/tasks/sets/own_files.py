"""The user's own problems, from a local JSONL, JSON, CSV or Parquet file.

The config names the columns of the file.
"""

import functools
import os
import pathlib
from collections.abc import Sequence

from jaxrl_llm.pretrained.pictures import check_installed
from jaxrl_llm.tasks import prompt_template as prompt_template_lib
from jaxrl_llm.tasks.files import columns as columns_lib
from jaxrl_llm.tasks.files import picture_column, tables, text_files
from jaxrl_llm.tasks.files.columns import Columns
from jaxrl_llm.tasks.files.storage import IMAGES
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
  images_column: str | None = None,
  prompt_template: str = "{question}",
  reward: str | Sequence[str] | None = None,
) -> Task:
  """Loads a task, named "file", from the user's own files.

  Args:
    setup: Settings common to all tasks.
    path: File of problems to train on.
    test_path: File of problems to test on; None holds out some problems of `path`.
    test_fraction: Fraction of `path` held out; None is 0.1.
    question_column: Column of the problem.
    answer_column: Column of the right answer.
    level_column: Column of the difficulty, a whole number; None is level 0 for all rows.
    response_column: Column of a solution to imitate in the warm start; None for no demonstrations.
    id_column: Column that identifies a row, besides its question; None for no such column.
    images_column: Column of the pictures: one or a list of paths relative to the file, bytes, or
      `{bytes, path}` as the package datasets stores them; None for problems of text alone. They
      stand in the prompt at its marks `<image>`, or before the text if it has none.
    prompt_template: Prompt template, with columns in braces.
    reward: Name or names of reward functions; the first is the verifier. None chooses one that
      suits the answers; see `reward_for`.

  Raises:
    ValueError: If a file, column, template or row cannot be used. One line.
  """
  files = check_file(path, test_path, test_fraction)
  named = dict.fromkeys((*prompt_template_lib.fields(prompt_template), *setup.columns))
  others = tuple(name for name in named if name not in COLUMNS)
  mapped = Columns(question_column, answer_column, level_column, response_column, id_column, others, images_column)
  read = columns_lib.read_columns if images_column is None else picture_column.read
  records = {split: functools.partial(read, file, mapped) for split, file in files.items()}
  stamps = [] if images_column is None else [images_column, *(picture_column.stamp(file, mapped) for file in files.values())]
  key = tables.key_of(list(files.values()), [mapped[:-1], *stamps, list(files), [os.path.splitext(file)[1] for file in files.values()]])
  style = Style(prompt_template, (), test_fraction=0.1 if test_fraction is None else test_fraction).with_settings(reward=reward)
  convert = columns_lib.mapping(mapped)
  if images_column is not None:
    convert, others = picture_column.with_pictures(convert), (*others, IMAGES)
  return make_task("file", records, convert, key=key, style=style, setup=setup, columns=others)


def check_file(
  path: str | os.PathLike | None = None,
  test_path: str | os.PathLike | None = None,
  test_fraction: float | None = None,
  images_column: str | None = None,
  **others: object,
) -> dict[str, pathlib.Path]:
  """Rejects missing files and conflicting settings of `file_task`; see `text_files.check_splits`.

  The other settings are ignored.
  """
  del others
  if images_column is not None:
    check_installed()
  return text_files.check_splits(path, test_path, test_fraction, rows="problems", example="problems.jsonl")
