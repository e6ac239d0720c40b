"""The user's own problems, from a local JSONL, JSON, CSV or Parquet file.

The config names the columns of the file.
"""

import functools
import itertools
import os
import pathlib
from collections.abc import Sequence

from jaxrl_llm.messages import Problem
from jaxrl_llm.pretrained.chat_template import left_out
from jaxrl_llm.pretrained.pictures import check_installed
from jaxrl_llm.tasks import prompt_template as prompt_template_lib
from jaxrl_llm.tasks.answers import check_answers
from jaxrl_llm.tasks.files import columns as columns_lib
from jaxrl_llm.tasks.files import formats, picture_column, tables, text_files
from jaxrl_llm.tasks.files.chats import CONVERSATION, messages_of
from jaxrl_llm.tasks.files.columns import Columns, short
from jaxrl_llm.tasks.files.storage import IMAGES, Row
from jaxrl_llm.tasks.problem_set import COLUMNS, Setup, Style, make_task
from jaxrl_llm.tasks.task import Task
from jaxrl_llm.text_types import Tokenizer

_JUDGED = 1000  # Problems that are looked at for signs of a wrong file.


def file_task(
  setup: Setup,
  *,
  path: str | os.PathLike | None = None,
  test_path: str | os.PathLike | None = None,
  test_fraction: float | None = None,
  question_column: str | None = None,
  answer_column: str | None = None,
  level_column: str | None = None,
  response_column: str | None = None,
  id_column: str | None = None,
  images_column: str | None = None,
  prompt_template: str | None = None,
  reward: str | Sequence[str] | None = None,
) -> Task:
  """Loads a task, named "file", from the user's own files.

  Args:
    setup: Settings common to all tasks.
    path: File of problems to train on.
    test_path: File of problems to test on; None holds out some problems of `path`.
    test_fraction: Fraction of `path` held out; None is 0.1.
    question_column: Column of the problem, a text or a chat; None is that of a published format
      (`formats.QUESTIONS`). As in all columns, a dot goes into an object: `extra_info.question`.
    answer_column: Column of the right answer; None is that of a published format
      (`formats.ANSWERS`).
    level_column: Column of the difficulty, a whole number; None is level 0 for all rows.
    response_column: Column of a solution to imitate in the warm start; None takes the assistant's
      message at the end of a chat.
    id_column: Column that identifies a row, besides its question; None for no such column.
    images_column: Column of the pictures: one or a list of paths relative to the file, bytes, or
      `{bytes, path}` as the package datasets stores them; None for problems of text alone. They
      stand in the prompt at its marks `<image>`, or before the text if it has none.
    prompt_template: Prompt template, with columns in braces; None is the question, with the options
      in the column `choices` or `options` if there is one. In a chat it is the last message.
    reward: Name or names of reward functions; the first is the verifier. None chooses one that
      suits the answers; see `reward_for`.

  Raises:
    ValueError: If a file, column, template or row cannot be used. One line.
  """
  files = check_file(path, test_path, test_fraction)
  some = columns_lib.first_records(text_files.read_records(files["train"]))
  question, answer = formats.known(some, question_column, answer_column)
  options, count = formats.options_column(some, question)
  template = prompt_template or ("{question}" if options is None else f"{{question}}\n{{{options}}}")
  named = dict.fromkeys((*prompt_template_lib.fields(template), *setup.columns))
  others = tuple(name for name in named if name not in COLUMNS)
  for name in (CONVERSATION, IMAGES):
    if name in others:
      fix = "a column that rows do not keep for chats and pictures: rename it, or name it in task.question_column or task.images_column"
      raise ValueError(Problem("task.prompt_template", f"{{{name}}}", fix))
  mapped = Columns(question, answer, level_column, response_column, id_column, others, images_column)
  read = columns_lib.read_columns if images_column is None else picture_column.read
  records = {split: functools.partial(read, file, mapped) for split, file in files.items()}
  stamps = [] if images_column is None else [images_column, *(picture_column.stamp(file, mapped) for file in files.values())]
  key = tables.key_of(list(files.values()), [mapped[:-1], *stamps, list(files), [os.path.splitext(file)[1] for file in files.values()]])
  count = count if options is None or options in others else 0
  style = Style(template, (), test_fraction=0.1 if test_fraction is None else test_fraction, options=count)
  convert, stored = columns_lib.mapping(mapped), (*others, CONVERSATION)
  if images_column is not None:
    convert, stored = picture_column.with_pictures(convert), (*stored, IMAGES)
  task = make_task(
    "file", records, convert, key=key, style=style.with_settings(reward=reward), setup=setup, columns=stored, shown=others
  )
  shown = list(itertools.islice(itertools.chain(task.train, task.test), _JUDGED))
  _check_chats(shown, setup.tokenizer)
  doubts = check_answers(shown, task.rewards[0], column=answer)
  if options is not None and options not in others:
    doubts.append(f"the prompts do not show the options in {options!r}: write {{{options}}} in task.prompt_template")
  return task._replace(report=task.report._replace(columns=formats.in_words(some, mapped, template), doubts=tuple(doubts)))


def _check_chats(rows: Sequence[Row], tokenizer: Tokenizer | None) -> None:
  """Refuses a system message that no chat reads, and a chat template that leaves out messages.

  A message from the config does not replace those of the chats.
  """
  system, template = (getattr(tokenizer, name, None) for name in ("system", "chat_template"))
  roles = [tuple(message["role"] for message in messages_of(row)) if CONVERSATION in row else () for row in rows]
  if system is not None and all(of_row[:1] == ("system",) for of_row in roles):
    fix = "None, because all prompts of the file have system messages of their own"
    raise ValueError(Problem("config.task.system", short(system), fix))
  for of_row in dict.fromkeys(filter(None, roles)) if template is not None else ():
    try:
      missing = left_out(template, [{"role": role, "content": f"message {i}."} for i, role in enumerate(of_row)])
    except ValueError:  # Such rows are bad rows.
      continue
    if missing:
      what = f"leaves out messages of the role {missing['role']}, which chats of the file have"
      raise ValueError(f"{template.path}: the chat template {what}; write chats as plain text: task.chat=False")


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
