"""What is too large to be handed to a computer algebra system: judged by its spelling, in linear time, before anything is parsed."""

import re
from math import log10

MAX_CHARS = 1000
"""Longest answer that is parsed, in characters; the matrices and polynomials of competition problems need a quarter of it."""

_MAX_DIGITS = 400  # Of one number as it is written.
_MAX_MAGNITUDE = 5e4  # Digits of any number that is computed on the way: 2^100000 has 30,103 and takes a millisecond.
_MAX_DEPTH = 40  # Brackets in brackets: parsers recurse.
_MAX_OPERATORS = 250
_MAX_BOUND = 1e5  # Of sums, products, binomials.

_TOKEN = re.compile(
  r"(?P<number>\d[\d,_]*+(?:\.\d++)?+|\.\d++)|(?P<power>\^|\*\*)|(?P<open>[({\[])|(?P<close>[)}\]])|(?P<factorial>!)"
  r"|(?P<prefix>[-+\u2212]|\\[a-zA-Z]++|\\.)|(?P<other>\S)"
)
_LONG = re.compile(rf"\d(?:[\s,_]?\d){{{_MAX_DIGITS}}}")
_BIG_OPERATOR = re.compile(r"\\(?:sum|prod|[dt]?binom|choose|Gamma|zeta|[i]*int|lim|gcd|lcm)")
_OPERATOR = re.compile(r"[-+*/^=<>&!]|\\[a-zA-Z]++")


def too_large(answer: str) -> bool:
  """Whether computing an expression might take long or a lot of memory.

  Held to limits far above what answers to problems have: length, digits of a number, depth of brackets, operators, bounds of sums and
  products, and the digits that numbers grow to by powers and factorials.

  Args:
    answer: LaTeX, or an expression in plain text with `^` or `**`.

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
  """log10 of a number or of its inverse, whichever is larger."""
  whole, _, decimals = re.sub("[,_]", "", number).partition(".")
  return max(log10(int((whole or "0")[:300]) or 1) + max(len(whole) - 300, 0), 0) + len(decimals)


def _magnitude(tokens: list[tuple[str, str]], at: int) -> tuple[float, int]:
  """An upper bound for log10 of what the tokens up to the end of a group compute, letters taken as 1; and where the group ends.

  As if all numbers were multiplied: a sum is smaller than that, or not by much.
  """
  total, last = 0.0, 0.0  # `last` is the factor that a power or a factorial behind it applies to; it is part of `total` already.
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
  """The magnitude of the number or group that begins here, with the powers and factorials that bind to it."""
  while at < len(tokens) and tokens[at][0] == "prefix":  # 9^-9, 9^\left(...
    at += 1
  if at >= len(tokens) or tokens[at][0] not in ("number", "open"):
    return 0.0, at
  kind, text = tokens[at]
  size, at = (_digits(text), at + 1) if kind == "number" else _magnitude(tokens, at + 1)
  # Towers without brackets, 9^9^9, bind from the right.
  if at < len(tokens) and tokens[at][0] == "power":
    exponent, at = _operand(tokens, at + 1)
    size = size * 10 ** min(exponent, 300.0) + exponent
  while at < len(tokens) and tokens[at][0] == "factorial":
    size, at = _factorial(size), at + 1
  return size, at


def _factorial(size: float) -> float:
  return 10 ** min(size, 300.0) * max(size, 0.0)
