"""Where in a response its answer stands. Linear in the length of the text, whatever it holds; nothing here judges an answer."""

import re
from collections.abc import Callable

MAX_CHARS = 20_000
"""Only the end of a response is read, from this many characters on: the answer stands there, and work on hostile text stays bounded."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,4}+\{|[{}]|\\[\\{}]")
_HASHES = re.compile(r"####[ \t]*+([^\n#]*+)")
# At the start of a line, perhaps in bold: "Answer: 5", "**Final answer:** 5".
_LINE = re.compile(
  r"^[ \t>*_#-]{0,8}+(?:the[ ]+)?(?:final[ ]+)?answer[ \t]{0,4}+[*_]{0,2}+[ \t]{0,4}+:[*_]{0,2}+([^\n]*+)", re.IGNORECASE | re.MULTILINE
)
_SENTENCE = re.compile(r"\banswer\s{1,4}+(?:is|was)\b[ \t]{0,4}+:?+(?=([^\n]{0,300}+))", re.IGNORECASE)
_END = re.compile(r"[.!?;](?=\s|$)")
_TAG = re.compile(r"<answer>|</answer>", re.IGNORECASE)
_VALUE = re.compile(r"[\s*$({\[]{0,8}+(?:[-+\u2212]?+[\d\\.]|[A-Za-z](?![A-Za-z]))")
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"), ('"', '"'), ("\u201c", "\u201d"))


def answer_part(text: str) -> str:
  """The end of a response, at most `MAX_CHARS` characters of it, without what was thought aloud before `</think>`.

  Example:
    >>> answer_part("<think>perhaps 4</think>It is 5.")
    'It is 5.'
  """
  return text[-MAX_CHARS:].rpartition("</think>")[2]


def stated_answers(text: str) -> list[str]:
  """Every different final answer that a response states, in order of appearance; more than one is a hedge.

  Of these ways of stating one, only the first that occurs is read: `\\boxed{}`, `####`, lines that begin with "Answer:", "the answer is".

  Returns:
    The answers without decoration (dollar signs, bold, a full stop); none where none is announced.

  Example:
    >>> stated_answers(r"So \\boxed{3} or $\\boxed{\\frac{1}{2}}$, and \\boxed{3}.")
    ['3', '\\\\frac{1}{2}']
    >>> stated_answers("Let me see.\\n**Answer:** $5$.")
    ['5']
  """
  text = answer_part(text)
  found = boxed(text) if "\\boxed" in text or "\\fbox" in text else []
  found = found or _HASHES.findall(text) or [_sentence(match) for match in _LINE.findall(text)] or _said(text)
  return [answer for answer in dict.fromkeys(undecorated(answer) for answer in found) if answer]


def boxed(text: str) -> list[str]:
  """What stands in each `\\boxed{}`, braces balanced; of boxes in a box only the inner ones, and one that never closes not at all.

  Example:
    >>> boxed(r"\\boxed{\\{1, 2\\}} and \\boxed{3")
    ['\\\\{1, 2\\\\}']
  """
  found, opened, latest = [], [], -1
  for match in _BOX.finditer(text):
    token = match[0]
    if token == "}" and opened:
      start = opened.pop()
      if start is not None and start > latest:  # No box was found inside this one.
        found.append(text[start : match.start()])
        latest = start
    elif token == "{" or token.startswith(("\\boxed", "\\fbox")):
      opened.append(None if token == "{" else match.end())
  return found


def tagged(text: str) -> list[str]:
  """What stands in each `<answer>...</answer>`, in order; tags that do not pair are skipped.

  Example:
    >>> tagged("<answer> 5 </answer>")
    ['5']
  """
  text, found, start = answer_part(text), [], None
  for match in _TAG.finditer(text):
    if match[0][1] != "/":
      start = match.end()
    elif start is not None:
      found.append(text[start : match.start()].strip())
      start = None
  return found


def undecorated(answer: str) -> str:
  """An answer without the spaces, dollar signs, quotes, bold and full stop around it.

  Example:
    >>> undecorated(" **$5$.** ")
    '5'
  """
  answer = answer.strip()
  for _ in range(4):
    before = answer
    if answer.endswith((".", ",", ";")) and not answer.endswith("\\,"):
      answer = answer[:-1].rstrip()
    for left, right in _WRAPPERS:
      if len(answer) >= len(left) + len(right) and answer.startswith(left) and answer.endswith(right):
        inner = answer[len(left) : -len(right)]
        answer = answer if left in inner else inner.strip()
    if answer == before:
      break
  return answer


def _said(text: str) -> list[str]:
  """What follows "the answer is". Before the last one, prose such as "the answer is the sum of" states nothing."""
  found = [_sentence(match) for match in _SENTENCE.findall(text)]
  return [answer for answer in found[:-1] if _VALUE.match(answer)] + found[-1:]


def _sentence(text: str) -> str:
  end = _END.search(text)
  return text[: end.start()] if end else text


def _only(found: list[str]) -> str | None:
  """The one answer; None where there is none, and where there are several different ones."""
  return found[0] if len(set(found)) == 1 else None


def answer_at(text: str, answer_in: str) -> str | None:
  """The answer at a place of a response, see `place`; None where it is not there."""
  return place(answer_in)(text)


PLACES: dict[str, Callable[[str], str | None]] = {
  "whole": lambda text: text,
  "last_line": lambda text: text.rstrip().rpartition("\n")[2],
  "stated": lambda text: _only(stated_answers(text)),
  "tag": lambda text: _only(tagged(text)),
}
"""Where an answer can be looked for: `(response) -> answer`, None where it is not there or where there are several."""


def place(name: str) -> Callable[[str], str | None]:
  """The function that finds an answer at a place.

  Args:
    name: a key of `PLACES`, or `after ` and a marker such as `after ####`: what follows the last one up to the end of its line.

  Raises:
    ValueError: no such place.

  Example:
    >>> place("after Result:")("Result: 5\\nbye")
    '5'
  """
  if name in PLACES:
    return PLACES[name]
  marker = name.removeprefix("after ").strip()
  if not name.startswith("after ") or not marker:
    raise ValueError(f"answer_in: found {name!r}, expected one of {', '.join(PLACES)}, or 'after ' and a marker such as 'after ####'")

  def after(text: str) -> str | None:
    _, found, rest = text.rpartition(marker)
    return rest.partition("\n")[0].strip() if found else None

  return after
