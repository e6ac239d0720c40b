"""Extraction of answers from responses, in time linear in the text's length; judges nothing."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.rewards.forms import Form, boxed, statements, tagged

MAX_CHARS = 20_000
"""Number of characters read, from the end of a response.

The answer is at the end, and the work on hostile text stays bounded.
"""

_REASONING = re.compile(r"<(/?)(?:think(?:ing)?|thought|reasoning)>|\[(/?)THINK\]", re.IGNORECASE)
_ABBREVIATIONS = "".join(rf"(?<!\b{word})" for word in ("Mr", "Ms", "Mrs", "Dr", "St", "vs", "e\\.g", "i\\.e", "approx"))
_END = re.compile(
  rf"(?:{_ABBREVIATIONS}(?<!\\)[.?;\u3002]|!(?!\s*[-+*/=^\\!]))(?=[*_\"'\u201d)]*(?:\s|$))(?![*_\"'\u201d)]*\s+or\b)", re.IGNORECASE
)
_LEAD = re.compile(
  r"(?:(?:(?:the|my|our)\s+)?(?:final\s+|correct\s+)?answer\s*(?:is\b|was\b|:)|[,:;]"
  r"|(?:clearly|simply|therefore|thus|hence|indeed|obviously|then|exactly|precisely|just|only|approximately|about|roughly|around|"
  r"now|actually|finally|evidently|indeed|of course|in fact|equal to|given by)\b(?!\s*[-:]\w),?)\s*",
  re.IGNORECASE,
)
_REMARK = re.compile(
  r"[,;:]?\s+(?:because|since|as|which|(?<!\bor )so|thus|hence|due to|thanks to)\b"
  r"|,\s+(?:therefore|not|where|when|by|given|and (?:so|thus|hence|that))\b"
  r"|\s+(?:[\u2014\u2013]|--?)\s+(?=[A-Za-z]{2})"
  r"|[,;]?\s*[(\[](?!(?:or|and|mod|base|to)\b)(?=[A-Za-z]{2}|=|\u2248|\\approx)[^()\[\]]{0,300}[)\]](?=[\s.*_]*$)",
  re.IGNORECASE,
)
_TAGS_OF_HTML = re.compile(r"</?(?:b|strong|i|em|u|span|p|div|center|code|mark|big)(?:\s[^<>]{0,80})?>|<br\s*/?>", re.IGNORECASE)
_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:bf|rm|it|sf|tt)|boldsymbol|bm|mbox|hbox|emph|underline|displaystyle|bf|rm)\b\s*")
_SYMBOLS = "\u2705\u2713\u2714\u2611\u2b50\u2728\ufe0f\U0001f389\U0001f449\U0001f3af\U0001f4a1\U0001f600\U0001f60a\U0001f44d\U0001f680"
_WRAPPERS = (
  ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("_", "_"), ("```", "```"), ("`", "`"),
  ('"', '"'), ("'", "'"), ("\u201c", "\u201d"), ("\u00ab", "\u00bb"), ("\u300c", "\u300d"),
)  # fmt: skip
_ELLIPSIS = re.compile(r"[0-9]\.{2,}$")
_FORMULA = re.compile(r"\$\$[^$]+\$\$|\$[^$\n]+\$|\\\([^\n]+?\\\)|\\\[.+?\\\]|\*\*[^*\n]+\*\*|`[^`\n]+`", re.DOTALL)
_LABEL = re.compile(r"(?:\\(?:text(?:bf|rm)?|mathrm|mathbf)\s*\{\s*)?\(?[A-J][).:](?:\s|\\[ ,;:]|~|\\quad|\})+(?=[-$\\0-9.])\s*")
_NUMBER_AND_WORDS = re.compile(r"(-?\$?[0-9][0-9,]*(?:\.[0-9]+|/[0-9]+)?)(?:\s+[a-z][a-z'-]*){2,}", re.IGNORECASE)
# math-verify takes what is in \text for a unit.
_SCALE = re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*(hundred|thousand|million|billion|trillion|dozen)\b\s*\}", re.IGNORECASE)
# Digits, formulas or words beside a value that may make it another one.
_CHANGES = re.compile(
  r"[0-9$\\=<>+*/^]|\b(?:or|and|not|to|times|over|plus|minus|negative|point|squared|cubed|factorial|half|twice|double|triple|root|square|sum|product|"
  r"difference|quotient|percent|hundred|thousand|million|billion|trillion|dozen|least|most|more|less|fewer|greater|than|under|below|above|between|up|"
  r"mod|modulo|base|divided|multiplied|power|wrong|incorrect|false|either|neither)\b", re.IGNORECASE
)  # fmt: skip


def answer_part(text: str) -> str:
  """Returns the end of a response, without its reasoning.

  The reasoning ends at the last `</think>`, and what follows a `<think>` that is never closed is
  reasoning too. At most the last `MAX_CHARS` characters are returned.

  Example:
    >>> answer_part("<think>perhaps 4</think>It is 5."), answer_part("<think>It is 4.")
    ('It is 5.', '')
  """
  start, end = 0, len(text)
  if "<" in text or "[" in text:
    for match in _REASONING.finditer(text):
      if "/" in match[0]:
        start, end = match.end(), len(text)
      else:
        end = min(end, match.start())
  if end - start <= MAX_CHARS:
    return text[start:end]
  return text[end - MAX_CHARS : end].lstrip("0123456789,.")  # It may be the second half of a number.


def question_of(example: Mapping[str, Any]) -> str:
  """Returns the question of a row, whose boxes are not the response's; empty if it has none."""
  question = example.get("question") or example.get("prompt") or ""
  return question if isinstance(question, str) else ""


