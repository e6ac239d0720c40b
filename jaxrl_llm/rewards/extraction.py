"""Extraction of answers from responses, in time linear in the text's length; judges nothing."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.rewards.decoration import mathematics, readings, undecorated, without_remark
from jaxrl_llm.rewards.forms import Form, statements, tagged

MAX_CHARS = 20_000
"""Number of characters read, from the end of a response.

The answer is at the end, and the work on hostile text stays bounded.
"""

_REASONING = re.compile(r"<(/?)(?:think(?:ing)?|thought|reasoning)>|\[(/?)THINK\]", re.IGNORECASE)


def answer_part(text: str) -> str:
  """Returns the end of a response, without its reasoning.

  The reasoning ends at the last `</think>`, and what follows a `<think>` that is never closed is
  reasoning too. At most the last `MAX_CHARS` characters are returned.

  Example:
    >>> answer_part("<think>perhaps 4</think>It is 5."), answer_part("<think>It is 4.")
    ('It is 5.', '')
  """
  start, end = 0, len(text)
  # A character that is missing is found out in a tenth of the time of a text.
  if ("<" in text and ">" in text) or ("]" in text and "THINK]" in text):
    for match in _REASONING.finditer(text):
      if "/" in match[0]:
        start, end = match.end(), len(text)
      else:
        end = min(end, match.start())
  if end - start <= MAX_CHARS:
    return text[start:end]
  # It may begin with the second half of a number.
  return text[end - MAX_CHARS : end].lstrip("0123456789,.")


def question_of(example: Mapping[str, Any]) -> str:
  """Returns the question of a row, whose boxes are not the response's; empty if it has none."""
  question = example.get("question") or example.get("prompt") or ""
  return question if isinstance(question, str) else ""


class Statement(NamedTuple):
  """An answer as a response states it.

  Attributes:
    text: All that is stated, as it stands in the response. It is empty if it cannot be read, such
      as a last box that is never closed.
    form: Form of the statement.
  """

  text: str
  form: Form

  def answer(self) -> str:
    """Returns the answer without decoration, lead-in ("clearly") and remark ("because ...")."""
    return undecorated(self.text) if self.form.is_closed else without_remark(self.text)

  def readings(self) -> Iterable[str]:
    """Returns what the answer may be as a text, the shortest first; see `decoration.readings`."""
    return [undecorated(self.text)] if self.form.is_closed else readings(self.text)


def stated(
  text: str, question: str | None = None, *, accepts: Callable[[str], bool] | None = None
) -> list[Statement]:
  """Returns each final answer stated in a response, in order.

  Only the strongest form of `forms.FORMS` that occurs, and that `accepts` passes, is read.

  Args:
    text: Response.
    question: Question, whose boxes a response may quote; None if unknown.
    accepts: Test of a statement, as in `forms.statements`.

  Example:
    >>> [statement.answer() for statement in stated("The answer is clearly $5$, because 2 + 3 = 5.")]
    ['5']
  """
  bodies, form = statements(answer_part(text), question or "", accepts=accepts)
  return [Statement(body, form) for body in bodies]


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
  distinct = dict.fromkeys(stated(text, question))
  answers = [mathematics(statement.answer()) for statement in distinct]
  return list(dict.fromkeys(answers)) if all(answers) else []


def answer_at(text: str, answer_in: str, question: str | None = None) -> str | None:
  """Returns the answer at a location named as in `place`, or None if there is none."""
  return place(answer_in)(text, question)


def _only(answers: list[str]) -> str | None:
  """Returns the answer if all are equal, and None if there are none or several different ones."""
  return answers[0] or None if len(set(answers)) == 1 else None


PLACES: dict[str, Callable[[str, str | None], str | None]] = {
  "whole": lambda text, question=None: text,
  "last_line": lambda text, question=None: answer_part(text).rstrip().rpartition("\n")[2],
  "stated": lambda text, question=None: _only([statement.answer() for statement in stated(text, question)]),
  "tag": lambda text, question=None: _only(tagged(answer_part(text))),
}
"""Locations of an answer: `(response, question) -> answer`, or None for none or several."""


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
    raise ValueError(
      f"answer_in: found {name!r}, expected one of {', '.join(PLACES)}, or 'after ' and a marker such as 'after ####'"
    )

  def after(text: str, question: str | None = None) -> str | None:
    _, separator, rest = answer_part(text).rpartition(marker)
    return rest.partition("\n")[0].strip() if separator else None

  return after
