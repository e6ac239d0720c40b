"""From the records of a file to problems: which column is what, and what a record lacks to be a problem."""

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
from jaxrl_llm.tasks.files.storage import Row
from jaxrl_llm.tasks.files.text_files import Fault, Record, Records

_PATIENCE = 100  # Records to look for a column in.
_LARGEST = 2**63 - 1


class Columns(NamedTuple):
  """Which column of a file holds what.

  Attributes:
    question: the problem.
    answer: the right answer; None where there is none, and the reward must not need one.
    level: difficulty, a whole number or a text with one in it; None for level 0 throughout.
    response: a solution to imitate; None for no demonstrations. A row without one is a problem only.
    id: what makes a row itself; None for its question.
    others: further columns, for the prompt or the reward.
  """

  question: str = "question"
  answer: str | None = "answer"
  level: str | None = None
  response: str | None = None
  id: str | None = None
  others: tuple[str, ...] = ()

  def named(self) -> tuple[str, ...]:
    """All columns, each once."""
    mapped = (self.question, self.answer, self.level, self.response, self.id, *self.others)
    return tuple(dict.fromkeys(name for name in mapped if name is not None))


class Unusable(Exception):
  """A record that is no problem.

  Args:
    reason: the same words for the same fault.
    detail: what this record has.
  """

  def __init__(self, reason: str, detail: str = ""):
    super().__init__(reason, detail)
    self.reason, self.detail = reason, detail


Convert = Callable[[Record], Row]
"""A record to a row with at least `question` and what `BLANK` has; raises `Unusable`."""

BLANK = {"answer": "", "level": 0, "response": "", "id": ""}
"""What stands in a row whose record does not have it."""


def _identity(row: Row) -> dict[str, tuple[str, ...]]:
  keys = {"duplicate question": (row["question"],)}
  return keys | {"duplicate id": (row["id"],)} if row["id"] else keys


def problems(
  records: Records, convert: Convert, tally: Tally, *, seen: set[bytes], identity: Callable[[Row], Mapping[str, tuple]] = _identity
) -> Iterator[Row]:
  """Rows of those records that are problems, each with its `place`; the tally has the others.

  Args:
    records: of some files.
    convert: makes a row of a record.
    tally: counts what is dropped, or refuses it.
    seen: digests of what came before, so that each row is kept once; grows.
    identity: texts that no two rows may share, by the reason for leaving out the second one.

  Raises:
    ValueError: a bad row, where the tally refuses those.
  """
  for place, record in records:
    try:
      if isinstance(record, Fault):
        raise Unusable(*record)
      row = {**convert(record), "place": os.path.basename(place)}
      check(row)
      keys = identity(row)
      digests = {hashlib.blake2b(json.dumps([reason, key]).encode(), digest_size=12).digest(): reason for reason, key in keys.items()}
      if repeated := [reason for digest, reason in digests.items() if digest in seen]:
        raise Unusable(repeated[-1], row.get("id") or short(next(iter(keys.values()))[0]))
    except Unusable as error:
      tally.bad(error.reason, place, error.detail)
      continue
    seen.update(digests)
    yield row


def check(row: Row) -> None:
  """Refuses a row that no file can hold or no policy can be given.

  Raises:
    Unusable: text with bytes that are no UTF-8, an empty question, a level out of range.
  """
  for name, value in row.items():
    if isinstance(value, str):
      try:
        value.encode()
      except UnicodeEncodeError as error:
        raise Unusable("not UTF-8", f"column {name!r}, character {error.start}") from None
    elif not isinstance(value, int):
      raise Unusable(f"{name} is no text", type(value).__name__)
    elif abs(value) > _LARGEST:
      raise Unusable("level out of range", short(str(value)))
  if "question" in row and not row["question"].strip():
    raise Unusable("empty question")


def check_columns(records: Records, columns: Columns, path: str) -> None:
  """Refuses a file that does not have the columns, by its first records.

  Raises:
    ValueError: none of the first 100 records has a column; with the nearest that they do have.
  """
  names: dict[str, None] = {}
  for _, record in itertools.islice(records, _PATIENCE):
    if not isinstance(record, Fault):
      names.update(dict.fromkeys(record))
  for name in columns.named():
    if names and name not in names:
      there = ", ".join(map(_plain, list(names)[:12]))
      raise ValueError(f"{path}: found no column {name!r}, but {there}{did_you_mean(name, names)}")


def read(path: os.PathLike, columns: Columns) -> Records:
  """Records of a file; it is refused first if `check_columns` says so."""
  check_columns(text_files.read(path), columns, str(path))
  yield from text_files.read(path, columns=columns.named())


def mapping(columns: Columns) -> Convert:
  """A converter for records that need no more than their columns named.

  A record may lack the response, and is a problem only.
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
  """A column's text: as it stands, numbers as they are written, lists and objects as JSON.

  Args:
    record: of a file.
    name: the column.
    empty: whether null and "" are a text too, the empty one.

  Raises:
    Unusable: no such column, null, empty, not finite.

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
  """A column's whole number, or the only one in its text, as in "Level 3".

  Raises:
    Unusable: there is none, or several.
  """
  value = text(record, name)
  numbers = re.findall(r"(?<!\w)-?[0-9]{1,15}|[0-9]{1,15}", value)
  if len(numbers) != 1 or re.search(r"[0-9][.,][0-9]|[0-9]{16}", value):
    raise Unusable(f"{name} is no whole number", short(value))
  return int(numbers[0])


def short(value: str) -> str:
  """The beginning of a text on one line, for a message."""
  return repr(value if len(value) <= 60 else f"{value[:60]}...")


def _plain(name: str) -> str:
  """A column's name on one line, whatever it is."""
  return (name if name.isprintable() else ascii(name)[1:-1])[:40]
