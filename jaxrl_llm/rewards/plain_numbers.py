"""Comparison of answers without an algebra system, with the verdict that it would give."""

import re
from fractions import Fraction

# Maps lookalikes to one spelling. Letters of other scripts are kept: a Cyrillic x is not an x.
_LOOKALIKES = {
  **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),
  **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\t\n\r", " "),
  **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad\u061c\u200e\u200f", ""),
  **{chr(0xFF01 + i): chr(0x21 + i) for i in range(0x5E)},  # Full-width forms.
  **{chr(0x1D7CE + i): str(i % 10) for i in range(50)},  # Digits of the mathematical alphabets.
  **{char: f"^{{{i}}}" for i, char in enumerate("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")},
  **{
    "\u00d7": "\\times ", "\u00b7": "\\cdot ", "\u22c5": "\\cdot ", "\u00f7": "/", "\u2215": "/", "\u2044": "/", "\u03c0": "\\pi ",
    "\u221e": "\\infty ", "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne ", "\u00b1": "\\pm ", "\u00b0": "^\\circ ",
    "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ", "\u00bd": "\\frac{1}{2}", "\u00bc": "\\frac{1}{4}",
    "\u00be": "\\frac{3}{4}", "\u2153": "\\frac{1}{3}", "\u2154": "\\frac{2}{3}",
  },
}  # fmt: skip
_TABLE = str.maketrans(_LOOKALIKES)
_ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|(\\d+|[a-zA-Z]))")

_SPACED = re.compile(r"(?<![\w.,/^{-])([1-9][0-9]{0,2}(?: [0-9]{3})++)(?![\w.,/^])")

# "0,111" is not a thousand: some write decimals this way.
_GROUPED = r"[1-9][0-9]{0,2}(?:,[0-9]{3})++|[0-9]++"
_PLAIN = re.compile(rf"(-?+)(?:({_GROUPED})(\.[0-9]++)?+|(\.[0-9]++)|([0-9]++)/([0-9]++)|\\[dt]?frac\{{([0-9]++)\}}\{{([0-9]++)\}})")
_MAX_DIGITS = 12  # Longer decimals round in ways not worth imitating. Whole numbers are exempt.
_CLEARLY = Fraction(1, 10_000)  # math-verify compares decimals to 6 places.


def unified(answer: str) -> str:
  """Returns an answer with one spelling for characters that look alike, such as the minus sign.

  Runs of spaces become one space, and spaces between thousands are removed.

  Example:
    >>> unified("\u22125 \u00d7 x\u00b2"), unified("\uff11\uff12 000")
    ('-5 \\\\times x^{2}', '12000')
  """
  if not answer.isascii():
    answer = _ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", answer.translate(_TABLE))
  return _SPACED.sub(lambda match: match[0].replace(" ", ""), " ".join(answer.split()))


def plain_verdict(gold: str, answer: str) -> bool | None:
  """Returns whether two `unified` answers are equal, or None if that takes an algebra system.

  Decides only if both are plain numbers or are spelt alike.

  Example:
    >>> plain_verdict("0.5", r"\\frac{1}{2}"), plain_verdict("5", "6"), plain_verdict("5", "x = 5")
    (True, False, None)
  """
  if gold == answer and re.search(r"[0-9]", gold):
    return True
  left, right = _number(gold), _number(answer)
  if left is None or right is None:
    return None
  (left, left_whole), (right, right_whole) = left, right
  if left == right:
    return True
  # Nearby numbers may count as equal after rounding.
  return False if (left_whole and right_whole) or abs(left - right) > _CLEARLY else None


def answer_key(answer: str) -> str:
  """Returns one key for answers that are the same number or are spelt alike, for a majority vote.

  Example:
    >>> answer_key("0.50"), answer_key(r"\\frac{1}{2}"), answer_key("x  = 1")
    ('1/2', '1/2', 'x = 1')
  """
  answer = unified(answer)
  number = _number(answer)
  return answer if number is None else str(number[0])


def _number(text: str) -> tuple[Fraction, bool] | None:
  """Returns the value of a plain number and whether it is written as a whole number.

  Returns None for anything else, and if rounding would matter.
  """
  match = _PLAIN.fullmatch(text) if len(text) <= 300 else None
  if match is None:
    return None
  sign, whole, decimals, bare, numerator, denominator, top, bottom = match.groups()
  if numerator or top:
    numerator, denominator = numerator or top, denominator or bottom
    if not int(denominator) or len(numerator) + len(denominator) > 2 * _MAX_DIGITS:
      return None
    value = Fraction(int(numerator), int(denominator))
  elif decimals or bare:
    digits = (whole or "0").replace(",", "") + (decimals or bare)
    if len(digits) > _MAX_DIGITS:
      return None
    value = Fraction(digits)
  else:
    value = Fraction(int(whole.replace(",", "")))
  return (-value if sign else value), not (decimals or bare or numerator or top)
