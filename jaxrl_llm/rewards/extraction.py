"""Extraction of answers from responses, in time linear in the text's length; judges nothing."""

import re
from collections.abc import Callable

MAX_CHARS = 20_000
"""Number of characters read, from the end of a response.

The answer is at the end, and the work on hostile text stays bounded.
"""

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,4}+\{|[{}]|\\[\\{}]")
_HASHES = re.compile(r"####[ \t]*+([^\n#]*+)")
# At the start of a line, optionally in bold: "Answer: 5", "**Final answer:** 5".
_LINE = re.compile(
  r"^[ \t>*_#-]{0,8}+(?:the[ ]+)?(?:final[ ]+)?answer[ \t]{0,4}+[*_]{0,2}+[ \t]{0,4}+:[*_]{0,2}+([^\n]*+)", re.IGNORECASE | re.MULTILINE
)
_SENTENCE = re.compile(r"\banswer\s{1,4}+(?:is|was)\b[ \t]{0,4}+:?+(?=([^\n]{0,300}+))", re.IGNORECASE)
_END = re.compile(r"[.!?;](?=\s|$)")
_TAG = re.compile(r"<answer>|</answer>", re.IGNORECASE)
_VALUE = re.compile(r"[\s*$({\[]{0,8}+(?:[-+\u2212]?+[\d\\.]|[A-Za-z](?![A-Za-z]))")
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"), ('"', '"'), ("\u201c", "\u201d"))


def answer_part(text: str) -> str:
  """Returns the last `MAX_CHARS` characters of a response, without the reasoning before `</think>`.

  Example:
    >>> answer_part("<think>perhaps 4</think>It is 5.")
    'It is 5.'
  """
  return text[-MAX_CHARS:].rpartition("</think>")[2]


def stated_answers(text: str) -> list[str]:
  """Returns each distinct final answer stated in a response, in order; more than one is a hedge.

  Only the first of these forms that occurs is read: `\\boxed{}`, `####`, lines that begin with
  "Answer:", "the answer is".

  Returns:
    The answers without decoration (dollar signs, bold, a full stop). Empty if none is stated.

  Example:
    >>> stated_answers(r"So \\boxed{3} or $\\boxed{\\frac{1}{2}}$, and \\boxed{3}.")
    ['3', '\\\\frac{1}{2}']
    >>> stated_answers("Let me see.\\n**Answer:** $5$.")
    ['5']
  """
  text = answer_part(text)
  answers = boxed(text) if "\\boxed" in text or "\\fbox" in text else []
  answers = answers or _HASHES.findall(text) or [_sentence(match) for match in _LINE.findall(text)] or _said(text)
  return [answer for answer in dict.fromkeys(undecorated(answer) for answer in answers) if answer]


def boxed(text: str) -> list[str]:
  """Returns the content of each `\\boxed{}`, with balanced braces.

  Of nested boxes only the innermost ones are returned. Boxes that are never closed are skipped.

  Example:
    >>> boxed(r"\\boxed{\\{1, 2\\}} and \\boxed{3")
    ['\\\\{1, 2\\\\}']
  """
  contents, opened, latest = [], [], -1
  for match in _BOX.finditer(text):
    token = match[0]
    if token == "}" and opened:
      start = opened.pop()
      if start is not None and start > latest:  # No box is nested in this one.
        contents.append(text[start : match.start()])
        latest = start
    elif token == "{" or token.startswith(("\\boxed", "\\fbox")):
      opened.append(None if token == "{" else match.end())
  return contents


def tagged(text: str) -> list[str]:
  """Returns the content of each `<answer>...</answer>`, in order, and skips unpaired tags.

  Example:
    >>> tagged("<answer> 5 </answer>")
    ['5']
  """
  text, contents, start = answer_part(text), [], None
  for match in _TAG.finditer(text):
    if match[0][1] != "/":
      start = match.end()
    elif start is not None:
      contents.append(text[start : match.start()].strip())
      start = None
  return contents


def undecorated(answer: str) -> str:
  """Strips surrounding spaces, dollar signs, quotes, bold and a full stop from an answer.

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
  """Returns what follows each "the answer is".

  Before the last match, prose such as "the answer is the sum of" is ignored.
  """
  answers = [_sentence(match) for match in _SENTENCE.findall(text)]
  return [answer for answer in answers[:-1] if _VALUE.match(answer)] + answers[-1:]


def _sentence(text: str) -> str:
  end = _END.search(text)
  return text[: end.start()] if end else text


def _only(answers: list[str]) -> str | None:
  """Returns the answer if all are equal, and None if there are none or several different ones."""
  return answers[0] if len(set(answers)) == 1 else None


def answer_at(text: str, answer_in: str) -> str | None:
  """Returns the answer at a location named as in `place`, or None if there is none."""
  return place(answer_in)(text)


PLACES: dict[str, Callable[[str], str | None]] = {
  "whole": lambda text: text,
  "last_line": lambda text: text.rstrip().rpartition("\n")[2],
  "stated": lambda text: _only(stated_answers(text)),
  "tag": lambda text: _only(tagged(text)),
}
"""Locations of an answer: `(response) -> answer`, or None if there are none or several."""


def place(name: str) -> Callable[[str], str | None]:
  """Returns the function that finds an answer at a location.

  Args:
    name: Key of `PLACES`, or `after ` and a marker such as `after ####`, for the text from the last
      marker to the end of its line.

  Raises:
    ValueError: If there is no such location.

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
    _, separator, rest = text.rpartition(marker)
    return rest.partition("\n")[0].strip() if separator else None

  return after
