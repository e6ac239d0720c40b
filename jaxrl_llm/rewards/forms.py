"""The forms in which a response states its answer: where each stands, with examples."""

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from jaxrl_llm.rewards.headings import is_heading

_MAX_BODY = 500  # Characters of one statement.

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s{0,4}+(\{)?|[{}]|\\[\\{}]")
# Without braces, a box holds a number, a letter, or a command with its arguments.
_BARE = re.compile(r"[-+]?[0-9](?:[0-9.,/]*[0-9])?|[A-Za-z](?![A-Za-z])|\\[a-zA-Z]+(?:\{[^{}\n]{0,99}\}|[0-9]){1,3}")
_FILLER = re.compile(
  r"\\(?:[hv]?phantom|[hv]space\*?|rule)\s*\{[^{}]*\}(?:\{[^{}]*\})?"
  r"|\\(?:q?quad|square|Box|blacksquare|[lc]?dots|blank|text\w*|mathrm|mathbf|underline|mbox|hfill|strut)(?![a-zA-Z])"
  r"|\\[ ,;:!_]|[\s{}?_.~$\u2026\u25a1\u2610\u2b1c]"
)
_FILLER_WORDS = re.compile(r"(?:your|the|my|insert|put)?(?:final)?answer(?:here|goeshere)?", re.IGNORECASE)

_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*+([^\n#]*+)")
_TAG = re.compile(r"<answer>|</answer>", re.IGNORECASE)
_JSON = re.compile(
  r"""\\?["'](?:final[ _]?)?answer\\?["']\s{0,9}+:\s{0,9}+(?:"((?:[^"\\]|\\.){0,500}+)"|\\"([^"\\\n]{0,200}+)\\"|'((?:[^'\\\n]|\\.){0,500}+)'|"""
  r"""(\[[^\[\]\n]{0,200}\]|[^\s"',}\]][^,}\n]{0,200}+))""", re.IGNORECASE | re.DOTALL
)  # fmt: skip
_ESCAPE = re.compile(r"\\([\"'\\/])|\\u([0-9a-fA-F]{4})|\\n(?![a-z])")

_WORD = (
  r"(?:final[ ]+)?(?:answer|ans\b\.?)|final[ ]+(?:result|solution)|(?:correct|right|best)[ ]+(?:option|choice)"
  r"|r\u00e9ponse|antwort|respuesta|risposta|resposta|\u043e\u0442\u0432\u0435\u0442|(?:\u6700\u7ec8)?\u7b54\u6848"
)
_DIGIT_NEXT = r"(?=[*$(\\]{0,4}[-+\u2212]?[$\u00a3\u20ac]?[0-9]++(?![.:)][ \t]*[A-Za-z]))"
_HTML = "b|strong|em|i|u|p|h[1-6]"
_LINE = re.compile(
  rf"^(?:[^\w\n]|_){{0,16}}+(?:(?:{_HTML})>[ ]?)?(?:[0-9]{{1,2}}[.)][^\w\n]{{1,4}})?(?:(?:so|thus|hence|therefore),?[ ]+)?(?:(?:the|my|our)[ ]+)?(?:correct[ ]+)?(?:{_WORD})(?:[ ]*\([^()\n]{{0,40}}\))?"
  rf"[ \t\u00a0]{{0,4}}+[*_`\"]{{0,3}}+(?:</(?:{_HTML})>)?[ \t\u00a0]{{0,4}}+"
  rf"(?:(?:[:=\uff1a\u662f\u4e3a\u2192]|[-=]>|[-\u2013\u2014](?=[ \t]))(?:(?:[*_`]{{1,3}}+|</(?:{_HTML})>)(?=\s|$))?|[^\w\n]{{0,8}}+$|{_DIGIT_NEXT})",
  re.MULTILINE,
)
_IS = (
  r"(?:[ ](?:to|for|of|in|here)\b[^\n.:!?=]{0,80}?|,[ ]\w{1,12},)?\s{1,4}+(?:is|was|equals|(?:must|should|would|will)[ ]be)\b"
  r"(?!\s{1,4}(?:not|never|neither|wrong|incorrect)\b)(?:[ ](?:clearly|thus|therefore|hence|then|simply|just|exactly)\b)?[ \t]{0,4}+[:\uff1a]?+"
)
# Each begins with a literal, which is searched many times as fast as alternatives.
_SENTENCES = {
  "answer": re.compile(rf"answer(?:{_IS}|[ ]?[:\uff1a][*_]{{0,3}}+)"),
  **{word: re.compile(rf"{word}[ ](?:answer[ ])?(?:option|choice|letter|result|value|solution){_IS}") for word in ("correct", "right", "best", "final")},
  "\u7b54\u6848": re.compile("\u7b54\u6848(?:\u662f|\u4e3a)[ \t]{0,4}+[:\uff1a]?+"),
}
_OPTION = re.compile(r"(?:[Oo]ption|[Cc]hoice)[ ](?:\\[a-z]+\{|<[a-z]+>|[^\w\s]){0,4}+([A-Z])(?:</[a-z]+>|[^\w\s]){0,4}+[ ]is[ ](?:the[ ])?(?:correct|right|best)\b(?![ ]?-)")
# Prose behind "Answer:" or "the answer is" states nothing if a value stands elsewhere.
_ARTICLE = r"(?:the\b|an\b|(?-i:a)(?=\s)|(?-i:A)(?=\s+(?!because|since|which|was|and)[a-z]{3}))"
_WORDS_OF_PROSE = (
  r"(?:to|in|as|by|that|this|what|it|there|we|you|i(?=\s+[a-z])|he|she|they|let|let's|first|since|because|if|when|for|found|given|obtained|"
  r"calculated|not|correct|right|wrong|below|above|also|now|here|then|next|our|your|my|her|his|their)\b(?!\s*[=(^_*\])])"
)
_PROSE = {
  # "Answer: The Eiffel Tower" states it, "Answer: The train travels for two hours." does not.
  "line": re.compile(rf"[*_\s]*(?:{_WORDS_OF_PROSE}|{_ARTICLE}(?:\s+[^\s.]+){{6}}|{_ARTICLE}[^\n.]{{0,60}}\s(?:is|are|was|were|has|have|can|will)\s|$)", re.IGNORECASE),
  "sentence": re.compile(rf"[*_\s]*(?:{_WORDS_OF_PROSE}|{_ARTICLE}|$)", re.IGNORECASE),
}


def boxed(text: str) -> list[str]:
  """Returns the content of each `\\boxed{}`, with balanced braces.

  Of nested boxes only the innermost ones are returned. Boxes that are never closed are skipped.

  Example:
    >>> boxed(r"\\boxed{\\{1, 2\\}}, \\boxed3 and \\boxed{4")
    ['\\\\{1, 2\\\\}', '3']
  """
  return _boxes(text)[0]


def _boxes(text: str) -> tuple[list[str], bool]:
  """Returns the content of each box, and whether the last one is never closed."""
  contents, opened, latest = [], [], -1
  for match in _BOX.finditer(text):
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
  """Returns whether a box is empty or holds a place for an answer instead of one.

  Example:
    >>> [is_filler(content) for content in (r"\\phantom{00}", "?", r"\\text{your answer}", "x")]
    [True, True, True, False]
  """
  rest = _FILLER.sub("", content)
  return not rest or _FILLER_WORDS.fullmatch(rest) is not None


def tagged(text: str) -> list[str]:
  """Returns the content of each `<answer>...</answer>`, in order, and skips unpaired tags.

  Example:
    >>> tagged("<answer> 5 </answer>")
    ['5']
  """
  contents, start = [], None
  for match in _TAG.finditer(text):
    if match[0][1] != "/":
      start = match.end()
    elif start is not None:
      contents.append(text[start : match.start()].strip())
      start = None
  return contents


def _own_boxes(text: str, question: str) -> list[str]:
  """Returns the boxes that are neither filler nor the question's; [""] if the last one breaks off."""
  if "\\boxed" not in text and "\\fbox" not in text and "\\framebox" not in text:
    return []
  contents, breaks_off = _boxes(text)
  if breaks_off:
    return [""]
  quoted = _quoted(question)
  return [content for content in contents if not is_filler(content) and _key(content) not in quoted]


def _boxes_of_the_question(text: str, question: str) -> list[str]:
  """Returns the last box if it is the only one, or stands more often than in the question."""
  quoted = _quoted(question)
  contents = [content for content in boxed(text) if not is_filler(content)] if quoted else []
  if not contents:
    return []
  counts = Counter(map(_key, contents))
  return contents[-1:] if len(counts) == 1 or counts[_key(contents[-1])] > quoted[_key(contents[-1])] else []


def _quoted(question: str) -> Counter:
  return Counter(map(_key, boxed(question))) if "box" in question else Counter()


def _key(content: str) -> str:
  return "".join(content.split())


def _hashes(text: str, question: str) -> list[str]:
  if "####" not in text:
    return []
  end, bodies = len(text.rstrip()), []
  for match in _HASHES.finditer(text):
    before = text[max(match.start() - 8, 0) : match.start()]
    starts_line = not before.rpartition("\n")[2].strip(" \t>*") and ("\n" in before or match.start() <= 8)
    body = match[1].strip() or (_behind(text, match.end()) if text.startswith("\n", match.end()) else "")
    heading = is_heading(body, followed=match.end() < end) if starts_line else False
    if body and heading is not True and not _LINE.match(_lower(body)):
      bodies.append((body, heading))
  # Words are the answer if they end the response, and else a heading.
  words = bool(bodies) and bodies[-1][1] is None and match.end() >= end
  return [body for body, heading in bodies if heading is False or words]


def _tags(text: str, question: str) -> list[str]:
  if "<" not in text:
    return []
  bodies = []
  for content in tagged(text):
    inner = [body for form in (_hashes, _json, _lines, _sentences) for body in form(content, question)]
    bodies += inner or [content]
  return bodies


def _json(text: str, question: str) -> list[str]:
  if not any(ending in text for ending in ('nswer"', "nswer'", 'nswer\\"', 'NSWER"')):
    return []
  return [_unescaped(next(filter(None, match.groups()), "")).strip() for match in _JSON.finditer(text)]


def _unescaped(value: str) -> str:
  """Decodes a string of JSON; `\\frac` in it is LaTeX that was not escaped, not a form feed."""
  value = _ESCAPE.sub(lambda escape: escape[1] or (chr(int(escape[2], 16)) if escape[2] else "\n"), value)
  return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _lines(text: str, question: str) -> list[str]:
  # `answer = a + b` is a line of a program.
  return [_behind(text, match.end()) for match in _LINE.finditer(_lower(text)) if not (match[0][-1] == "=" and text.startswith("answer", match.start()))]


def _sentences(text: str, question: str) -> list[str]:
  lower = _lower(text)
  matches = [match for word, pattern in _SENTENCES.items() if word in lower for match in pattern.finditer(lower)]
  matches.sort(key=lambda match: match.start())
  ends = [*(match.start() for match in matches), len(text)][1:]
  return [_behind(text, match.end(), end) for match, end in zip(matches, ends, strict=True)]


def _lower(text: str) -> str:
  """Returns a text in lower case, which patterns search faster than regardless of case."""
  lower = text.lower()
  return lower if len(lower) == len(text) else text  # Some letters become two.


def _options(text: str, question: str) -> list[str]:
  return _OPTION.findall(text) if "ption" in text or "hoice" in text else []


def _behind(text: str, start: int, end: int | None = None) -> str:
  """Returns the rest of the line, or the next line that is not blank; a displayed formula whole."""
  end = len(text) if end is None else end
  line = start
  while start < end and text[start] in " \t\r\n>":
    start += 1
  if "\n" in text[line:start] and text.startswith(("- ", "* ", "\u2022 "), start):
    start += 2
  limit = min(end, start + _MAX_BODY)
  line = start
  for opening, closing in (("$$", "$$"), ("\\[", "\\]"), ("```", "```")):
    if text.startswith(opening, start):
      line = max(text.find(closing, start + len(opening), limit), start)
  stop = text.find("\n", line, limit)
  return text[start : limit if stop < 0 else stop].strip()


class Form(NamedTuple):
  """A form of a statement.

  Attributes:
    name: Name, for people.
    rule: Description of where the answer stands.
    read: Function `(text, question) -> statements` that returns what stands in this form, in order.
    examples: Pairs of a response and the answer that it states.
    in_prose: Whether it stands in running text, where prose may follow instead of an answer.
    is_closed: Whether its end is marked, so that no remark belongs to it.
  """

  name: str
  rule: str
  read: Callable[[str, str], list[str]]
  examples: tuple[tuple[str, str], ...]
  in_prose: bool = False
  is_closed: bool = False


FORMS = (
  Form(
    "box", "in `\\boxed{}` or `\\fbox{}`, with or without braces; empty boxes, filler and boxes of the question are none", _own_boxes,
    ((r"so $\boxed{42}$", "42"), (r"so $\boxed3$ of them", "3"), (r"\fbox {\$42}", "42"), (r"$\boxed{\phantom{0}} = \boxed{42}$", "42"),
     (r"\boxed{\text{B}}", "B"), (r"\boxed{\textbf{(B) }15}", "B")),
    is_closed=True,
  ),
  Form(
    "answer tags", "in `<answer>...</answer>`", _tags,
    (("<think>6 * 7</think><answer>42</answer>", "42"), ("<answer>\nThe answer is 42.\n</answer>", "42"), ("<answer>(B)</answer>", "B")),
  ),
  Form(
    "hashes", "behind `####`, unless it is a heading: numbered, or words with text below", _hashes,
    (("6 * 7 = 42\n#### 42", "42"), ("#### 1. Multiply\n6 * 7 = 42\n#### 2. Conclude\n#### $42 in all", "42"), ("#### B", "B")),
  ),
  Form(
    "JSON", "in a field `answer` or `final_answer`", _json,
    (('{"reasoning": "6 * 7 = 42", "answer": "42"}', "42"), ("{'final_answer': 42, 'steps': 3}", "42"), ('{"answer": "B) four"}', "B")),
  ),
  Form(
    "line", "behind \"Answer:\" or \"Final answer\" at the start of a line, after any marks; on the same line or the next", _lines,
    (("Answer: 42", "42"), ("\u2705 **Final Answer**: **42**", "42"), ("### Final Answer\n\n$$\n42\n$$", "42"), ("**Answer:**\n42 apples", "42"),
     ("Ans. = 42, because 6 * 7 = 42", "42"), ("Answer - $42.", "42"), ("\u7b54\u6848\uff1a42", "42"), ("Answer: (B) four", "B")),
    in_prose=True,
  ),
  Form(
    "sentence", "behind \"the answer is\", \"the correct option is\", \"the final result must be\" and the like", _sentences,
    (("The answer is 42.", "42"), ("the answer is therefore $42$ (see above)", "42"), ("The final answer is:\n\n$$42$$", "42"),
     ("So the answer to the question is 6 * 7 = 42 apples.", "42"), ("The correct option is B.", "B"),
     ("The answer is option $B$, because 4 is even.", "B")),
    in_prose=True,
  ),
  Form("option", "in \"option B is correct\"", _options, (("Only option (B) is correct.", "B"),)),
  Form(
    "box of the question", "in a box that the question contains too, if nothing else is stated", _boxes_of_the_question,
    ((r"\boxed{7}", "7"),),
    is_closed=True,
  ),
)  # fmt: skip
"""The forms, the strongest first. Only the first one that occurs is read."""

_FORM_OF_PROSE = next(form for form in FORMS if form.in_prose)


def statements(text: str, question: str) -> tuple[list[str], Form]:
  """Returns what a text states as its answer, in the strongest form that occurs.

  Args:
    text: Response without its reasoning.
    question: Question that it answers; empty if unknown.

  Returns:
    The statements in order, and their form.
  """
  prose: list[str] = []
  for form in FORMS:
    bodies = form.read(text, question)
    if not form.is_closed:
      bodies = [body for body in bodies if not is_filler(body)]
    if form.in_prose:
      values = [body for body in bodies if not _PROSE[form.name].match(body)]
      prose, bodies = prose or bodies, values
    if bodies:
      return bodies, form
  return prose, _FORM_OF_PROSE
