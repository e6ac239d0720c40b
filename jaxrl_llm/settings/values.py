"""Legal values of a config's fields: a test, its wording, and the type that text is read as."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_COUNT = 2**31 - 1
"""Largest size or step: devices count in 32 bits."""


class Check(NamedTuple):
  """Legal values of a field.

  Attributes:
    accepts: Test of a value; `holds` calls it with values of any type.
    words: Description of the legal values that follows "expected" in a message.
    type: Type of the values, to which the command line converts text.
    optional: Whether None is legal although the default is not None.
  """

  accepts: Callable[[Any], bool]
  words: str
  type: type
  optional: bool = False


def holds(check: Check, value: Any) -> bool:
  """Returns whether a value of any type passes a check.

  Example:
    >>> holds(ABOVE_ZERO, 0.1), holds(ABOVE_ZERO, "0.1"), holds(ABOVE_ZERO, 10**400)
    (True, False, False)
  """
  try:
    return bool(check.accepts(value))
  except (TypeError, ValueError, OverflowError):  # Wrong type, or too large for a float.
    return False


def has_type(check: Check, value: Any) -> bool:
  """Returns whether a value has the type of a check; integers and floats are both numbers.

  Example:
    >>> has_type(ABOVE_ZERO, -1), has_type(COUNT, True), has_type(COUNTS, [8])
    (True, False, False)
  """
  if check.type in (int, float):
    return isinstance(value, int | float) and not isinstance(value, bool)
  return isinstance(value, check.type)


def at_least(least: int, why: str = "") -> Check:
  """Accepts whole numbers from `least` to `MAX_COUNT`.

  Args:
    least: Smallest legal number.
    why: Reason for the limit, for the message.

  Example:
    >>> at_least(2, "a group compares samples").words
    'a whole number of at least 2, below 2**31: a group compares samples'
  """
  words = f"a whole number of at least {least}, below 2**31" + (f": {why}" if why else "")
  return Check(lambda x: _is_whole(x) and least <= x <= MAX_COUNT, words, int)


def one_of(*values: str) -> Check:
  """Accepts only the given texts.

  Example:
    >>> one_of("token", "sequence", "none").words
    "'token', 'sequence' or 'none'"
  """
  *first, last = map(repr, values)
  return Check(lambda x: isinstance(x, str) and x in values, f"{', '.join(first)} or {last}", str)


def texts(words: str, *, least: int = 0, accepts: Callable[[str], bool] = bool) -> Check:
  """Accepts tuples of texts.

  Args:
    words: Description of the legal values that follows "expected" in a message.
    least: Minimum number of texts.
    accepts: Test that each text must pass; by default, that it is not empty.
  """
  return Check(lambda x: isinstance(x, tuple) and len(x) >= least and all(isinstance(t, str) and accepts(t) for t in x), words, tuple)


def or_none(check: Check) -> Check:
  """Accepts None as well; a field whose default is None does not need it."""
  return check._replace(optional=True)


def names_path(text: str) -> bool:
  """Returns whether a text is NAME=PATH.

  Example:
    >>> names_path("math=runs/a"), names_path("=runs/a")
    (True, False)
  """
  name, _, path = text.partition("=")
  return bool(name and path) and text.isprintable()


def compiles(pattern: str) -> bool:
  """Returns whether a text is a valid regular expression."""
  try:
    re.compile(pattern)
  except re.error:
    return False
  return True


def _is_whole(x: Any) -> bool:
  return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
  return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _is_line(x: Any) -> bool:
  return isinstance(x, str) and x.isprintable() and len(x) <= 4096


COUNT = at_least(1)
NATURAL = at_least(0)
NUMBER = Check(_is_number, "a finite number", float)
ABOVE_ZERO = Check(lambda x: _is_number(x) and x > 0, "a finite number above 0", float)
SILENCE = Check(lambda x: _is_number(x) and x >= 3, "a finite number of at least 3, because a sign of life comes each second", float)
NOT_NEGATIVE = Check(lambda x: _is_number(x) and x >= 0, "a finite number of at least 0", float)
FRACTION = Check(lambda x: _is_number(x) and 0 <= x < 1, "a number in [0, 1)", float)
SHARE = Check(lambda x: _is_number(x) and 0 < x <= 1, "a number in (0, 1]", float)
INSIDE = Check(lambda x: _is_number(x) and 0 < x < 1, "a number between 0 and 1", float)
UNIT = Check(lambda x: _is_number(x) and 0 <= x <= 1, "a number from 0 to 1", float)
SEED = Check(lambda x: _is_whole(x) and 0 <= x < 2**32, "a whole number from 0 to 2**32 - 1", int)
WORKERS = Check(lambda x: _is_whole(x) and 1 <= x <= 1024, "a whole number of processes from 1 to 1024", int)
AXIS = Check(
  lambda x: _is_whole(x) and (x == -1 or 1 <= x <= MAX_COUNT),
  "a whole number of at least 1, or -1 for all remaining devices",
  int,
)
COUNTS = Check(
  lambda x: isinstance(x, tuple) and len(x) > 0 and all(holds(COUNT, each) for each in x),
  "one or more whole numbers of at least 1, below 2**31, as in (24, 32)",
  tuple,
)
LEVELS = Check(lambda x: isinstance(x, tuple) and all(map(_is_whole, x)), "whole numbers, as in (1, 2)", tuple)
SWITCH = Check(lambda x: isinstance(x, bool), "True or False", bool)
TEXT = Check(_is_line, "text on one line, of printable characters", str)
LINES = Check(lambda x: isinstance(x, str) and "".join(x.split()).isprintable(), "text of printable characters", str)
COLUMN = Check(lambda x: x != "" and _is_line(x), "the name of a column", str)
BRADLEY_TERRY = Check(lambda x: x == "bradley_terry", "'bradley_terry', which trains reward models", str)
OPTIONS = texts("one or more options, as in ('enable_thinking=False', 'date_string=27 Nov 2026')", least=1)
DTYPE = one_of("float32", "bfloat16")
SCHEDULE = one_of("constant", "linear")
