"""Comparison of a program's results with the expected ones: of its output, and of returned values.

Both compare numbers by one rule, `same_number`.
"""

import decimal
import re
from decimal import Decimal
from typing import Any, NamedTuple

TOLERANCE = 1e-6
"""Error allowed where a float is expected, absolute or relative: the usual one of contests."""

_INTEGER = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(
  r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[+-]?inf(?:inity)?|[+-]?nan", re.IGNORECASE
)
_PADDED = re.compile(r"[+-]?0[0-9]")
_PARTS = re.compile(r"[\[\](){},;]|[^\[\](){},;]+")
_CONTEXT = decimal.Context(prec=50, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, traps=[])
_WHOLE = 2**53  # Float64 has every integer up to here.
_HUGE = 2**2048  # Beyond all floats.


class Number(NamedTuple):
  """A number as a program wrote or returned it.

  Attributes:
    value: Exact value.
    is_float: Whether it is a float: in text, whether it has a point or an exponent.
  """

  value: Decimal
  is_float: bool


def same_number(number: Number, expected: Number, *, tolerance: float = TOLERANCE) -> bool:
  """Returns whether two numbers agree.

  Equal numbers do, as exact decimals, and NaN agrees with NaN. Where a float is expected, an error
  of `tolerance` is allowed, absolute or relative. Where an integer is expected, a float may be off
  by `tolerance`, absolute. Two different whole numbers never agree, unless both are floats beyond
  2⁵³, which have no fraction.

  Example:
    >>> same_number(Number(Decimal("0.333333"), True), Number(Decimal(1) / 3, True))
    True
    >>> same_number(Number(Decimal(1_000_001), False), Number(Decimal(1_000_002), True))
    False
  """
  value, other = number.value, expected.value
  if value.is_nan() or other.is_nan():
    return value.is_nan() and other.is_nan()
  if value == other:
    return True
  if not (value.is_finite() and other.is_finite()):
    return False
  size, largest = other.copy_abs(), max(value.copy_abs(), other.copy_abs())
  may_be_rounded = number.is_float and expected.is_float and largest >= _WHOLE
  if not may_be_rounded and value == value.to_integral_value() and other == other.to_integral_value():
    return False
  allowed = Decimal(repr(tolerance))
  if expected.is_float and size > 1:
    allowed = _CONTEXT.multiply(allowed, size)
  return _CONTEXT.subtract(value, other).copy_abs() <= allowed


def same_output(output: str, expected: str, *, tolerance: float = TOLERANCE) -> bool:
  """Returns whether two outputs agree, line for line and word for word.

  Spaces within lines and empty lines at the beginning and end do not count. Words that are numbers
  agree as `same_number` says, also within brackets and behind commas, as in a printed list. An
  expected word with leading zeros is a text of digits. All other words agree letter for letter, in
  the same case.

  Args:
    output: Output of the program.
    expected: Output that passes.
    tolerance: Error allowed where a float is expected, absolute or relative.

  Example:
    >>> same_output("1  2.50 \\n3\\n\\n", "1 2.5\\n3"), same_output("1 2 3", "1 2\\n3")
    (True, False)
    >>> same_output("[0.333333, 1e-07]", "[0.33333333, 0.0000001]"), same_output("yes", "YES")
    (True, False)
  """
  rows, expected_rows = ([line.split() for line in text.strip().splitlines()] for text in (output, expected))
  if rows == expected_rows:
    return True
  if [*map(len, rows)] != [*map(len, expected_rows)]:
    return False
  pairs = (
    pair for row, other in zip(rows, expected_rows, strict=True) for pair in zip(row, other, strict=True)
  )
  return all(word == other or _same_word(word, other, tolerance) for word, other in pairs)


def _same_word(word: str, expected: str, tolerance: float) -> bool:
  parts, others = _PARTS.findall(word), _PARTS.findall(expected)
  return len(parts) == len(others) and all(
    a == b or _same_part(a, b, tolerance) for a, b in zip(parts, others, strict=True)
  )


def _same_part(part: str, expected: str, tolerance: float) -> bool:
  if _PADDED.match(expected) and _INTEGER.fullmatch(expected):
    return False
  number, other = _number(part), _number(expected)
  return number is not None and other is not None and same_number(number, other, tolerance=tolerance)


def _number(word: str) -> Number | None:
  if _FLOAT.fullmatch(word) is None:
    return None
  try:
    return Number(Decimal(word), _INTEGER.fullmatch(word) is None)
  except decimal.InvalidOperation:  # An exponent of twenty digits.
    return None


def same_value(value: Any, expected: Any, *, tolerance: float = TOLERANCE) -> bool:
  """Returns whether two plain values agree.

  Tuples and lists are the same, numbers agree as `same_number` says, and True is not 1. Texts and
  keys of dicts agree exactly.

  Args:
    value: Value that the program returned.
    expected: Value that passes.
    tolerance: Error allowed where a float is expected, absolute or relative.

  Example:
    >>> same_value((1, [2.0]), [1, (2.0,)]), same_value(True, 1), same_value(1, 1.0)
    (True, False, True)
    >>> same_value({"mean": [0.333333]}, {"mean": [0.3333333333]})
    True
  """
  if isinstance(expected, list | tuple):
    alike = isinstance(value, list | tuple) and len(value) == len(expected)
    return alike and all(same_value(a, b, tolerance=tolerance) for a, b in zip(value, expected, strict=True))
  if isinstance(expected, dict):
    alike = isinstance(value, dict) and value.keys() == expected.keys()
    return alike and all(same_value(value[key], expected[key], tolerance=tolerance) for key in expected)
  if isinstance(expected, bool) or isinstance(value, bool):
    return value is expected
  if not (isinstance(value, int | float) and isinstance(expected, int | float)):
    return value == expected
  is_float, expects_float = isinstance(value, float), isinstance(expected, float)
  if value == expected or not (is_float or expects_float):
    return value == expected
  if not all(
    is_float or -_HUGE < number < _HUGE for number, is_float in ((value, is_float), (expected, expects_float))
  ):
    return False  # An integer beyond all floats, whose decimal digits take quadratic time.
  return same_number(
    Number(Decimal(value), is_float), Number(Decimal(expected), expects_float), tolerance=tolerance
  )
