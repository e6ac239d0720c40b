"""Conversion of a file's records to problems: mapping of columns and checks of each record."""

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.tasks.files import text_files
from jaxrl_llm.tasks.files.report import Tally
from jaxrl_llm.tasks.files.storage import IMAGES, Row, picture_digests
from jaxrl_llm.tasks.files.text_files import Fault, Record, Records

_PATIENCE = 100  # Records in which to look for a column.
_LARGEST = 2**63 - 1


class Columns(NamedTuple):
  """The names of a file's columns.

  Attributes:
    question: Column of the problem.
    answer: Column of the right answer; None if there is none, in which case the reward must not
      need one.
    level: Column of the difficulty, a whole number or a text that contains one; None is level 0 for
      all rows.
    response: Column of a solution to imitate; None for no demonstrations. A row without a solution
      is a problem only.
    id: Column that identifies a row; None identifies it by its question.
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


class Unusable(Exception):
  """The error for a record that is not a usable problem.

  Args:
    reason: Fixed text for each kind of fault.
    detail: Offending content of this record.
  """

  def __init__(self, reason: str, detail: str = ""):
    super().__init__(reason, detail)
    self.reason, self.detail = reason, detail


Convert = Callable[[Record], Row]
"""Function `record -> row` with at least `question` and `BLANK`'s keys; raises `Unusable`."""

BLANK = {"answer": "", "level": 0, "response": "", "id": ""}
"""Defaults for columns that a record lacks."""


def _identity(row: Row) -> dict[str, tuple[str, ...]]:
  keys = {"duplicate question": (row["question"], *picture_digests(row))}
  return keys | {"duplicate id": (row["id"],)} if row["id"] else keys


def usable_rows(
  records: Records, convert: Convert, tally: Tally, *, seen: set[bytes], identity: Callable[[Row], Mapping[str, tuple]] = _identity
) -> Iterator[Row]:
  """Yields the usable records as rows with their `place`; the tally counts the others.

  Args:
    records: Records of some files.
    convert: Function from a record to a row.
    tally: Counter of bad rows, which drops or rejects them.
    seen: Digests of the rows so far, updated in place, so that each row is kept once.
    identity: Function from a row to the texts that no two rows may share, by the reason for
      dropping the second row.

  Raises:
    ValueError: If a row is bad and the tally's policy is "error".
  """
  for place, record in records:
    try:
      if isinstance(record, Fault):
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
  names: dict[str, None] = {}
  for _, record in itertools.islice(records, _PATIENCE):
    if not isinstance(record, Fault):
      names.update(dict.fromkeys(record))
  for name in columns.named():
    if names and name not in names:
      there = ", ".join(map(_plain, list(names)[:12]))
      raise ValueError(f"{path}: found no column {name!r}, but {there}{did_you_mean(name, names)}")


def read_columns(path: os.PathLike, columns: Columns) -> Records:
  """Yields the records of a file, after checking that it has the columns."""
  check_columns(text_files.read_records(path), columns, str(path))
  yield from text_files.read_records(path, columns=columns.named())


def mapping(columns: Columns) -> Convert:
  """Returns a converter for records whose columns only have to be renamed.

  A record without a response is a problem only.
  """

  def convert(record: Record) -> Row:
    row = {name: text(record, name, empty=name not in (columns.question, columns.answer)) for name in columns.others}
    return row | {
      "question": text(record, columns.question),
      "answer": "" if columns.answer is None else text(record, columns.answer),
      "level": 0 if columns.level is None else whole_number(record, columns.level),
      "response": text(record, columns.response, empty=True) if columns.response in record else "",
      "id": "" if columns.id is None else text(record, columns.id),
    }

  return convert


def text(record: Record, name: str, *, empty: bool = False) -> str:
  """Returns a column as text: strings and numbers as written, lists and objects as JSON.

  Args:
    record: Record of a file.
    name: Name of the column.
    empty: Whether null and "" are allowed, both as the empty text.

  Raises:
    Unusable: If there is no such column, or its value is null, empty or not finite.

  Example:
    >>> text({"answer": 7.0}, "answer"), text({"choices": ["a", "b"]}, "choices")
    ('7', '["a", "b"]')
  """
  if name not in record:
    raise Unusable(f"no column {name!r}", did_you_mean(name, record, "did you mean {!r}?"))
  value = record[name]
  if isinstance(value, bytes):
    value = value.decode("utf-8", "surrogateescape")
  if isinstance(value, float):
    if not math.isfinite(value):
      raise Unusable(f"{name} is {value}")
    value = int(value) if value.is_integer() and abs(value) < 2**53 else value
  if value is None:
    if not empty:
      raise Unusable(f"{name} is null")
    return ""
  if not isinstance(value, str):
    value = str(value) if type(value) in (int, float) else json.dumps(value, ensure_ascii=False, default=str)
  if not empty and not value.strip():
    raise Unusable(f"{name} is empty")
  return value


def whole_number(record: Record, name: str) -> int:
  """Returns a column's whole number, or the only one in its text, such as "Level 3".

  Raises:
    Unusable: If there is no whole number, or several.
  """
  value = text(record, name)
  numbers = re.findall(r"(?<!\w)-?[0-9]{1,15}|[0-9]{1,15}", value)
  if len(numbers) != 1 or re.search(r"[0-9][.,][0-9]|[0-9]{16}", value):
    raise Unusable(f"{name} is no whole number", short(value))
  return int(numbers[0])


def short(value: str) -> str:
  """Returns the beginning of a text on one line, for a message."""
  return repr(value if len(value) <= 60 else f"{value[:60]}...")


def _plain(name: str) -> str:
  """Returns a column's name as one printable line."""
  return (name if name.isprintable() else ascii(name)[1:-1])[:40]
