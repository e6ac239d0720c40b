"""Announcements of an answer in running text: lines "Answer:", sentences "the answer is"."""

import functools
import re
from typing import NamedTuple

_MAX_BODY = 500  # Characters of one statement.
_DISPLAYS = {"$": ("$$", "$$"), "\\": ("\\[", "\\]"), "`": ("```", "```")}

# The patterns of lines and sentences are for text in lower case.
_ABROAD = (
  "r\u00e9ponse",
  "antwort",
  "respuesta",
  "risposta",
  "resposta",
  "\u043e\u0442\u0432\u0435\u0442",
  "\u7b54\u6848",
)
_ADJECTIVES = ("correct", "right", "best", "final")
# Each line and sentence contains one of these. A search for a literal takes a tenth of the time.
_ANCHORS = {
  anchor: re.compile(anchor)
  for anchor in ("ans", *_ADJECTIVES, "antwort", "p(?:ue|o)sta", *(word for word in _ABROAD if not word.isascii()))
}
_ASCII_ANCHORS = {anchor: pattern for anchor, pattern in _ANCHORS.items() if anchor.isascii()}
_WORD = (
  r"(?:final[ ]+)?(?:answer|ans\b\.?)|final[ ]+(?:result|solution)|(?:correct|right|best)[ ]+(?:option"
  r"|choice)"
  rf"|(?:\u6700\u7ec8)?(?:{'|'.join(_ABROAD)})"
)
_HTML = "b|strong|em|i|u|p|h[1-6]"
_DIGIT_NEXT = r"(?=[*$(\\]{0,4}[-+\u2212]?[$\u00a3\u20ac]?[0-9]++(?![.:)][ \t]*[a-z]))"
LINE = re.compile(
  rf"(?:[^\w\n]|_){{0,16}}+(?:(?:{_HTML})>[ ]?)?(?:[0-9]{{1,2}}[.)][^\w\n]{{1,4}})?"
  rf"(?:(?:so|thus|hence|therefore),?[ ]+)?(?:(?:the|my"
  rf"|our)[ ]+)?(?:correct[ ]+)?({_WORD})(?:[ ]*\([^()\n]{{0,40}}\))?"
  rf"[ \t\u00a0]{{0,4}}+[*_`\"]{{0,3}}+(?:</(?:{_HTML})>)?[ \t\u00a0]{{0,4}}+"
  rf"(?:(?:[:=\uff1a\u662f\u4e3a\u2192]|[-=]>|[-\u2013\u2014](?=[ \t]))(?:(?:[*_`]{{1,3}}+"
  rf"|</(?:{_HTML})>)(?=\s|$))?"
  rf"|[^\w\n]{{0,8}}+$|{_DIGIT_NEXT})",
  re.MULTILINE,
)
_LONGEST_PREFIX = 80  # Characters between the start of a line and an anchor.

_IS = (
  r"(?:[ ](?:to|for|of|in|here)\b[^\n.:!?=]{0,80}?|,[ ]\w{1,12},)?"
  r"\s{1,4}+(?:is|was|equals|(?:must|should|would|will)[ ]be)\b(?!\s{1,4}(?:not|never|neither|wrong"
  r"|incorrect)\b)"
  r"(?:[ ](?:clearly|thus|therefore|hence|then|simply|just|exactly)\b)?[ \t]{0,4}+[:\uff1a]?+"
)
_NOUN = r"(?:answer[ ])?(?:option|choice|letter|result|value|solution)"
# By the anchor with which each begins.
_SENTENCES = {
  "ans": re.compile(rf"answer(?:{_IS}|[ ]?[:\uff1a][*_]{{0,3}}+)"),
  **{word: re.compile(rf"{word}[ ]{_NOUN}{_IS}") for word in _ADJECTIVES},
  "\u7b54\u6848": re.compile("\u7b54\u6848(?:\u662f|\u4e3a)[ \t]{0,4}+[:\uff1a]?+"),
}
_MARKS = r"(?:\\[a-z]+\{|</?[a-z]+>|[^\w\s]){0,4}+"
_OPTIONS = tuple(
  re.compile(rf"{word}[ ]{_MARKS}([A-Z]){_MARKS}[ ]is[ ](?:the[ ])?(?:correct|right|best)\b(?![ ]?-)")
  for word in ("ption", "hoice")
)

