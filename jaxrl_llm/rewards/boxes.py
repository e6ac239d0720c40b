"""Boxes of LaTeX: their content, and which of them hold no answer."""

import re
from collections import Counter

_BOX_NAME = re.compile(r"\\(?:boxed|fbox|framebox)")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s{0,4}+(\{)?|[{}]|\\[\\{}]")
# Without braces, a box holds a number, a letter, or a command with its arguments.
_BARE = re.compile(
  r"[-+]?[0-9](?:[0-9.,/]*[0-9])?|[A-Za-z](?![A-Za-z])|\\[a-zA-Z]+(?:\{[^{}\n]{0,99}\}|[0-9]){1,3}"
)
_FILLER = re.compile(
  r"\\(?:[hv]?phantom|[hv]space\*?|rule)\s*\{[^{}]*\}(?:\{[^{}]*\})?"
  r"|\\(?:q?quad|square|Box|blacksquare|bigcirc|[lc]?dots|blank|text\w*|mathrm|mathbf|underline|mbox|hfill"
  r"|strut)"
  r"(?![a-zA-Z])|\\[ ,;:!_]|[\s{}?_.~$\u2026\u25a1\u2610\u2b1c]"
)
_ONLY_FILLER = re.compile(rf"(?:{_FILLER.pattern})*+")
_FILLER_WORDS = re.compile(r"(?:your|the|my|insert|put)?(?:final)?answer(?:here|goeshere)?", re.IGNORECASE)
_LONGEST_FILLER = 80  # Characters.


def boxed(text: str) -> list[str]:
  """Returns the content of each `\\boxed{}`, with balanced braces.

  Of nested boxes only the innermost ones are returned. Boxes that are never closed are skipped.

  Example:
    >>> boxed(r"\\boxed{\\{1, 2\\}}, \\boxed3 and \\boxed{4")
    ['\\\\{1, 2\\\\}', '3']
  """
  return _contents(text)[0]


def _contents(text: str) -> tuple[list[str], bool]:
  """Returns the content of each box, and whether the last one is never closed."""
  if "\\" not in text or not (first := _BOX_NAME.search(text)):
    return [], False
  contents, opened, latest = [], [], -1
  for match in _BOX.finditer(text, first.start()):
    token = match[0]
    if token == "}" and opened:
      start = opened.pop()
      if start is not None and start > latest:  # No box is nested in this one.
        contents.append(text[start : match.start()])
        latest = start
    elif token == "{":
      opened.append(None)
    elif match[1]:
      opened.append(match.end())
    elif len(token) > 2 and (bare := _BARE.match(text, match.end())):
      contents.append(bare[0])
      latest = match.end()
  return contents, any(start is not None and start > latest for start in opened)


def is_filler(content: str) -> bool:
  """Returns whether a text is empty or holds a place for an answer instead of one.

  Example:
    >>> [is_filler(content) for content in (r"\\phantom{00}", "?", r"\\text{your answer}", "x")]
    [True, True, True, False]
  """
  if len(content) > _LONGEST_FILLER or content[:1].isdigit():
    return False
  if "answer" in content.lower():
    return _FILLER_WORDS.fullmatch(_FILLER.sub("", content)) is not None
  return _ONLY_FILLER.fullmatch(content) is not None


def own_boxes(text: str, question: str) -> list[str]:
  """Returns the boxes that are neither filler nor the question's.

  If the last box is never closed, only an empty text is returned: its content is unknown.
  """
  contents, breaks_off = _contents(text)
  if breaks_off:
    return [""]
  quoted = _quoted(question) if contents and "box" in question else ()
  return [content for content in contents if not is_filler(content) and _key(content) not in quoted]


def boxes_of_the_question(text: str, question: str) -> list[str]:
  """Returns the last box if it is the only one, or stands more often than in the question."""
  contents = [content for content in boxed(text) if not is_filler(content)]
  if not contents or not (quoted := _quoted(question)):
    return []
  counts = Counter(map(_key, contents))
  return contents[-1:] if len(counts) == 1 or counts[_key(contents[-1])] > quoted[_key(contents[-1])] else []


def _quoted(question: str) -> Counter:
  return Counter(map(_key, boxed(question)))


def _key(content: str) -> str:
  return "".join(content.split())