class Statement(NamedTuple):
  """An answer as a response states it.

  Attributes:
    answer: Answer without decoration, lead-in ("clearly") and remark ("because ...").
    text: All that is stated, as it stands in the response.
    in_prose: Whether it stands in running text.
  """

  answer: str
  text: str
  in_prose: bool


def stated(text: str, question: str | None = None) -> list[Statement]:
  """Returns each final answer stated in a response, in order.

  Only the strongest form of `forms.FORMS` that occurs is read.

  Args:
    text: Response.
    question: Question, whose boxes a response may quote; None if unknown.

  Returns:
    The statements. One with an empty `answer` cannot be read, such as a last box that is never
    closed.

  Example:
    >>> stated("The answer is clearly $5$, because 2 + 3 = 5.")[0]
    Statement(answer='5', text='clearly $5$, because 2 + 3 = 5.', in_prose=True)
  """
  bodies, form = statements(answer_part(text), question or "")
  read = {body: _statement(body, form) for body in dict.fromkeys(bodies)}
  return [read[body] for body in bodies]


def _statement(body: str, form: Form) -> Statement:
  if form.is_closed:
    return Statement(undecorated(body), body, in_prose=False)
  answer = boxed(body)[-1] if "\\boxed" in body and boxed(body) else body
  end = _END.search(answer)
  answer = undecorated(answer[: end.start()] if end else answer)
  answer = _without_lead(answer)
  remark = _REMARK.search(answer)
  return Statement(undecorated(answer[: remark.start()] if remark and remark.start() else answer), body, form.in_prose)


def readings(text: str, question: str | None = None) -> list[list[str]]:
  """Returns how each statement of a response may be read as a text, the shortest reading first.

  "He left because it rained" is "He left", with a remark, or the whole.

  Example:
    >>> readings("Answer: He left because it rained. I know.")
    [['He left', 'He left because it rained', 'He left because it rained. I know']]
  """
  return [_readings(statement) for statement in stated(text, question)]


def _readings(statement: Statement) -> list[str]:
  whole = undecorated(statement.text)
  body = undecorated(_without_lead(whole))
  ends = sorted(match.start() for pattern in (_REMARK, _END) for match in pattern.finditer(body))
  return list(dict.fromkeys([statement.answer, *(undecorated(body[:end]) for end in ends if end), body, whole]))


def _without_lead(text: str) -> str:
  while lead := _LEAD.match(text):
    text = text[lead.end() :]
  return text