_ARTICLE = r"(?:the\b|an\b|(?-i:a)(?=\s)|(?-i:A)(?=\s+(?!because|since|which|was|and)[a-z]{3}))"
_PRONOUNS = (
  r"(?:to|in|as|by|that|this|what|it|there|we|you|i(?=\s+[a-z])|he|she|they|let|let's|first|since|because|if"
  r"|when|for|"
  r"found|given|obtained|calculated|not|correct|right|wrong|below|above|also|now|here|then|next|our|your|my"
  r"|her|his|"
  r"their)\b(?!\s*[=(^_*\])])"
)
_VERBS = r"\s(?:is|are|was|were|has|have|can|will)\s"
_PATTERNS_OF_PROSE = {
  # "Answer: The Eiffel Tower" states it, "Answer: The train travels for two hours." does not.
  "line": rf"[*_\s]*(?:{_PRONOUNS}|{_ARTICLE}(?:(?:\s+[^\s.]+){{6}}|[^\n.]{{0,60}}{_VERBS})|$)",
  "sentence": rf"[*_\s]*(?:{_PRONOUNS}|{_ARTICLE}|$)",
}
PROSE = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in _PATTERNS_OF_PROSE.items()}
"""Prose, by the form behind which it stands; it states nothing if a value stands elsewhere."""


class Part(NamedTuple):
  """What is read of a response.

  Attributes:
    text: Response without its reasoning.
    question: Question that it answers; empty if unknown.
  """

  text: str
  question: str


# Several forms ask for the same text's, and many texts end at the first form.
@functools.lru_cache(maxsize=1)
def lowered(text: str) -> tuple[str, dict[str, int]]:
  """Returns a text in lower case, with the same indices, and each anchor's first index in it."""
  # The only letter that becomes two, a Turkish one.
  lower = text.replace("\u0130", "i").lower()
  patterns = _ASCII_ANCHORS if lower.isascii() else _ANCHORS
  return lower, {anchor: match.start() for anchor, pattern in patterns.items() if (match := pattern.search(lower))}


def lines(part: Part) -> list[str]:
  """Returns what stands behind "Answer:" and the like at the start of a line."""
  starts, (lower, anchors) = set(), lowered(part.text)
  for anchor, first in anchors.items():
    for match in _ANCHORS[anchor].finditer(lower, first):
      at = match.start()
      start = lower.rfind("\n", max(at - _LONGEST_PREFIX, 0), at) + 1
      if start or at < _LONGEST_PREFIX:
        starts.add(start)
  matches = [match for start in sorted(starts) if (match := LINE.match(lower, start))]
  return [
    behind(part.text, match.end())
    for match in matches
    # `answer = a + b` is a line of a program.
    if not (match[0][-1] == "=" and part.text.startswith("answer", match.start()))
  ]


def sentences(part: Part) -> list[str]:
  """Returns what stands behind "the answer is" and the like."""
  lower, anchors = lowered(part.text)
  matches = [
    match
    for anchor, first in anchors.items()
    if anchor in _SENTENCES
    for match in _SENTENCES[anchor].finditer(lower, first)
  ]
  if not matches:
    return []
  if len(matches) > 1:
    matches.sort(key=re.Match.start)
  ends = [*map(re.Match.start, matches[1:]), len(part.text)]
  return [behind(part.text, match.end(), end) for match, end in zip(matches, ends, strict=True)]


def options(part: Part) -> list[str]:
  """Returns the letters of "option B is correct"."""
  if not lowered(part.text)[1].keys() & _ADJECTIVES:
    return []
  return [letter for pattern in _OPTIONS for letter in pattern.findall(part.text)]


def behind(text: str, start: int, end: int | None = None) -> str:
  """Returns the rest of the line, or the next line that is not blank; a displayed formula whole."""
  end = len(text) if end is None else end
  line = start
  while start < end and text[start] in " \t\r\n>":
    start += 1
  if "\n" in text[line:start] and text.startswith(("- ", "* ", "\u2022 "), start):
    start += 2
  line, limit = start, min(end, start + _MAX_BODY)
  opening, closing = _DISPLAYS.get(text[start : start + 1], (None, ""))
  if opening is not None and text.startswith(opening, start):
    line = max(text.find(closing, start + len(opening), limit), start)
  stop = text.find("\n", line, limit)
  return text[start : limit if stop < 0 else stop].strip()
