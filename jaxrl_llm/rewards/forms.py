"""The forms in which a response states its answer: where each stands, with examples."""

import re
from collections.abc import Callable
from typing import NamedTuple

from jaxrl_llm.rewards.announcements import LINE, PROSE, Part, behind, lines, lowered, options, sentences
from jaxrl_llm.rewards.boxes import boxes_of_the_question, is_filler, own_boxes

_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*+([^\n#]*+)")
_NEXT_HASHES = re.compile(r"\s*+####(?!#)")
_TAG = re.compile(r"<answer>|</answer>", re.IGNORECASE)
_JSON = re.compile(
  r"""\\?["'](?:final[ _]?)?answer\\?["']\s{0,9}+:\s{0,9}+"""
  r"""(?:"((?:[^"\\]|\\.){0,500}+)"|\\"([^"\\\n]{0,200}+)\\"|'((?:[^'\\\n]|\\.){0,500}+)'"""
  r"""|(\[[^\[\]\n]{0,200}\]|[^\s"',}\]][^,}\n]{0,200}+))""",
  re.IGNORECASE | re.DOTALL,
)
_JSON_NAME = re.compile(r"""answer\\?["']""")
_ESCAPE = re.compile(r"\\([\"'\\/])|\\u([0-9a-fA-F]{4})|\\n(?![a-z])")
_NUMBERING = re.compile(
  r"\**(?:(?:step|part|case|question|problem|method|phase|section|stage)\s*\#?(?:[0-9]|[ivx]+\b|[a-z]\b)"
  r"|\(?[0-9]{1,2}(?:\.[0-9]{1,2})?(?:(?:[.):]\**|\s+[-\u2013\u2014])\s+\**[a-z]|\s+\**(?-i:[A-Z][a-z]))"
  r"|\(?(?-i:[a-z])\)\s+\S)",
  re.IGNORECASE,
)
_VALUE = re.compile(
  r"[\s*$({\[\"'`]{0,8}+[-+\u2212\u00b1]?+(?:[$\u00a3\u20ac\u00a5]?[0-9.\\]"
  r"|[\u221a\u03c0\u221e\u00bc-\u00be\u2150-\u215e]"
  r"|[A-Za-z](?![A-Za-z']|\s+[a-z]{2}))"
)


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


def _own_boxes(part: Part) -> list[str]:
  return own_boxes(part.text, part.question)


def _quoted_boxes(part: Part) -> list[str]:
  return boxes_of_the_question(part.text, part.question) if "\\boxed" in part.question else []


def _tags(part: Part) -> list[str]:
  if "<" not in part.text or "<answer>" not in lowered(part.text)[0]:
    return []
  bodies = []
  for content in tagged(part.text):
    inner = Part(content, part.question)
    bodies += [body for read in (_hashes, _json, lines, sentences) for body in read(inner)] or [content]
  return bodies


def _hashes(part: Part) -> list[str]:
  text = part.text
  if "#" not in text or (first := text.find("####")) < 0:
    return []
  end, bodies = len(text.rstrip()), []
  for match in _HASHES.finditer(text, first):
    before = text[max(match.start() - 8, 0) : match.start()]
    starts_line = not before.rpartition("\n")[2].strip(" \t>*") and ("\n" in before or match.start() <= 8)
    body = match[1].strip() or (behind(text, match.end()) if text.startswith("\n", match.end()) else "")
    heading = is_heading(body, followed=match.end() < end) if starts_line else False
    if heading is None and _NEXT_HASHES.match(text, match.end()):
      heading = False  # Words without text below.
    if body and heading is not True and not LINE.match(_line_from(text, match.start(1)).lower()):
      bodies.append((body, heading))
  # Words with text below are a heading, unless words end the response.
  words = bool(bodies) and bodies[-1][1] is None and match.end() >= end
  return [body for body, heading in bodies if heading is False or words]


def is_heading(body: str, *, followed: bool) -> bool | None:
  """Returns whether a line of four hashes is a heading; None for words, which may be either.

  Args:
    body: Text behind the hashes.
    followed: Whether any text follows the line.

  Example:
    >>> [is_heading(body, followed=True) for body in ("1. Add", "Step 2: 40 + 2", "42 apples", "Conclusion")]
    [True, True, False, None]
  """
  if followed and _NUMBERING.match(body):
    return True
  return False if _VALUE.match(body) else None


def _line_from(text: str, start: int) -> str:
  end = text.find("\n", start)
  return text[start:] if end < 0 else text[start:end]


def _json(part: Part) -> list[str]:
  lower, anchors = lowered(part.text)
  if "ans" not in anchors or not _JSON_NAME.search(lower, anchors["ans"]):
    return []
  return [_unescaped(next(filter(None, match.groups()), "")).strip() for match in _JSON.finditer(part.text)]


def _unescaped(value: str) -> str:
  """Decodes a string of JSON; `\\frac` in it is LaTeX that was not escaped, not a form feed."""
  if "\\" not in value:
    return value
  value = _ESCAPE.sub(lambda escape: escape[1] or (chr(int(escape[2], 16)) if escape[2] else "\n"), value)
  return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Form(NamedTuple):
  """A form of a statement.

  Attributes:
    name: Name, for people.
    rule: Description of where the answer stands.
    read: Function `(part) -> statements` that returns what stands in this form, in order.
    examples: Pairs of a response and the answer that it states.
    in_prose: Whether it stands in running text, where prose may follow instead of an answer.
    is_closed: Whether its end is marked, so that no remark belongs to it.
  """

  name: str
  rule: str
  read: Callable[[Part], list[str]]
  examples: tuple[tuple[str, str], ...]
  in_prose: bool = False
  is_closed: bool = False


FORMS = (
  Form(
    "box",
    "in `\\boxed{}` or `\\fbox{}`, with or without braces; not if empty, filler or the question's",
    _own_boxes,
    ((r"so $\boxed{42}$", "42"), (r"so $\boxed3$ of them", "3"), (r"\fbox {\$42}", "42"),
     (r"$\boxed{\phantom{0}} = \boxed{42}$", "42"), (r"\boxed{\text{B}}", "B"),
     (r"\boxed{\textbf{(B) }15}", "B")),
    is_closed=True,
  ),
  Form(
    "answer tags",
    "in `<answer>...</answer>`",
    _tags,
    (("<think>6 * 7</think><answer>42</answer>", "42"), ("<answer>\nThe answer is 42.\n</answer>", "42"),
     ("<answer>(B)</answer>", "B")),
  ),
  Form(
    "hashes",
    "behind `####`, unless it is a heading: numbered, or words with text below",
    _hashes,
    (("6 * 7 = 42\n#### 42", "42"), ("#### 1. Multiply\n6 * 7 = 42\n#### 2. Conclude\n#### $42 in all", "42"),
     ("#### B", "B")),
  ),
  Form(
    "JSON",
    "in a field `answer` or `final_answer`",
    _json,
    (('{"reasoning": "6 * 7 = 42", "answer": "42"}', "42"), ("{'final_answer': 42, 'steps': 3}", "42"),
     ('{"answer": "B) four"}', "B")),
  ),
  Form(
    "line",
    "behind \"Answer:\" or \"Final answer\" that begins a line, after any marks; also on the next line",
    lines,
    (("Answer: 42", "42"), ("\u2705 **Final Answer**: **42**", "42"),
      ("### Final Answer\n\n$$\n42\n$$", "42"),
     ("**Answer:**\n42 apples", "42"), ("Ans. = 42, because 6 * 7 = 42", "42"), ("Answer - $42.", "42"),
     ("\u7b54\u6848\uff1a42", "42"), ("Answer: (B) four", "B")),
    in_prose=True,
  ),
  Form(
    "sentence",
    "behind \"the answer is\", \"the correct option is\", \"the final result must be\" and the like",
    sentences,
    (("The answer is 42.", "42"), ("the answer is therefore $42$ (see above)", "42"),
     ("The final answer is:\n\n$$42$$", "42"), ("So the answer to the question is 6 * 7 = 42 apples.", "42"),
     ("The correct option is B.", "B"), ("The answer is option $B$, because 4 is even.", "B")),
    in_prose=True,
  ),
  Form("option", "in \"option B is correct\"", options, (("Only option (B) is correct.", "B"),)),
  Form(
    "box of the question",
    "in a box that the question contains too, if nothing else is stated",
    _quoted_boxes,
    ((r"\boxed{7}", "7"),),
    is_closed=True,
  ),
)  # fmt: skip
"""The forms, the strongest first. Only the first one that occurs is read; see `statements`."""

_FORM_OF_PROSE = next(form for form in FORMS if form.in_prose)


def statements(
  text: str, question: str, *, accepts: Callable[[str], bool] | None = None
) -> tuple[list[str], Form]:
  """Returns what a text states as its answer, in the strongest form that occurs.

  Args:
    text: Response without its reasoning.
    question: Question that it answers; empty if unknown.
    accepts: Test of a statement. A form none of whose statements passes is read only if no other
      form passes; None accepts all.

  Returns:
    The statements in order, and their form.
  """
  part, prose, strongest = Part(text, question), [], None
  for form in FORMS:
    if not (bodies := form.read(part)):
      continue
    if not form.is_closed:
      bodies = [body for body in bodies if not is_filler(body)]
    if form.in_prose:
      values = [body for body in bodies if body[0].isdigit() or not PROSE[form.name].match(body)]
      prose, bodies = prose or bodies, values
    if bodies and (accepts is None or any(map(accepts, bodies))):
      return bodies, form
    if bodies and strongest is None:
      strongest = bodies, form
  return strongest or (prose, _FORM_OF_PROSE)
