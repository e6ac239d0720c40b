"""Tokens of a text with numbers, each with its part in a quantity."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074-\u2079"
# ASCII digits only. Possessive quantifiers (`++`, `?+`) never retry and never cut a number in two
# to make a pattern fit.
NUMBER = (
  r"(?:[0-9]{1,3}+(?:(?:,|\{,\}|\\[,!]|,\\!|[\u2009\u202f])[0-9]{3})++(?![0-9])"
  r"|[0-9]++)(?:\.[0-9]++)?+|\.[0-9]++"
)
_TOKEN = re.compile(
  rf"(?P<number>{NUMBER})|(?P<space>\s++|\\[ ;:,!]|\\q?quad(?![a-zA-Z])|~)"
  r"|(?P<mark>\^\s?\{?\s?\\(?:circ|degree)\s?\}?|\\[$%()\[\]\"']"
  r"|[$\u00a3\u20ac\u00a5\u20b9%\u00b0\u00a2#`\"\u201c\u201d{}]"
  r"|\\(?:text\w*|math(?:rm|bf|it|sf)|boldsymbol|mbox|emph|underline|left|right|displaystyle|boxed"
  r"|fbox)(?![a-zA-Z])"
  r"|\*\*(?![0-9])|__|</?(?:b|strong|i|em|u|span|p)>)"
  r"|(?P<equals>[-=]>|[=\uff1d\u2248\u2192\u21d2]|\\(?:approx|Rightarrow|rightarrow|to|implies)(?![a-zA-Z]))"
  r"|(?P<dash>[-\u2212\u2010-\u2014])|(?P<open>[(\[])|(?P<close>[)\]])"
  r"|(?P<word>[^\W\d_]++(?:['\u2019-][^\W\d_]++)*+)"
  r"|(?P<stop>[,;.:!?'\u2019|\uff1a\u3002\uff0c]|\\\\|<br\s?/?>)"
  rf"|(?P<power>\^|\*\*|[{_SUPERSCRIPTS}]|<sup>)|(?P<operator>\\[a-zA-Z]+|.)",
  re.DOTALL,
)

_SCALES = {
  "hundred": 100,
  "thousand": 1000,
  "million": 10**6,
  "billion": 10**9,
  "trillion": 10**12,
  "dozen": 12,
}
_UNITS = frozenset("mglLshdtNJWVCFcpKA")  # Letters behind a number that are units, not variables.
_PARTS = frozenset(
  "\\frac \\dfrac \\tfrac \\cfrac \\sqrt \\pi \\pm \\infty \u221a \u03c0 \u221e \u00b1".split()
)
_OPERATORS = frozenset(
  "plus times over divided multiplied squared cubed factorial mod modulo base point".split()
)
_MULTIPLES = frozenset(
  "half third quarter twice thrice double triple root square cube sum product difference quotient".split()
)
_JOINS = frozenset("or to and through".split())
_MEASURES = frozenset(
  "h hr hour min minute m sec second ft foot feet in inch inche lb pound ounce oz year yr month week day dollar euro cent km kg"
  " g cm mm yard yd mile meter metre degree quarter dime gallon cup".split()
)


class _Token(NamedTuple):
  kind: str
  text: str
  spaced: bool  # Whether a space stands before it.


def classes(text: str, *, is_statement: bool) -> Iterator[tuple[str, str]]:
  """Yields the part that each token plays, as a pair of a letter and its text.

  Args:
    text: Text of at most a few hundred characters.
    is_statement: Whether the text states the answer, so that "and" joins numbers.

  Returns:
    N: a number; X: digits that are no plain number, or a symbol such as π; M: a minus sign; A: a
    factor such as 1000; J: an operator, a variable or "or"; E: an equals sign; W: a word; S:
    punctuation.

  Example:
    >>> "".join(kind for kind, _ in classes("It costs 2 x $3 = $6.", is_statement=True))
    'WWNJNENS'
  """
  tokens, spaced = [], False
  for match in _TOKEN.finditer(text):
    if match.lastgroup == "space":
      spaced = True
      if "\n" in match[0]:
        tokens.append(_Token("stop", "\n", False))
    else:
      tokens.append(_Token(match.lastgroup, match[0], spaced))
      spaced = False
  tokens.append(_Token("stop", "", True))  # So that every token has a next one.
  last, i = "S", 0
  while i < len(tokens) - 1:
    token = tokens[i]
    if token.kind == "open" and last in "NAU" and (end := _end_of_remark(tokens, i)):
      i = end
      continue
    kind, token_text = _class(tokens, i, last, is_statement=is_statement)
    if kind == "P":  # The exponent of a unit: cm^2.
      i = next(j for j in range(i + 1, len(tokens)) if tokens[j].kind != "mark") + (
        token.text in ("^", "**", "<sup>")
      )
      continue
    if kind:
      yield ("W" if kind == "U" else kind), token_text
      last = "U" if kind == "W" and last in "NAU" else kind
    i += 1


def _class(tokens: Sequence[_Token], i: int, last: str, *, is_statement: bool) -> tuple[str, str]:
  """Returns the part of a token: as in `classes`, or P for the power of a unit, or "" for a mark.

  `last` is the part of the previous token; U for a word behind a number.
  """
  token, after = tokens[i], tokens[i + 1]
  before = tokens[i - 1] if i else _Token("stop", "", True)
  match token.kind:
    case "number":
      is_name = before.kind == "word" and (not token.spaced or before.text.lower() in ("not", "base"))
      return ("X" if is_name else "N"), token.text
    case "equals":
      return "E", token.text
    case "word":
      return _word(tokens, i, last, is_statement)
    case "dash":
      return _dash(tokens, i, last), token.text
    case "stop":
      return _stop(tokens, i, last, is_statement), token.text
    case "power":
      if token.text == "**" and last not in "NAX":
        return "", token.text  # Bold.
      return (
        "P" if last == "U" and not token.spaced else "X" if last in "NAXJM" or before.kind == "close" else "J"
      ), token.text
    case "open":
      return ("J" if last in "NAX" and not token.spaced else ""), token.text
    case "operator":
      return _operator(token, after, last, tokens, i), token.text
  return "", token.text


def _number_next(tokens: Sequence[_Token], i: int, *, words: int = 0) -> bool:
  """Returns whether a number follows, behind marks and at most so many words."""
  for token in tokens[i + 1 :]:
    if token.kind == "number":
      return True
    words -= token.kind == "word"
    if words < 0 or token.kind not in ("mark", "open", "dash", "word"):
      return False
  return False


def _end_of_remark(tokens: Sequence[_Token], i: int) -> int | None:
  """Returns the index behind a parenthesis after a number; None if it belongs to the number.

  "42 (7 * 6)" and "42(see above)" are remarks, "5(x + 1)", "42 (or 43)" and "7 (mod 5)" are not.
  """
  first = tokens[i + 1]
  if first.kind == "word" and first.text.lower() in ("or", "and", "to", "mod", "base"):
    return None
  if not tokens[i].spaced and not (first.kind == "word" and len(first.text) > 1):
    return None
  depth = 0
  for j in range(i, len(tokens)):
    depth += (tokens[j].kind == "open") - (tokens[j].kind == "close")
    if depth == 0:
      return j + 1
  return None


def _is_measure(word: str) -> bool:
  """Returns whether a word is a unit that another one may follow, as in 3 hours 20 minutes."""
  return word in _MEASURES or word.removesuffix("s") in _MEASURES


def _word(tokens: Sequence[_Token], i: int, last: str, is_statement: bool) -> tuple[str, str]:
  token, after = tokens[i], tokens[i + 1]
  word, is_number_before = token.text.lower(), last in "NA"
  attached = not token.spaced and i > 0 and tokens[i - 1].kind == "number"
  if is_number_before and word in _SCALES:
    return "A", str(_SCALES[word])
  if attached and word == "k":
    return "A", "1000"
  if word in ("minus", "negative") and _number_next(tokens, i):
    return ("J" if last in "NAXU" else "M"), word
  if (word == "in" and is_number_before and after.kind == "number") or (word == "x" and _number_next(tokens, i)):
    return "J", word  # 1 in 5, 2 x 3
  if word in _OPERATORS and last in "NAXU" and (_number_next(tokens, i, words=2) or last in "NAX"):
    return "J", word
  if (word in _MULTIPLES or (word == "of" and tokens[i - 1].text.lower() in _MULTIPLES)) and _number_next(
    tokens, i
  ):
    return "J", word
  if word in _JOINS and last in "NAXU":
    joins = (
      is_statement
      or word != "and"
      or _is_measure(tokens[i - 1].text.lower())
      or any(t.text == "between" for t in tokens[:i])
    )
    half = (
      word == "and" and i + 2 < len(tokens) and tokens[i + 2].text.lower() in ("half", "third", "quarter")
    )
    return ("J" if half or (joins and _number_next(tokens, i, words=1)) else "W"), word
  if (
    is_number_before
    and _is_measure(word)
    and _number_next(tokens, i)
    and after.kind != "dash"
    and word != "in"
  ):
    return "J", word
  if (
    word in ("is", "equals", "makes", "gives")
    and last in "NAXU"
    and any(t.kind in ("operator", "dash") for t in tokens[:i])
  ):
    return "E", word
  if attached and (word == "e" or set(word) <= set("xyz")) and (word != "e" or _number_next(tokens, i)):
    return "X", word
  if len(token.text) > 1:
    return "W", word
  if is_number_before:
    is_unit = token.text in _UNITS or (after.kind == "word" and after.spaced and len(after.text) > 1)
    return ("W" if is_unit and not attached or token.text in _UNITS else "X"), word
  return ("J" if after.kind in ("equals", "operator", "power", "dash") and last not in "WU" else "W"), word


def _dash(tokens: Sequence[_Token], i: int, last: str) -> str:
  """Returns the part of a dash: a minus sign, a subtraction or a range, or punctuation."""
  spaced, after = tokens[i].spaced, tokens[i + 1]
  is_operand = (
    _number_next(tokens, i) or (after.kind == "word" and len(after.text) == 1) or after.text.startswith("\\")
  )
  if last in "NAX" or (last == "U" and (after.spaced or not spaced)):
    return "J" if is_operand else "S"
  if (
    last in "EJM" or (last in "WS" and i > 0 and not after.spaced and spaced) or (i == 0 and not after.spaced)
  ):
    return "M" if _number_next(tokens, i) else "J"
  if last == "W" and not spaced:
    return "J" if not after.spaced and after.kind == "number" else "S"
  return "M" if not after.spaced and _number_next(tokens, i) else "S"


def _stop(tokens: Sequence[_Token], i: int, last: str, is_statement: bool) -> str:
  text, after = tokens[i].text, tokens[i + 1]
  if last not in "NAX":
    return "" if text in "'\u2019" else "S"
  if (
    text in ",.:'\u2019\uff1a"
    and not after.spaced
    and (after.kind == "number" or after.text.startswith("\\") and text == ".")
  ):
    return "X"
  if text == ":" and tokens[i].spaced and after.kind == "number":
    return "X"
  if text == "." and after.text == "." and not after.spaced:
    return "X"
  if text == "!" and (
    is_statement or (after.kind in ("operator", "equals", "dash") and not tokens[i].spaced)
  ):
    return "X"
  if (
    text == ","
    and is_statement
    and _number_next(tokens, i)
    and not any(token.kind == "equals" for token in tokens[:i])
  ):
    rest = [token for token in tokens[i + 1 :] if token.kind not in ("mark", "dash", "open", "close")]
    return "J" if rest[1].kind == "stop" or rest[1].text in ("or", "and") else "S"
  return "" if text in "'\u2019" else "S"


def _operator(token: _Token, after: _Token, last: str, tokens: Sequence[_Token], i: int) -> str:
  text = token.text
  if text in _PARTS or text.isnumeric() or text.isdigit():
    return "X"
  if (
    text == "/"
    and last in "NAU"
    and after.kind == "word"
    and (len(after.text) > 1 or last == "U" or after.text in "hs")
  ):
    return "U"  # 42/day
  if text in "*+":
    is_operand = (
      _number_next(tokens, i)
      or after.kind in ("open", "operator")
      or (after.kind == "word" and len(after.text) == 1)
    )
    if text == "+" and last in "NAX" and not is_operand and not token.spaced:
      return "X"  # 5+, that is 5 or more.
    return "J" if is_operand and last in "NAXU" else ""
  if text == ">" and last == "S":
    return ""  # A quotation of Markdown.
  if text == "&":
    return "J" if _number_next(tokens, i) else "S"
  if text == "\u2026":
    return "X" if last in "NAX" else "S"
  return "J" if text.isascii() or unicodedata.category(text) == "Sm" or text in "\u00b7\u2022" else ""
