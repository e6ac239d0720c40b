"""One notation for answers that are written differently, by rewriting their text alone."""

import re

# Maps lookalikes to one spelling. Letters of other scripts are kept: a Cyrillic x is not an x.
_LOOKALIKES = {
  **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-"),
  **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\t\n\r", " "),
  **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad\u061c\u200e\u200f", ""),
  **{chr(0xFF01 + i): chr(0x21 + i) for i in range(0x5E)},  # Full-width forms.
  **{chr(0x1D7CE + i): str(i % 10) for i in range(50)},  # Digits of the mathematical alphabets.
  **{
    "\u00d7": "\\times ", "\u00b7": "\\cdot ", "\u22c5": "\\cdot ", "\u00f7": "/", "\u2215": "/", "\u2044": "/", "\u03c0": "\\pi ",
    "\u221e": "\\infty ", "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne ", "\u00b1": "\\pm ", "\u00b0": "^\\circ ",
    "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ", "\u2205": "\\emptyset ", "\u2026": "\\ldots ", "\u22ef": "\\ldots ",
    "\u00bd": "\\frac{1}{2}", "\u00bc": "\\frac{1}{4}", "\u00be": "\\frac{3}{4}", "\u2153": "\\frac{1}{3}", "\u2154": "\\frac{2}{3}",
  },
}  # fmt: skip
_TABLE = str.maketrans(_LOOKALIKES)
_ROOT = re.compile("\u221a\\s*(?:\\(([^()]*)\\)|(\\d+|[a-zA-Z]))")
_RAISED = dict(zip("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b", "0123456789+-", strict=True))
_SUPERSCRIPT = re.compile(f"[{''.join(_RAISED)}]+")
_THIN = re.compile("(?<=[0-9])[\u2006\u2008\u2009\u200a\u202f](?=[0-9]{3})")  # They group digits.

_PLAIN = re.compile(r"-?(?:[0-9]++(?:[.,/][0-9]++)*+|\\[dt]?frac\{[0-9]++\}\{[0-9]++\})")  # Nothing to rewrite.
_GAP = r"(?:\\[,;: ]|~|\\!|\{,\}|,\\!)"
_GROUPS = re.compile(rf"(?<![\w.,])[1-9][0-9]{{0,2}}(?:{_GAP}[0-9]{{3}})++(?![0-9])")
# Where no other comma follows, as in "x = 1,234 cm"; elsewhere it may separate a list.
_COMMAS = re.compile(r"(?:(?<![^=$])|(?<=[=$] ))-?[1-9][0-9]{0,2}(?:,[0-9]{3})++(?=(?:\.[0-9]++)?+[^,;0-9)\]]*+\Z)")
# A minus sign before it may be a sign, but not an operator between two terms.
_SPACED = re.compile(r"(?<![\w.,/^{])(?<![^\s(\[{=,;]-)([1-9][0-9]{0,2}(?: [0-9]{3})++(?:\.[0-9]++)?+)(?![\w.,/^])")

_FONT = r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|math(?:rm|it|bf|sf|tt)|mbox|hbox|bm|boldsymbol)"
_LONE = re.compile(rf"(?:{_FONT}|\\operatorname) ?\{{ ?(?:([ei])|([^\w\s{{}}\\])) ?\}}|\\mathrm ([ei])(?![A-Za-z])|\{{\\rm ([ei])\}}|\{{([:;])\}}")
# A formula with a number and without words: \text{Room 5} is a name.
_INNER = r"(?:[^{}\\A-Za-z]|\\(?:[a-zA-Z]++|.)|(?<![A-Za-z])[a-zA-Z](?![A-Za-z])|\{[^{}]*\})"
_WRAPPED = re.compile(rf"{_FONT} ?\{{ ?(?=[^{{}}]*[0-9])({_INNER}*?) ?\}}")
_BRACED = re.compile(r"\{[^{}\\]*+(?:\{[^{}\\]*+\}[^{}\\]*+)*+\}")
_LABEL = re.compile(rf"{_FONT} ?\{{ ?(?:\([A-J]\)|[A-J][.:)])(?:\\ |[ ~])*+\}}(?:\\[ ,;:]|\\quad|[ ~:])*+(?![,;]|and|or|\\text|\Z)")
_NOTHING = re.compile(r"\\varnothing(?![a-zA-Z])|\\\{ ?\\\}")

_DOTS = re.compile(r"\\[lc]?dots[cbmio]?(?![a-zA-Z])|\.(?: ?\.){2,}+")
_UNENDED = re.compile(r"(-?[0-9.,]*[0-9]) ?\\ldots")
_SEPARATOR = re.compile(r"[(\[{]|[)\]}]|\\(?:cdot|times|leq?|geq?|cup|cap|to)(?![a-zA-Z])|[-,;+*<>&]")

