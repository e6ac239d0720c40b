"""What stands around an answer: markup, lead-ins, remarks, labels of options and words."""

import re
from collections.abc import Iterator

from jaxrl_llm.rewards.boxes import boxed

_ABBREVIATIONS = "".join(
  rf"(?<!\b{word}\.)" for word in ("Mr", "Ms", "Mrs", "Dr", "St", "vs", "e\\.g", "i\\.e", "approx")
)
_END = re.compile(
  rf"(?:[.?;\u3002](?<!\\.){_ABBREVIATIONS}|!(?!\s*[-+*/=^\\!]))(?=[*_\"'\u201d)]*(?:\s"
  rf"|$))(?![*_\"'\u201d)]*\s+[oO]r\b)"
)
_LEAD = re.compile(
  r"(?:(?:(?:the|my|our)\s+)?(?:final\s+|correct\s+)?answer\s*(?:is\b|was\b|:)|[,:;]"
  r"|(?:clearly|simply|therefore|thus|hence|indeed|obviously|then|exactly|precisely|just|only|approximately"
  r"|about|"
  r"roughly|around|now|actually|finally|evidently|of course|in fact|equal to|given by)\b(?!\s*[-:]\w),?)\s*",
  re.IGNORECASE,
)
_REMARK = re.compile(
  r"[,;:]?\s+(?:because|since|as|which|(?<!\bor )so|thus|hence|due to|thanks to)\b"
  r"|,\s+(?:therefore|not|where|when|by|given|and (?:so|thus|hence|that))\b"
  r"|\s+(?:[\u2014\u2013]|--?)\s+(?=[a-z]{2})"
  r"|[,;]?\s*[(\[](?!(?:or|and|mod|base|to)\b)(?=[a-z]{2}|=|\u2248"
  r"|\\approx)[^()\[\]]{0,300}[)\]](?=[\s.*_]*$)",
  re.IGNORECASE,
)
_HTML = re.compile(
  r"</?(?:b|strong|i|em|u|span|p|div|center|code|mark|big)(?:\s[^<>]{0,80})?>|<br\s*/?>", re.IGNORECASE
)
_COMMAND = re.compile(
  r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:bf|rm|it|sf|tt)|boldsymbol|bm|mbox|hbox|emph|underline|displaystyle"
  r"|bf|rm)\b\s*"
)
_SYMBOLS = "\u2705\u2713\u2714\u2611\u2b50\u2728\ufe0f\U0001f389\U0001f449\U0001f3af\U0001f4a1\U0001f600\U0001f60a\U0001f44d\U0001f680"
_WRAPPERS = (
  ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("*", "*"),
  ("_", "_"),
  ("```", "```"), ("`", "`"), ('"', '"'), ("'", "'"), ("\u201c", "\u201d"), ("\u00ab", "\u00bb"),
  ("\u300c", "\u300d"),
)  # fmt: skip
_WRAPPERS_BY_START = {
  start: tuple(pair for pair in _WRAPPERS if pair[0][0] == start) for start in {left[0] for left, _ in _WRAPPERS}
}
_STOPS = (".", ",", ";", "\u3002")
# A text in which no remark or sentence ends.
_ONE_WORD = re.compile(r"[^\s(\[]*[^\s(\[.?;!\u3002*_\"'\u201d)]")
_ELLIPSIS = re.compile(r"[0-9]\.{2,}$")
_BRACE = re.compile(r"\\[{}\\]|[{}]")

_FORMULA = re.compile(
  r"\$\$[^$]+\$\$|\$[^$\n]+\$|\\\([^\n]+?\\\)|\\\[.+?\\\]|\*\*[^*\n]+\*\*|`[^`\n]+`", re.DOTALL
)
_LABEL = re.compile(
  r"(?:\\(?:text(?:bf|rm)?|mathrm|mathbf)\s*\{\s*)?\(?[A-J][).:](?:\s|\\[ ,;:]|~|\\quad|\})+(?=[-$\\0-9.])\s*"
)
_NUMBER_AND_WORDS = re.compile(
  r"(-?\$?[0-9][0-9,]*(?:\.[0-9]+|/[0-9]+)?)(?:\s+[a-z][a-z'-]*){2,}", re.IGNORECASE
)
# math-verify takes what is in \text for a unit.
_SCALE = re.compile(
  r"\\(?:text|mathrm|mbox)\s*\{\s*(hundred|thousand|million|billion|trillion|dozen)\b\s*\}", re.IGNORECASE
)
# Digits, formulas or words beside a value that may make it another one.
_CHANGES = re.compile(
  r"[0-9$\\=<>+*/^]|\b(?:or|and|not|to|times|over|plus|minus|negative|point|squared|cubed|factorial|half"
  r"|twice|double|"
  r"triple|root|square|sum|product|difference|quotient|percent|hundred|thousand|million|billion|trillion"
  r"|dozen|least|"
  r"most|more|less|fewer|greater|than|under|below|above|between|up|mod|modulo|base|divided|multiplied|power"
  r"|wrong|"
  r"incorrect|false|either|neither)\b",
  re.IGNORECASE,
)


