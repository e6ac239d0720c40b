"""One notation for answers that are written differently, by rewriting their text alone."""

import re
from collections.abc import Callable
from typing import NamedTuple

# Maps lookalikes to one spelling. Letters of other scripts are kept: a Cyrillic x is not an x.
_LOOKALIKES = str.maketrans({
  **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),
  **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "),
  **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad\u061c\u200e\u200f", ""),
  **{chr(0xFF01 + i): chr(0x21 + i) for i in range(0x5E)},  # Full-width forms.
  **{chr(0x1D7CE + i): str(i % 10) for i in range(50)},  # Digits of the mathematical alphabets.
  **{
    "\u00d7": "\\times ", "\u00b7": "\\cdot ", "\u22c5": "\\cdot ", "\u00f7": "/", "\u2215": "/", "\u2044": "/",
    "\u03c0": "\\pi ",
    "\u221e": "\\infty ", "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne ", "\u00b1": "\\pm ",
    "\u00b0": "^\\circ ",
    "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ", "\u2205": "\\emptyset ",
    "\u2026": "\\ldots", "\u22ef": "\\cdots",
    "\u00bd": "\\frac{1}{2}", "\u00bc": "\\frac{1}{4}", "\u00be": "\\frac{3}{4}",
    "\u2153": "\\frac{1}{3}", "\u2154": "\\frac{2}{3}",
  },
})  # fmt: skip
_ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|(\\d+|[a-zA-Z]))")
_RAISED = dict(
  zip("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b", "0123456789+-", strict=True)
)
_SUPERSCRIPT = re.compile(f"[{''.join(_RAISED)}]+")
# Spaces that group digits.
_THIN = re.compile("(?<=[0-9])[\u00a0\u2006\u2008\u2009\u200a\u202f](?=[0-9]{3}(?![0-9]))")

_PLAIN = re.compile(
  r"-?(?:[0-9]++(?:[.,/][0-9]++)*+|\\[dt]?frac\{[0-9]++\}\{[0-9]++\})"
)  # Nothing to rewrite.
_FONT = r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|math(?:rm|it|bf|sf|tt)|mbox|hbox|bm|boldsymbol)"
_SPACE = r"(?: |~|\\[,;: ])"
_GAP = r"(?:\\[,;: !]|~|\{,\}|,\\!)"  # Between groups of digits.
_GROUP = r"[1-9][0-9]{0,2}"
# What may not stand before a number that is rewritten: 2 in "1/2 1/3" and "3^2 \times 10^5" is a
# part of another.
_BEFORE = r"(?<![\w.^_/}])(?<![0-9],(?=[0-9]{3}(?![0-9])))(?<!/ )(?<!\\div )(?<!frac )(?<![0-9] )"
_DIGITS = r"[0-9]{1,40}+"
_EXPONENT = r"[-+]?[0-9]{1,5}+"
_SCALES = {"thousand": "e3", "million": "e6", "billion": "e9", "trillion": "e12"}
_UNDEFINED = "dne|does not exist|doesn't exist|(?:is )?undefined|not defined"
_NO_SOLUTION = "no (?:real )?solutions?|(?:the )?empty set"


def _improper(match: re.Match) -> str:
  whole, *parts = match.groups()
  numerator, denominator = (int(part) for part in parts if part is not None)
  if not 0 < numerator < denominator or not int(whole):
    return match[0]  # "4 10/3" is no mixed number.
  return f"\\frac{{{int(whole) * denominator + numerator}}}{{{denominator}}}"


def _repeating(match: re.Match) -> str:
  whole, decimals, period = match.groups()
  denominator = (10 ** len(period) - 1) * 10 ** len(decimals)
  return f"\\frac{{{int(whole + decimals + period) - int(whole + decimals or 0)}}}{{{denominator}}}"


def _scientific(match: re.Match) -> str:
  whole, decimals = match[1], match[2] or ""
  digits = (whole + decimals).lstrip("0")
  exponent = int(next(part for part in match.groups()[2:] if part is not None)) - len(decimals)
  mantissa = digits.rstrip("0")
  exponent += len(digits) - len(mantissa)
  if not mantissa or not exponent:
    return mantissa or "0"
  return f"10^{{{exponent}}}" if mantissa == "1" else f"{mantissa} \\cdot 10^{{{exponent}}}"


class Rewriting(NamedTuple):
  """One rewriting of an answer's text.

  Attributes:
    triggers: Texts of which an answer contains at least one, or is left alone.
    pattern: Pattern of what is replaced.
    replacement: What replaces it, as `re.sub` takes it.
    before: Example.
    after: The example as `unified` returns it.
  """

  triggers: tuple[str, ...]
  pattern: re.Pattern
  replacement: str | Callable[[re.Match], str]
  before: str
  after: str


def _row(
  triggers: str, pattern: str, replacement: str | Callable[[re.Match], str], before: str, after: str
) -> Rewriting:
  return Rewriting(tuple(triggers.split()), re.compile(pattern), replacement, before, after)


