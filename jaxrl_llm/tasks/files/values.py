"""Values of a file's records as text, and columns within columns by dotted names."""

import datetime
import decimal
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.tasks.files.text_files import Record

OPTIONS = ("choices", "options")
"""Columns whose lists of texts are the options of a question, each with its letter in a prompt."""

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MISSING = ("nan", "NaN", "<NA>", "NaT")  # How pandas writes a missing value as text.
_DEPTH = 3  # Objects within objects whose keys a message names.
_NONE_GIVEN = object()


class Unusable(Exception):
  """The error for a record that is not a usable problem.

  Args:
    reason: Fixed text for each kind of fault.
    detail: Offending content of this record.
  """

  def __init__(self, reason: str, detail: str = ""):
    super().__init__(reason, detail)
    self.reason, self.detail = reason, detail


def find(record: Record, name: str, default: Any = _NONE_GIVEN) -> Any:
  """Returns the value of a column, or a default that is given if there is no such column.

  A dot goes into an object or a list, which may be written as JSON text. Null there is null.

  Raises:
    KeyError: If there is no such column and no default.

  Example:
    >>> record = {"reward_model": {"style": "rule", "ground_truth": "72"}, "choices": ["a", "b"]}
    >>> find(record, "reward_model.ground_truth"), find(record, "choices.1")
    ('72', 'b')
  """
  if name in record:
    return record[name]
  value: Any = record
  for part in name.split("."):
    value = _opened(value)
    if value is None:
      return None
    if isinstance(value, Mapping) and part in value:
      value = value[part]
    elif isinstance(value, list | tuple) and part.isdecimal() and int(part) < len(value):
      value = value[int(part)]
    elif default is _NONE_GIVEN:
      raise KeyError(name)
    else:
      return default
  return value


def names_in(record: Mapping[str, Any], *, depth: int = _DEPTH) -> Iterator[str]:
  """Yields the names of a record's columns, those within objects with dots.

  Example:
    >>> list(names_in({"prompt": "?", "reward_model": {"style": "rule", "ground_truth": "72"}}))
    ['prompt', 'reward_model.style', 'reward_model.ground_truth']
  """
  for name, value in record.items():
    inner = _opened(value)
    if depth and inner and isinstance(inner, Mapping):
      yield from (f"{name}.{other}" for other in names_in(inner, depth=depth - 1))
    else:
      yield str(name)


def text(record: Record, name: str, *, empty: bool = False) -> str:
  """Returns a column's single value as text.

  A number is its shortest plain decimal, a decimal keeps its digits, a date or time is in ISO's
  form, and a list of one is its item.

  Args:
    record: Record of a file.
    name: Name of the column.
    empty: Whether null and "" are allowed, both as the empty text.

  Raises:
    Unusable: If there is no such column, or its value is null, empty, not finite, an object or
      a list of several.

  Example:
    >>> text({"answer": 7.0}, "answer"), text({"answer": 1e-7}, "answer"), text({"answer": ["2"]}, "answer")
    ('7', '0.0000001', '2')
    >>> text({"price": decimal.Decimal("12.50"), "day": datetime.date(2026, 3, 1)}, "price")
    '12.50'
  """
  value = _required(record, name)
  while isinstance(value, list | tuple) and len(value) == 1:
    (value,) = value
  if isinstance(value, list | tuple) and value:
    raise Unusable(f"{name} is a list of several", f"{short(_json(value, name))}, expected one value")
  if isinstance(value, Mapping):
    keys = list(map(str, value)) or ["KEY"]
    key = next((key for key in keys if key in ("ground_truth", "answer", "value")), keys[0])
    raise Unusable(f"{name} is an object", f"with the keys {', '.join(keys[:6])}, expected one value, such as {name}.{key}")
  if value is None and not empty:
    raise Unusable(f"{name} is null")
  written = "" if value is None or isinstance(value, list | tuple) else _scalar(value, name)
  if not empty and not written.strip():
    raise Unusable(f"{name} is empty")
  if written.strip() in _MISSING:
    raise Unusable(f"{name} is nan")
  return written


def shown(record: Record, name: str) -> str:
  """Returns a column as a prompt shows it.

  Null is the empty text. The options of a question have a letter each and a line each; other lists
  and objects are JSON. All other values are written as by `text`.

  Raises:
    Unusable: If there is no such column, or a number is not finite.

  Example:
    >>> print(shown({"choices": ["red", "blue"]}, "choices"))
    (A) red
    (B) blue
    >>> shown({"table": [[1, 2.50], ["a", None]]}, "table")
    '[[1, 2.5], ["a", null]]'
  """
  value = _required(record, name)
  if value is None:
    return ""
  if not isinstance(value, list | tuple | Mapping):
    return _scalar(value, name)
  options = options_of(value) if name.rpartition(".")[2] in OPTIONS else {}
  return "\n".join(f"({letter}) {_scalar(option, name)}" for letter, option in options.items()) or _json(value, name)


def options_of(value: Any) -> dict[str, Any]:
  """Returns the options of a question by their letters; empty if the value is not such a list.

  Example:
    >>> options_of(["red", "blue"]) == options_of({"label": ["A", "B"], "text": ["red", "blue"]})
    True
  """
  if isinstance(value, Mapping):
    labels, texts = (value.get(name) for name in ("label", "text"))
    both = isinstance(labels, list) and isinstance(texts, list) and len(labels) == len(texts)
    pairs = list(zip(labels, texts, strict=True)) if both else list(value.items())
  else:
    pairs = list(zip(_LETTERS, value, strict=False)) if len(value) <= len(_LETTERS) else []
  plain = all(isinstance(x, str | int | float | decimal.Decimal) for pair in pairs for x in pair)
  return {str(letter): option for letter, option in pairs} if len(pairs) > 1 and plain else {}


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


def _required(record: Record, name: str) -> Any:
  try:
    return find(record, name)
  except KeyError:
    raise Unusable(f"no column {name!r}", did_you_mean(name, names_in(record), "did you mean {!r}?")) from None


def _scalar(value: Any, name: str) -> str:
  if isinstance(value, str):
    return value
  if isinstance(value, bytes):
    return value.decode("utf-8", "surrogateescape")
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, float | decimal.Decimal):
    if not (value.is_finite() if isinstance(value, decimal.Decimal) else math.isfinite(value)):
      raise Unusable(f"{name} is {str(value).lower()}")
    if isinstance(value, float):  # Behind 2^53 not every whole number is a float.
      value = int(value) if value.is_integer() and abs(value) < 2**53 else decimal.Decimal(repr(value))
    return format(value, "f") if isinstance(value, decimal.Decimal) else str(value)
  if isinstance(value, datetime.date | datetime.time):
    return value.isoformat()
  return str(value)


def _json(value: Any, name: str) -> str:
  """Returns a list or an object as JSON, its numbers written as by `_scalar`."""
  if isinstance(value, Mapping):
    return "{" + ", ".join(f"{json.dumps(str(key), ensure_ascii=False)}: {_json(x, name)}" for key, x in value.items()) + "}"
  if isinstance(value, list | tuple):
    return "[" + ", ".join(_json(x, name) for x in value) + "]"
  if value is None:
    return "null"
  written = _scalar(value, name)
  return written if isinstance(value, int | float | decimal.Decimal) else json.dumps(written, ensure_ascii=False)


def _opened(value: Any) -> Any:
  """Returns the object or list that a JSON text holds, and any other value as it is."""
  if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
    try:
      return json.loads(value)
    except (ValueError, RecursionError):
      return value
  return value