def undecorated(answer: str) -> str:
  """Strips spaces, dollar signs, quotes, bold, tags, commands and a full stop around an answer.

  Example:
    >>> undecorated(" **$5$.** "), undecorated(r"\\textbf{(B)}"), undecorated("<b>5</b>")
    ('5', '(B)', '5')
  """
  answer = _HTML.sub("", answer).strip() if "<" in answer else answer.strip()
  while answer and not (answer[0].isalnum() and answer[-1].isalnum()):
    before = answer
    if not answer.isascii():
      answer = answer.strip(_SYMBOLS).strip()
    if answer.endswith(_STOPS) and not answer.endswith("\\,") and not _ELLIPSIS.search(answer):
      answer = answer[:-1].rstrip()
    for left, right in _WRAPPERS_BY_START.get(answer[:1], ()):
      if answer.startswith(left) and answer.endswith(right) and len(answer) >= len(left) + len(right):
        inner = answer[len(left) : -len(right)]
        answer = answer if left in inner else inner.strip()
    if answer.startswith("\\") and answer.endswith("}") and (command := _COMMAND.match(answer)):
      inner = answer[command.end() + 1 : -1]
      answer = inner.strip() if answer.startswith("{", command.end()) and _is_balanced(inner) else answer
    if "**" in (answer[:2], answer[-2:]) and answer.count("**") == 1:
      answer = answer.removeprefix("**").removesuffix("**").strip()
    if answer == before:
      break
  return answer


def _is_balanced(text: str) -> bool:
  """Returns whether all braces that a text opens are closed in it, and no others."""
  depth = 0
  for brace in _BRACE.findall(text):
    depth += (brace == "{") - (brace == "}")
    if depth < 0:
      return False
  return depth == 0


def without_remark(statement: str) -> str:
  """Returns the answer of a statement without decoration, lead-in, remark and further sentences.

  Example:
    >>> without_remark("clearly $5$, because 2 + 3 = 5. Done.")
    '5'
  """
  answer = boxed(statement)[-1] if "\\boxed" in statement and boxed(statement) else statement
  end = _END.search(answer)
  answer = _without_lead(undecorated(answer[: end.start()] if end else answer))
  if " " in answer or "(" in answer:
    remark = _REMARK.search(answer)
    answer = answer[: remark.start()] if remark and remark.start() else answer
  return undecorated(answer)


def _without_lead(text: str) -> str:
  while lead := _LEAD.match(text):
    text = text[lead.end() :]
  return text


def readings(statement: str) -> Iterator[str]:
  """Yields what a statement may be as a text: up to a remark or a sentence's end, or whole.

  Example:
    >>> list(readings("He left because it rained. I know."))
    ['He left', 'He left', 'He left because it rained', 'He left because it rained. I know']
  """
  whole = undecorated(statement)
  if _ONE_WORD.fullmatch(whole) and "\\boxed" not in whole and (whole[0].isdigit() or not _LEAD.match(whole)):
    yield whole
    return
  yield without_remark(statement)
  body = undecorated(_without_lead(whole))
  for end in sorted(match.start() for pattern in (_REMARK, _END) for match in pattern.finditer(body)):
    yield undecorated(body[:end])
  yield body
  if body != whole:
    yield whole


def mathematics(answer: str) -> str:
  """Returns the formula or the number that an answer consists of, without label and words.

  Example:
    >>> mathematics("$5$ apples"), mathematics(r"\\textbf{(D) }15"), mathematics("$5$ or $6$")
    ('5', '15', '$5$ or $6$')
  """
  answer = undecorated(_LABEL.sub("", answer, count=1)) if _LABEL.match(answer) else answer
  answer = _SCALE.sub(r" \1 ", answer).rstrip() if "{" in answer else answer
  formulas = _FORMULA.findall(answer)
  if len(formulas) == 1:
    before, _, after = answer.partition(formulas[0])
    if not _CHANGES.search(f"{before} {after}"):
      return undecorated(formulas[0])
  match = _NUMBER_AND_WORDS.fullmatch(answer)
  return match[1].removeprefix("$") if match and not _CHANGES.search(answer, match.end(1)) else answer
