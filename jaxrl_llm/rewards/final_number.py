"""A reward for the number at the end of a written-out solution."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rewards.extraction import Statement, answer_part, question_of, stated
from jaxrl_llm.rewards.written_number import canonical, last_number, leading_number
from jaxrl_llm.text_types import Completion


def final_number(completion: Completion, example: Mapping[str, Any]) -> float:
  """Returns 1 if the number given as the answer is correct, else 0, regardless of the reasoning.

  The answer is the last number that is stated in one of the forms of `forms.FORMS`. Two numbers
  stated as alternatives are a hedge and earn 0. If the response states nothing, it is the last
  number. Thousands separators, currencies, units, trailing zeros and words such as "million" do not
  matter (`1,200.0`). A number that is only a part of what is written (`1/2`, `2^3`, `3-5`, `5x`) is
  not the answer, but the result of an equation is (`6 * 7 = 42`). The values must be exactly equal.
  A response that was cut off by the token budget earns 0, as in `final_answer`.

  Raises:
    ValueError: If the row's `answer` is not a number.

  Example:
    >>> final_number(Completion("3 * 400 = 1200, so\\n#### $1,200.00", (), 14, stopped=True), {"answer": "1200"})
    1.0
  """
  expected = canonical(str(example["answer"]))
  if expected is None:
    raise ValueError(
      f"final_number: found the answer {str(example['answer'])[:80]!r}, expected a number such as '-12', '1200' or '0.75'"
    )
  return float(completion.stopped and number_text(completion.text, question_of(example)) == expected)


def number_text(text: str, question: str | None = None) -> str | None:
  """Returns the number given as the answer, in one spelling for equal numbers, or None.

  Args:
    text: Response.
    question: Question, whose boxes a response may quote; None if unknown.

  Example:
    >>> number_text("so\\n#### $1,200.00")
    '1200'
  """
  statements = stated(text, question)
  for i, statement in reversed(list(enumerate(statements))):
    number = leading_number(statement.answer())
    if number is None and not statement.form.in_prose:
      number = last_number(statement.text, is_statement=True) or ""
    if number is not None:
      return None if i and _is_alternative(text, statements[i - 1], statement) else number or None
  # "Answer: Let us add. 3 + 4 = 7" announces its last line.
  part = answer_part(text)
  start = part.rfind(statements[-1].text) if statements else 0
  return last_number(part[start:], is_statement=bool(statements)) or None


def _is_alternative(text: str, first: Statement, second: Statement) -> bool:
  """Returns whether two different statements stand on one line, joined by "or"."""
  if first.answer() == second.answer():
    return False
  end = text.rfind(second.text)
  between = text[max(text.rfind(first.text, 0, end), 0) : end]
  return "\n" not in between and re.search(r"\b(?:or|and)\b", between, re.IGNORECASE) is not None
