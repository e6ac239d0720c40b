"""Numbers as people write them: which one is meant, and which is only a part of what is written.

A text is cut into runs at words and punctuation, and a run into sides at equals signs. A number is
meant if it is all of a side: 42, $42.00, 6 * 7 = 42. It is a part in 1/2, 2^3, 3-5, 5:30, 5x.
"""

import re
from decimal import Decimal, localcontext
from typing import NamedTuple

from jaxrl_llm.rewards.number_tokens import NUMBER, classes

_MAX_CHARS = 500  # Characters of a statement that are read.
_BEFORE, _BEHIND = 120, 60  # Characters around the last digit that are read.

_PLAIN = re.compile(rf"([-+]?)[$\u00a3\u20ac]?(-?)({NUMBER})")
_RESULT = re.compile(
  rf"(?:^|[:=][ ])((?:-|[$])?(?:{NUMBER}))[.]?$"
)  # "A: 18", which needs no reading of the line.

EXAMPLES = (
  ("42", "42"), ("$1,200.50", "1200.5"), ("-42", "-42"), ("minus 42", "-42"), ("42%", "42"),
  ("42 apples", "42"), ("42kg", "42"),
  ("42 cm^2", "42"), ("42nd", "42"), ("42/day", "42"), (r"1{,}200 \text{ m}", "1200"), (r"90^\circ", "90"),
  ("2 million", "2000000"),
  ("5k", "5000"), ("3 dozen", "36"), ("x = 42", "42"), ("7 x 3 = 21", "21"), (r"7 \times 3 = 21", "21"),
  (r"7 \cdot 3 = 21", "21"),
  ("40 cents + 2 cents = 42 cents", "42"), ("42 for 3 people", "42"), ("42 (not 43)", "42"), ("1.200", "1.2"),
  ("1/2", ""), (r"\frac{1}{2}", ""), ("\u00bd", ""), ("2 1/2", ""), ("2 and a half", ""), ("2\u00b3", ""),
  ("2^3", ""), ("1.5e3", ""),
  ("1.5 x 10^3", ""), (r"5\sqrt{2}", ""), ("5x", ""), ("5 + 2", ""), ("3-5", ""), ("3 to 5", ""), ("3:4", ""),
  ("5:30", ""), ("2024-01-05", ""),
  ("12/25/2020", ""), ("5 or 6", ""), ("5 and 6", ""), ("5, 6", ""), ("3 hours 20 minutes", ""),
  ("x > 5", ""), ("12,00", ""), ("1 200", ""),
  ("1.200,50", ""), ("0.333...", ""), ("\uff14\uff12", ""), ("7 mod 5", ""), ("not 42", ""),
)  # fmt: skip
"""Pairs of what is stated and the number that it is; empty if it is no plain number."""


class Run(NamedTuple):
  """Numbers and operators without words between them, but for units.

  Attributes:
    value: The number that is meant, in one spelling for equal numbers; empty if there is none.
    leads: Whether no word stands before it.
  """

  value: str
  leads: bool


def leading_number(text: str) -> str | None:
  """Returns the number that a statement begins with.

  Returns:
    The number, in one spelling for equal numbers, empty if the statement begins with something else
    made of digits or is a formula, or None if it begins with words or is empty.

  Example:
    >>> leading_number("$1,200.00 for 3 people"), leading_number("1/2"), leading_number("She has 2.")
    ('1200', '', None)
  """
  if (plain := canonical(text)) is not None:
    return plain
  runs = _runs(text[:_MAX_CHARS], is_statement=True)
  return runs[0].value if runs and runs[0].leads else None


def last_number(text: str, *, is_statement: bool = False) -> str | None:
  """Returns the last number of a text.

  Args:
    text: Text of any length; its last line that has a digit is read.
    is_statement: Whether the text states the answer, so that "5 apples and 6 pears" is one run.

  Returns:
    The number, in one spelling for equal numbers, empty if it is only a part of what is written, or
    None if the text has no digits.

  Example:
    >>> last_number("48 + 24 = 72 clips, all in all."), last_number("It is 1/2."), last_number("None.")
    ('72', '', None)
  """
  end = max(map(text.rfind, "0123456789")) + 1
  if not text.isascii():
    end = next((i for i in range(len(text), end, -1) if text[i - 1].isdigit()), end)
  if not end:
    return None
  start = max(text.rfind("\n", 0, end) + 1, end - _BEFORE)
  while start and text[start - 1] in "0123456789,.":  # A number is not cut in two.
    start -= 1
  stop = text.find("\n", end, end + _BEHIND)
  line = text[start : stop if stop >= 0 else end + _BEHIND]
  if plain := _RESULT.search(line):
    return canonical(plain[1])
  runs = _runs(line, is_statement=is_statement)
  return runs[-1].value if runs else ""


def canonical(number: str) -> str | None:
  """Returns the one spelling of a number's value, or None if the text is no plain number.

  Example:
    >>> canonical("$1,200.00"), canonical("-0.50"), canonical("1/2")
    ('1200', '-0.5', None)
  """
  match = _PLAIN.fullmatch(number)
  return _spelling(match[3], "-" in match[1] + match[2], 1) if match else None


def _spelling(digits: str, is_negative: bool, scale: int) -> str:
  digits = re.sub(r"[^0-9.]", "", digits)
  if scale != 1:
    with localcontext(prec=len(digits) + 20):
      digits = format(Decimal(digits) * scale, "f")
  whole, _, decimals = digits.partition(".")
  whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
  spelling = f"{whole}.{decimals}" if decimals else whole
  return f"-{spelling}" if is_negative and spelling != "0" else spelling


class _Side:
  """One side of an equation while it is read: its numbers, and whether they are only a part."""

  __slots__ = ("is_negative", "is_part", "numbers", "scale")

  def __init__(self):
    self.numbers, self.is_negative, self.scale, self.is_part = [], False, 1, False

  def value(self) -> str:
    """Returns the number if it is all of the side, else an empty text."""
    return (
      _spelling(self.numbers[0], self.is_negative, self.scale)
      if len(self.numbers) == 1 and not self.is_part
      else ""
    )


def _runs(text: str, *, is_statement: bool) -> list[Run]:
  runs, sides, words_before, unit = [], [_Side()], False, False
  for kind, token in (*classes(text, is_statement=is_statement), ("S", "")):
    side = sides[-1]
    ends = kind == "S" or (unit and kind in "NXM")  # Words were no unit: no operator follows them.
    if ends:
      if (value := _value_of(sides)) is not None:
        runs.append(Run(value, not words_before or len(sides) > 1))
      words_before = words_before or unit
      sides, unit = [side := _Side()], False
    if kind in "NX":  # X: a fraction, a power, other digits.
      side.numbers.append(token)
      side.is_part = side.is_part or kind == "X"
    elif kind == "M":
      side.is_negative = not side.is_negative
    elif kind == "A":
      side.scale *= int(token)
    elif kind == "J":
      side.is_part, unit = True, False
    elif kind == "E":
      sides.append(_Side())
      unit = False
    elif kind == "W" and side.numbers:
      unit = True  # A unit, if an operator follows.
    elif kind == "W":
      words_before = words_before or len(sides) == 1
      sides[-1] = _Side()
  return runs


def _value_of(sides: list[_Side]) -> str | None:
  """Returns the number that the sides of an equation give; None if they have no digits."""
  if not any(side.numbers for side in sides):
    return None
  values = [side.value() for side in sides if side.numbers or side.is_part]
  # "7 x 3 = 21" or, if only the first side is a number, "21 = 7 x 3".
  return values[-1] or (values[0] if len(values) > 1 and not any(values[1:]) else "")
