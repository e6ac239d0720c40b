"""Limits on expressions for a computer algebra system, checked in linear time before parsing."""

import re
from math import log10

MAX_CHARS = 1000
"""Length of the longest answer that is parsed, in characters.

The matrices and polynomials of competition problems need a quarter of it.
"""

_MAX_DIGITS = 400  # Digits of one number as written.
# Digits of any intermediate number: 2^100000 has 30,103 and takes a millisecond.
_MAX_MAGNITUDE = 5e4
_MAX_DEPTH = 40  # Nested brackets: parsers recurse.
_MAX_OPERATORS = 250
_MAX_BOUND = 1e5  # Bound of sums, products, binomials.

_TOKEN = re.compile(
  r"(?P<number>\d[\d,_]*+(?:\.\d++)?+|\.\d++)|(?P<power>\^|\*\*)|(?P<open>[({\[])|(?P<close>[)}\]])|(?P<factorial>!)"
  r"|(?P<prefix>[-+\u2212]|\\[a-zA-Z]++|\\.)|(?P<other>\S)"
)
_LONG = re.compile(rf"\d(?:[\s,_]?\d){{{_MAX_DIGITS}}}")
_BIG_OPERATOR = re.compile(r"\\(?:sum|prod|[dt]?binom|choose|Gamma|zeta|[i]*int|lim|gcd|lcm)")
_OPERATOR = re.compile(r"[-+*/^=<>&!]|\\[a-zA-Z]++")


def too_large(answer: str) -> bool:
  """Returns whether evaluating an expression might take long or use a lot of memory.

  The limits are far above what answers to problems need. They apply to length, digits of a number,
  bracket depth, operators, bounds of sums and products, and the digits that powers and factorials
  produce.

  Args:
    answer: Expression in LaTeX, or in plain text with `^` or `**`.

  Example:
    >>> [too_large(x) for x in ("9^{9^{9^{9}}}", "99999999!", "2^{2019} - 1", "100!", "x^{10^{12}}")]
    [True, True, False, False, False]
  """
  if len(answer) > MAX_CHARS or _depth(answer) > _MAX_DEPTH or _LONG.search(answer) or len(_OPERATOR.findall(answer)) > _MAX_OPERATORS:
    return True
  tokens = [(match.lastgroup, match[0]) for match in _TOKEN.finditer(answer)]
  if _BIG_OPERATOR.search(answer) and any(kind == "number" and _digits(text) > log10(_MAX_BOUND) for kind, text in tokens):
    return True
  return _magnitude(tokens, 0)[0] > _MAX_MAGNITUDE


def _depth(text: str) -> int:
  depth = deepest = 0
  for char in text:
    depth = max(depth + (char in "([{") - (char in ")]}"), 0)
    deepest = max(deepest, depth)
  return deepest


def _digits(number: str) -> float:
  """Returns log10 of a number or of its inverse, whichever is larger."""
  whole, _, decimals = re.sub("[,_]", "", number).partition(".")
  return max(log10(int((whole or "0")[:300]) or 1) + max(len(whole) - 300, 0), 0) + len(decimals)


def _magnitude(tokens: list[tuple[str, str]], at: int) -> tuple[float, int]:
  """Bounds log10 of the value of the tokens up to the end of a group, with letters taken as 1.

  The bound multiplies all numbers. A sum is smaller than that, or not much larger.

  Returns:
    The upper bound, and the index after the group.
  """
  # `last` is the factor that a following power or factorial applies to; `total` includes it
  # already.
  total, last = 0.0, 0.0
  while at < len(tokens):
    kind, text = tokens[at]
    if kind == "close":
      return total, at + 1
    if kind in ("prefix", "other"):
      last, at = (last if text[0] == "\\" else 0.0), at + 1  # A command may be a space: 9\,^{9}.
      continue
    if kind == "factorial":
      grown = _factorial(last)
      at += 1
    elif kind == "power":
      exponent, at = _operand(tokens, at + 1)
      grown = last * 10 ** min(exponent, 300.0) + exponent
    else:
      grown, at = _operand(tokens, at)
      last = 0.0
    total, last = total - last + grown, grown
    if total > _MAX_MAGNITUDE:
      break
  return total, at


def _operand(tokens: list[tuple[str, str]], at: int) -> tuple[float, int]:
  """Returns the magnitude of the next number or group, and the index after it.

  The operand includes the powers and factorials that bind to it.
  """
  while at < len(tokens) and tokens[at][0] == "prefix":  # 9^-9, 9^\left(...
    at += 1
  if at >= len(tokens) or tokens[at][0] not in ("number", "open"):
    return 0.0, at
  kind, text = tokens[at]
  size, at = (_digits(text), at + 1) if kind == "number" else _magnitude(tokens, at + 1)
  # Towers without brackets, 9^9^9, are right-associative.
  if at < len(tokens) and tokens[at][0] == "power":
    exponent, at = _operand(tokens, at + 1)
    size = size * 10 ** min(exponent, 300.0) + exponent
  while at < len(tokens) and tokens[at][0] == "factorial":
    size, at = _factorial(size), at + 1
  return size, at


def _factorial(size: float) -> float:
  return 10 ** min(size, 300.0) * max(size, 0.0)