def stated_answers(text: str, question: str | None = None) -> list[str]:
  """Returns each distinct final answer stated in a response, as mathematics; several are a hedge.

  Args:
    text: Response.
    question: Question, whose boxes a response may quote; None if unknown.

  Returns:
    The answers without decoration, labels of options and words behind a formula. Empty if none is
    stated, or one cannot be read.

  Example:
    >>> stated_answers(r"So \\boxed{3} or $\\boxed{\\frac{1}{2}}$, and \\boxed{3}.")
    ['3', '\\\\frac{1}{2}']
    >>> stated_answers("Let me see.\\n**Answer:** $5$ apples are left.")
    ['5']
  """
  answers = [_mathematics(statement.answer) for statement in stated(text, question)]
  return list(dict.fromkeys(answers)) if all(answers) else []


def _mathematics(answer: str) -> str:
  """Returns the formula or the number that an answer consists of, without label and words."""
  answer = undecorated(_LABEL.sub("", answer, count=1)) if _LABEL.match(answer) else answer
  answer = _SCALE.sub(r" \1 ", answer).rstrip()
  formulas = _FORMULA.findall(answer)
  if len(formulas) == 1:
    before, _, after = answer.partition(formulas[0])
    if not _CHANGES.search(f"{before} {after}"):
      return undecorated(formulas[0])
  match = _NUMBER_AND_WORDS.fullmatch(answer)
  return match[1].removeprefix("$") if match and not _CHANGES.search(answer, match.end(1)) else answer


def undecorated(answer: str) -> str:
  """Strips spaces, dollar signs, quotes, bold, tags, text commands and a full stop around an answer.

  Example:
    >>> undecorated(" **$5$.** "), undecorated(r"\\textbf{(B)}"), undecorated("<b>5</b>")
    ('5', '(B)', '5')
  """
  if "<" in answer:
    answer = _TAGS_OF_HTML.sub("", answer)
  answer = answer.strip().strip(_SYMBOLS).strip()
  for _ in range(5):
    before = answer
    if answer.endswith((".", ",", ";", "\u3002")) and not answer.endswith("\\,") and not _ELLIPSIS.search(answer):
      answer = answer[:-1].rstrip()
    for left, right in _WRAPPERS:
      if answer.startswith(left) and answer.endswith(right) and len(answer) >= len(left) + len(right):
        inner = answer[len(left) : -len(right)]
        answer = answer if left in inner else inner.strip()
    if answer.startswith("\\") and answer.endswith("}") and (command := _COMMAND.match(answer)):
      inner = answer[command.end() + 1 : -1]
      if answer.startswith("{", command.end()) and _is_balanced(inner):
        answer = inner.strip()
    if answer.count("**") == 1:
      answer = answer.removeprefix("**").removesuffix("**").strip()
    if answer == before:
      break
  return answer


def _is_balanced(text: str) -> bool:
  """Returns whether no brace closes a group that is opened before the text."""
  depth = 0
  for char in re.findall(r"\\[{}\\]|[{}]", text):
    depth += (char == "{") - (char == "}")
    if depth < 0:
      return False
  return depth == 0


def answer_at(text: str, answer_in: str, question: str | None = None) -> str | None:
  """Returns the answer at a location named as in `place`, or None if there is none."""
  return place(answer_in)(text, question)


def _only(answers: list[str]) -> str | None:
  """Returns the answer if all are equal, and None if there are none or several different ones."""
  return answers[0] or None if len(set(answers)) == 1 else None


PLACES: dict[str, Callable[[str, str | None], str | None]] = {
  "whole": lambda text, question=None: text,
  "last_line": lambda text, question=None: answer_part(text).rstrip().rpartition("\n")[2],
  "stated": lambda text, question=None: _only([statement.answer for statement in stated(text, question)]),
  "tag": lambda text, question=None: _only(tagged(answer_part(text))),
}
"""Locations of an answer: `(response, question) -> answer`, or None if there are none or several."""


def place(name: str) -> Callable[[str, str | None], str | None]:
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

  def after(text: str, question: str | None = None) -> str | None:
    _, separator, rest = answer_part(text).rpartition(marker)
    return rest.partition("\n")[0].strip() if separator else None

  return after