_SPACE = r"(?: |~|\\[,;: ])"
_BEFORE = r"(?<![\w.^_/}])(?<![0-9],(?=[0-9]{3}(?![0-9])))(?<!/ )(?<!\\div )(?<!frac )(?<![0-9] )"
_MIXED = re.compile(
  rf"{_BEFORE}([0-9]{{1,40}}+)(?:{_SPACE}++([0-9]{{1,40}}+) ?/ ?([0-9]{{1,40}}+)"
  rf"|{_SPACE}*+\\[dtc]?frac ?(?:\{{ ?([0-9]{{1,40}}+) ?\}}|([0-9])) ?(?:\{{ ?([0-9]{{1,40}}+) ?\}}|([0-9])))(?![0-9/.^!])"
)
_EXPONENT = r"[-+]?[0-9]{1,5}+"
_SCIENTIFIC = re.compile(
  rf"{_BEFORE}([0-9]{{0,40}}+)(?:\.([0-9]{{1,40}}+))?+(?<=[0-9])(?:[eE]({_EXPONENT})"
  rf"|{_SPACE}*+(?:\\times|\\cdot|\*|x){_SPACE}*+10 ?\^ ?(?:\{{ ?({_EXPONENT}) ?\}}|\(({_EXPONENT})\)|([0-9]{{1,5}}+)))(?![\w.^!])"
)
_REPEATING = re.compile(r"(?<![\w.])([0-9]{0,12})\.([0-9]{0,12})\\(?:overline|bar|dot) ?\{([0-9]{1,12})\}(?![0-9])")
_SCALES = {"thousand": "e3", "million": "e6", "billion": "e9", "trillion": "e12"}
_SCALE = re.compile(rf"(?<=[0-9]){_SPACE}*+(?:({_FONT} ?\{{) ?)?+({'|'.join(_SCALES)})(?![a-z])(?(1)( ?\}})?+)")

# math-verify takes the last letter of "t^2 + 5t" for a unit. Beside another letter it is an unknown.
_UNKNOWNS = re.compile(r"(?:.*=)?+[^=]*?(?<![a-zA-Z\\])[a-df-hj-zA-Z](?![a-zA-Z])[^=]*[0-9}\s]\s?[a-zA-Z]")
_PHRASE = re.compile(rf"(?:{_FONT} ?)?\{{?([A-Za-z' ]++)\}}?\.?")
_PHRASES = {
  **dict.fromkeys(("dne", "does not exist", "doesn't exist", "undefined", "not defined", "is undefined"), "\\text{undefined}"),
  **dict.fromkeys(("no solution", "no solutions", "no real solution", "no real solutions", "the empty set", "empty set"), "\\emptyset"),
}  # fmt: skip
_JUXTAPOSED = re.compile(rf"(?<![\w^_.}}{{])(?<!frac )(?<!binom )(?<!sqrt )[0-9]++(?:[.,][0-9]++)*+{_SPACE}++[0-9]")


def unified(answer: str) -> str:
  r"""Returns an answer in one notation for what can be written in several ways.

  Characters that look alike become one, groups of digits are joined, a mixed number becomes a
  fraction, and scientific notation a whole number times a power of ten. The font of a number, the
  label of a choice before a value, and repeated spaces are dropped.

  Example:
    >>> unified("\u22125 \u00d7 x\u00b2"), unified("\uff11\uff12 000"), unified(r"1\,200"), unified(r"\textbf{(073)}")
    ('-5 \\times x^{2}', '12000', '1200', '(073)')
    >>> unified("11 5/6"), unified("4.5e33"), unified(r"5\text{:}30"), unified("DNE")
    ('\\frac{71}{6}', '45 \\cdot 10^{32}', '5:30', '\\text{undefined}')
  """
  if not answer.isascii():
    answer = _ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", answer)
    answer = _SUPERSCRIPT.sub(lambda match: "^{" + "".join(map(_RAISED.get, match[0])) + "}", answer)
    answer = _THIN.sub(r"\\,", answer).translate(_TABLE)
  answer = " ".join(answer.split())
  if _PLAIN.fullmatch(answer):
    return answer
  if "\\" in answer or "~" in answer or "{" in answer:
    if label := _LABEL.match(answer):
      answer = answer[label.end() :]
    answer = answer[1:-1] if _BRACED.fullmatch(answer) else answer
    answer = _LONE.sub(lambda match: match[2] or match[5] or f" {match[1] or match[3] or match[4]}", _WRAPPED.sub(r"\1", answer)).strip()
    answer = _NOTHING.sub(r"\\emptyset", _GROUPS.sub(lambda match: re.sub(_GAP, "", match[0]), answer))
  if "dots" in answer or ".." in answer:
    answer = _UNENDED.sub(r"\1", dots) if _UNENDED.fullmatch(dots := _DOTS.sub(r"\\ldots ", answer).strip()) else dots
  if "," in answer:
    answer = _COMMAS.sub(lambda match: match[0].replace(",", ""), answer)
  if " " in answer:
    answer = _SPACED.sub(lambda match: match[0].replace(" ", ""), answer)
  if (phrase := _PHRASE.fullmatch(answer)) and (known := _PHRASES.get(phrase[1].strip().lower())):
    return known
  if "illion" in answer or "thousand" in answer:
    answer = _SCALE.sub(lambda match: _SCALES[match[2]] + (match[1] if match[1] and not match[3] else ""), answer)
  if "\\" in answer:
    answer = _REPEATING.sub(_repeating, answer)
  if answer[-1:].isalpha() and _UNKNOWNS.fullmatch(answer):
    answer = f"{answer[:-1]}{{{answer[-1]}}}"
  return _SCIENTIFIC.sub(_scientific, _MIXED.sub(_improper, answer))


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


def _improper(match: re.Match) -> str:
  """Writes a mixed number as one fraction; "4 10/3" is none and stays."""
  whole, *parts = match.groups()
  numerator, denominator = (int(part) for part in parts if part is not None)
  if not 0 < numerator < denominator or not int(whole):
    return match[0]
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