REWRITINGS = (
  # The label of a choice before its value.
  _row(
    "\\",
    rf"\A{_FONT} ?\{{ ?(?:\([A-J]\)|[A-J][.:)])(?:\\ |[ ~])*+\}}"
    r"(?:\\[ ,;:]|\\quad|[ ~:])*+(?![,;]|and|or|\\text|\Z)",
    "",
    r"\textbf{(D) }15",
    "15",
  ),
  # Braces around everything.
  _row("{", r"\A\{([^{}\\]*+(?:\{[^{}\\]*+\}[^{}\\]*+)*+)\}\Z", r"\1", "{1,234}", "1234"),
  # The font of a formula: it has a number and no words. \text{Room 5} is a name.
  _row(
    "\\",
    rf"{_FONT} ?\{{ ?(?=[^{{}}]*[0-9])"
    r"((?:[^{}\\A-Za-z]|\\(?:[a-zA-Z]++|.)|(?<![A-Za-z])[a-zA-Z](?![A-Za-z])|\{[^{}]*\})*?) ?\}",
    r"\1",
    r"\textbf{(073)}",
    "(073)",
  ),
  # The font of a constant, and of a sign.
  _row(
    "\\",
    rf"(?:{_FONT}|\\operatorname) ?\{{ ?([ei]) ?\}}|\\mathrm ([ei])(?![A-Za-z])|\{{\\rm ([ei])\}}",
    lambda match: f" {match[1] or match[2] or match[3]}",
    r"2\mathrm{e}",
    "2 e",
  ),
  _row(
    "{",
    rf"{_FONT} ?\{{ ?([^\w\s{{}}\\]) ?\}}|\{{([:;])\}}",
    lambda match: match[1] or match[2],
    r"5\text{:}30",
    "5:30",
  ),
  # Thousands.
  _row(
    "\\ ~ {",
    rf"(?<![\w.,]){_GROUP}(?:{_GAP}[0-9]{{3}})++(?![0-9])",
    lambda match: re.sub(_GAP, "", match[0]),
    r"1\,200",
    "1200",
  ),
  _row("\\", r"\\varnothing(?![a-zA-Z])|\\\{ ?\\\}", r"\\emptyset", r"\varnothing", r"\emptyset"),
  # Dots, which mean nothing at the end of a single number.
  _row(
    "dots ..",
    r"\\[lc]?dots[cbmio]?(?![a-zA-Z])|\.(?: ?\.){2,}+",
    r"\\ldots ",
    "1, 2, ..., n",
    r"1, 2, \ldots , n",
  ),
  _row("\\ldots", r"\A(-?[0-9.,]*[0-9]) ?\\ldots ?\Z", r"\1", r"3.14\ldots", "3.14"),
  # Thousands where no other comma follows; elsewhere it may separate a list.
  _row(
    ",",
    rf"(?:(?<![^=$])|(?<=[=$] ))-?{_GROUP}(?:,[0-9]{{3}})++(?=(?:\.[0-9]++)?+[^,;0-9)\]]*+\Z)",
    lambda match: match[0].replace(",", ""),
    "x = 1,234 cm",
    "x = 1234 cm",
  ),
  # A minus sign before them may be a sign, but not an operator between two terms.
  _row(
    "0 1 2 3 4 5 6 7 8 9",
    rf"(?<![\w.,/^{{])(?<![^\s(\[{{=,;]-){_GROUP}(?: [0-9]{{3}})++(?:\.[0-9]++)?+(?![\w.,/^])",
    lambda match: match[0].replace(" ", ""),
    "-1 234 567.5",
    "-1234567.5",
  ),
  # Words for what does not exist.
  _row(
    "n N",
    rf"\A(?:{_FONT} ?)?\{{? ?(?i:{_UNDEFINED}) ?\}}?\.?\Z",
    r"\\text{undefined}",
    "DNE",
    r"\text{undefined}",
  ),
  _row(
    "o O e E",
    rf"\A(?:{_FONT} ?)?\{{? ?(?i:{_NO_SOLUTION}) ?\}}?\.?\Z",
    r"\\emptyset",
    "No solution",
    r"\emptyset",
  ),
  # Scales in words: math-verify takes them for units.
  _row(
    "illion thousand",
    rf"(?<=[0-9]){_SPACE}*+(?:({_FONT} ?\{{) ?)?+({'|'.join(_SCALES)})(?![a-z])(?(1)( ?\}})?+)",
    lambda match: _SCALES[match[2]] + (match[1] if match[1] and not match[3] else ""),
    r"2.5\text{ million}",
    r"25 \cdot 10^{5}",
  ),
  _row(
    "\\",
    r"(?<![\w.])([0-9]{0,12})\.([0-9]{0,12})\\(?:overline|bar|dot) ?\{([0-9]{1,12})\}(?![0-9])",
    _repeating,
    r"0.2\overline{3}",
    r"\frac{21}{90}",
  ),
  # Beside another letter the last one is an unknown, which math-verify takes for a unit.
  _row(
    "0 1 2 3 4 5 6 7 8 9 \\",
    r"\A((?:.*=)?+[^=]*?(?<![a-zA-Z\\])[a-df-hj-zA-Z](?![a-zA-Z])[^=]*[0-9}\s]\s?)([a-zA-Z])\Z",
    r"\1{\2}",
    "t^2 + 5t",
    "t^2 + 5{t}",
  ),
  _row(
    "/ frac",
    rf"{_BEFORE}({_DIGITS})(?:{_SPACE}++({_DIGITS}) ?/ ?({_DIGITS})"
    rf"|{_SPACE}*+\\[dtc]?frac ?(?:\{{ ?({_DIGITS}) ?\}}|([0-9])) ?(?:\{{ ?({_DIGITS}) ?\}}|([0-9])))"
    r"(?![0-9/.^!])",
    _improper,
    "11 5/6",
    r"\frac{71}{6}",
  ),
  _row(
    "e E 10",
    rf"{_BEFORE}([0-9]{{0,40}}+)(?:\.({_DIGITS}))?+(?<=[0-9])(?:[eE]({_EXPONENT})"
    rf"|{_SPACE}*+(?:\\times|\\cdot|\*|x){_SPACE}*+10 ?\^ ?"
    rf"(?:\{{ ?({_EXPONENT}) ?\}}|\(({_EXPONENT})\)|([0-9]{{1,5}}+)))(?![\w.^!])",
    _scientific,
    r"4.5 \times 10^{33}",
    r"45 \cdot 10^{32}",
  ),
)
"""Rewritings of an answer, in order, each with an example."""

