"""Comparison of plain numbers as exact fractions, without an algebra system."""

import re
from fractions import Fraction
from typing import NamedTuple

from jaxrl_llm.rewards.notation import unified

# "0,111" is not a thousand: some write decimals this way.
_GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3})++|[0-9]++"
_PLAIN = re.compile(
  rf"(-?+)(?:({_GROUPED})(\.[0-9]++)?+|(\.[0-9]++)|([0-9]++)/([0-9]++)|\\[dt]?frac\{{([0-9]++)\}}\{{([0-9]++)\}}"
  r"|(?:([0-9]++) \\cdot )?+10\^\{(-?[0-9]{1,4})\})"
)
_MAX_CHARS = 300  # Beyond, int() is slow and may refuse.
PLACES = 6  # Decimal places, and significant digits, that a rounded decimal must have.


class Number(NamedTuple):
  """An exact value as it is written.

  Attributes:
    value: Value.
    places: Decimal places as written; 0 for a whole number or a fraction, which are exact.
  """

  value: Fraction
  places: int = 0


def plain_verdict(gold: str, answer: str) -> bool | None:
  """Returns whether two `unified` answers are equal, or None if that takes an algebra system.

  Decides only if both are plain numbers or are spelt alike.

  Example:
    >>> plain_verdict("0.5", r"\\frac{1}{2}"), plain_verdict("5", "6"), plain_verdict("5", "x = 5")
    (True, False, None)
  """
  if gold == answer and re.search(r"[0-9]", gold):
    return True
  left = _number(gold)
  right = None if left is None else _number(answer)
  return None if left is None or right is None else same(left, right)


def same(left: Number, right: Number) -> bool:
  """Returns whether two numbers are equal, or one is a decimal and the other's rounded value.

  Such a decimal has all of its places right, and at least 6 decimal places and 6 significant
  digits: 0.333333 is 1/3, and neither 0.3333 nor 0.3333334 is; 0.000333 is not 1/3000. Two decimals
  are equal only if they are the same number.

  Example:
    >>> third = Number(Fraction(1, 3))
    >>> same(third, Number(Fraction("0.333333"), 6)), same(third, Number(Fraction("0.3333334"), 7))
    (True, False)
  """
  if left.value == right.value:
    return True
  if bool(left.places) == bool(right.places):
    return False
  exact, rounded = (right, left) if left.places else (left, right)
  scale = 10**rounded.places
  enough = rounded.places >= PLACES and abs(rounded.value) * scale >= 10 ** (PLACES - 1)
  return enough and abs(exact.value - rounded.value) * scale * 2 <= 1


def answer_key(answer: str) -> str:
  """Returns one key for answers that are the same number or are spelt alike, for a majority vote.

  Example:
    >>> answer_key("0.50"), answer_key(r"\\frac{1}{2}"), answer_key("x  = 1")
    ('1/2', '1/2', 'x = 1')
  """
  answer = unified(answer)
  number = _number(answer)
  return answer if number is None else str(number.value)


def _number(text: str) -> Number | None:
  """Returns the value of a plain number; None for anything else."""
  match = _PLAIN.fullmatch(text) if len(text) <= _MAX_CHARS else None
  if match is None:
    return None
  sign, whole, decimals, bare, numerator, denominator, top, bottom, mantissa, exponent = match.groups()
  places = 0
  if whole and not decimals:
    value = Fraction(int(whole.replace(",", "")))
  elif decimals or bare:
    digits = (decimals or bare)[1:]
    places = len(digits)
    value = Fraction(int((whole or "0").replace(",", "") + digits), 10**places)
  elif exponent:
    value = int(mantissa or 1) * Fraction(10) ** int(exponent)
  else:
    numerator, denominator = numerator or top, denominator or bottom
    if not int(denominator):
      return None
    value = Fraction(int(numerator), int(denominator))
  return Number(-value if sign else value, places)
