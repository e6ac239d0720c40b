"""Conversion of a file's records to problems: mapping of columns and checks of each record."""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.tasks.files import chats, text_files
from jaxrl_llm.tasks.files.chats import CONVERSATION
from jaxrl_llm.tasks.files.report import Tally
from jaxrl_llm.tasks.files.storage import IMAGES, Row, picture_digests
from jaxrl_llm.tasks.files.text_files import FileFault, Record, Records
from jaxrl_llm.tasks.files.values import Unusable, find, names_in, short, shown, text, whole_number

_PATIENCE = 100  # Records in which to look for a column.
_LARGEST = 2**63 - 1


class Columns(NamedTuple):
  """The names of a file's columns.

  A name with dots goes into an object or a list, as in `reward_model.ground_truth`.

  Attributes:
    question: Column of the problem, a text or a chat.
    answer: Column of the right answer; None if there is none, in which case the reward must not
      need one.
    level: Column of the difficulty, a whole number or a text that contains one; None is level 0 for
      all rows.
    response: Column of a solution to imitate; None takes the assistant's message at the end of
      a chat of `question`. A row without a solution is a problem only.
    id: Column that identifies a row, besides what its prompt shows; None for no such column.
    others: Further columns that the prompt or the reward reads.
    images: Column of the pictures; None for problems of text alone.
  """

  question: str = "question"
  answer: str | None = "answer"
  level: str | None = None
  response: str | None = None
  id: str | None = None
  others: tuple[str, ...] = ()
  images: str | None = None

  def named(self) -> tuple[str, ...]:
    """Returns all columns, each once."""
    mapped = (self.question, self.answer, self.level, self.response, self.id, *self.others, self.images)
    return tuple(dict.fromkeys(name for name in mapped if name is not None))


Convert = Callable[[Record], Row]
"""Function `record -> row` with at least `question` and `BLANK`'s keys; raises `Unusable`."""

BLANK = {"answer": "", "level": 0, "response": "", "id": ""}
"""Defaults for columns that a record lacks."""


def identity_of(*names: str) -> Callable[[Row], dict[str, tuple[str, ...]]]:
  """Returns the function from a row to what no other row may have, by the reason to drop the other.

  Two rows with the same prompt are one problem; if their answers differ, one of them is wrong.

  Args:
    *names: Columns that a prompt shows besides the question, the conversation and the pictures.

  Example:
    >>> row = {"question": "Which?", "choices": "(A) 1", "answer": "A", "id": ""}
    >>> identity_of("choices")(row)["duplicate question"]
    ('Which?', '(A) 1', 'A')
  """

  def identity(row: Row) -> dict[str, tuple[str, ...]]:
    prompt = (row["question"], *(str(row[name]) for name in (CONVERSATION, *names) if row.get(name)), *picture_digests(row))
    keys = {"duplicate question with another answer": prompt, "duplicate question": (*prompt, row["answer"])}
    return keys | {"duplicate id": (row["id"],)} if row["id"] else keys

  return identity


def usable_rows(
  records: Records, convert: Convert, tally: Tally, *, seen: set[bytes], identity: Callable[[Row], Mapping[str, tuple]] | None = None
) -> Iterator[Row]:
  """Yields the usable records as rows with their `place`; the tally counts the others.

  Args:
    records: Records of some files.
    convert: Function from a record to a row.
    tally: Counter of bad rows, which drops or rejects them.
    seen: Digests of the rows so far, updated in place, so that each row is kept once.
    identity: Function from a row to the texts that no two rows may share, by the reason for
      dropping the second row; the last reason that applies is given. None is `identity_of()`.

  Raises:
    ValueError: If a row is bad and the tally's policy is "error".
  """
  identity = identity or identity_of()
  for place, record in records:
    try:
      if isinstance(record, FileFault):
        raise Unusable(*record)
      row = {**convert(record), "place": os.path.basename(place)}
      check_row(row)
      keys = identity(row)
      digests = {hashlib.blake2b(json.dumps([reason, key]).encode(), digest_size=12).digest(): reason for reason, key in keys.items()}
      if repeated := [reason for digest, reason in digests.items() if digest in seen]:
        raise Unusable(repeated[-1], row.get("id") or short(next(iter(keys.values()))[0]))
    except Unusable as error:
      tally.bad(error.reason, place, error.detail)
      continue
    except RecursionError:
      tally.bad("nested too deep", place)
      continue
    seen.update(digests)
    yield row


def check_row(row: Row) -> None:
  """Checks that a row can be stored and its question given to a policy.

  Raises:
    Unusable: If a text is not UTF-8, the question is empty, or the level is out of range.
  """
  for name, value in row.items():
    if isinstance(value, str):
      try:
        value.encode()
      except UnicodeEncodeError as error:
        raise Unusable("not UTF-8", f"column {name!r}, character {error.start}") from None
    elif name == IMAGES:
      continue
    elif not isinstance(value, int):
      raise Unusable(f"{name} is no text", type(value).__name__)
    elif abs(value) > _LARGEST:
      raise Unusable("level out of range", short(str(value)))
  if "question" in row and not row["question"].strip():
    raise Unusable("empty question")


def check_columns(records: Records, columns: Columns, path: str) -> None:
  """Checks from the first records of a file that it has the columns.

  Raises:
    ValueError: If none of the first 100 records has a column. One line, with the nearest existing
      column.
  """
  some = first_records(records)
  for name in columns.named():
    if some and not has(some, name):
      names = dict.fromkeys(itertools.chain.from_iterable(map(names_in, some)))
      there = ", ".join(map(_plain, list(names)[:16]))
      raise ValueError(f"{path}: found no column {name!r}, but {there}{did_you_mean(name, names)}")


def first_records(records: Records) -> list[Record]:
  """Returns those of the first 100 records of a file that can be read."""
  return [record for _, record in itertools.islice(records, _PATIENCE) if not isinstance(record, FileFault)]


def has(records: Sequence[Record], name: str) -> bool:
  """Returns whether one of some records has a column, by its dotted name."""
  absent = object()
  return any(find(record, name, absent) is not absent for record in records)


def read_columns(path: os.PathLike, columns: Columns) -> Records:
  """Yields the records of a file, after checking that it has the columns."""
  check_columns(text_files.read_records(path), columns, str(path))
  yield from text_files.read_records(path, columns=columns.named())


def mapping(columns: Columns) -> Convert:
  """Returns a converter for records whose columns only have to be renamed.

  A question may be a chat, and an answer or a response the last message of one. A record without
  a response is a problem only.
  """

  def convert(record: Record) -> Row:
    row = {name: shown(record, name) for name in columns.others}
    asked = chats.asked(record, columns.question)
    if columns.response in (None, columns.question):
      response = asked.reply
    elif asked.reply:
      raise Unusable(f"{columns.question} ends with the assistant", f"although the response is the column {columns.response!r}")
    else:
      response = chats.said(record, columns.response, empty=True)
    if columns.answer == columns.question:
      answer = asked.reply
      if not answer.strip():
        raise Unusable(f"{columns.answer} does not end with the assistant", "expected the answer there")
    else:
      answer = "" if columns.answer is None else chats.said(record, columns.answer)
    row |= {"question": asked.question, "answer": answer, "response": response}
    row["level"] = 0 if columns.level is None else whole_number(record, columns.level)
    return row | {"id": "" if columns.id is None else text(record, columns.id), CONVERSATION: asked.conversation}

  return convert


def _plain(name: str) -> str:
  """Returns a column's name as one printable line."""
  return (name if name.isprintable() else ascii(name)[1:-1])[:40]