_JUXTAPOSED = re.compile(
  rf"(?<![\w^_.}}{{])(?<!frac )(?<!binom )(?<!sqrt )[0-9]++(?:[.,][0-9]++)*+{_SPACE}++[0-9]"
)
_SEPARATOR = re.compile(r"[(\[{]|[)\]}]|\\(?:cdot|times|leq?|geq?|cup|cap|to)(?![a-zA-Z])|[-,;+*<>&]")


def unified(answer: str) -> str:
  r"""Returns an answer in one notation for what can be written in several ways.

  Characters that look alike become one, repeated spaces are dropped, and `REWRITINGS` apply.

  Example:
    >>> unified("\u22125 \u00d7 x\u00b2"), unified("\uff11\uff12 000"), unified("11 5/6"), unified("4.5e33")
    ('-5 \\times x^{2}', '12000', '\\frac{71}{6}', '45 \\cdot 10^{32}')
  """
  if not answer.isascii():
    answer = _ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", answer)
    answer = _SUPERSCRIPT.sub(lambda match: "^{" + "".join(map(_RAISED.get, match[0])) + "}", answer)
    answer = _THIN.sub("", answer).translate(_LOOKALIKES)
  answer = " ".join(answer.split())
  if _PLAIN.fullmatch(answer):
    return answer
  for triggers, pattern, replacement, _, _ in REWRITINGS:
    if any(trigger in answer for trigger in triggers):
      answer = pattern.sub(replacement, answer).strip()
  return answer


def is_formula(answer: str) -> bool:
  """Returns whether a `unified` answer can be read as a whole.

  It cannot if braces are open or two numbers stand side by side without an operator, as in "2 3"
  and "4 10/3". math-verify would read a part of it, and add such numbers.

  Example:
    >>> is_formula("2, 3"), is_formula(r"\\log_2 8"), is_formula("2 3"), is_formula("5 } 6")
    (True, True, False, False)
  """
  return answer.count("{") == answer.count("}") and _JUXTAPOSED.search(answer) is None


def terms_around_dots(answer: str) -> list[list[str]] | None:
  """Returns the terms of a `unified` list, sum or product before, between and after its dots.

  Separators are terms of their own, so that a sum never equals a list.

  Returns:
    The terms, one list for each side of the dots; None if there are no dots.

  Example:
    >>> terms_around_dots(r"1, 2, \\ldots , n"), terms_around_dots("1, 2")
    ([['1', ',', '2', ',', ''], ['', ',', 'n']], None)
  """
  if "\\ldots" not in answer:
    return None
  for left, right in (("\\{", "\\}"), ("(", ")"), ("[", "]")):
    inner = answer.removeprefix(left).removesuffix(right)
    answer = inner if len(inner) == len(answer) - len(left + right) else answer
  return [_terms(part) for part in answer.split("\\ldots")]


def _terms(text: str) -> list[str]:
  """Splits a text at the separators outside of brackets, and keeps these."""
  terms, start, depth = [], 0, 0
  for match in _SEPARATOR.finditer(text):
    if match[0] in "([{":
      depth += 1
    elif match[0] in ")]}":
      depth -= 1
    elif depth == 0:
      terms += [text[start : match.start()].strip(), match[0]]
      start = match.end()
  return [*terms, text[start:].strip()]
