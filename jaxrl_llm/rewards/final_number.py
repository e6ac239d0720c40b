"""A reward for the number at the end of a written-out solution."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from jaxrl_llm.text_types import Completion

# Read from the end only: the answer is there, and the work on hostile text stays bounded.
_MAX_CHARS = 2000

# ASCII digits only. A sign counts only if it cannot be a subtraction: "10-5" ends with 5.
# Possessive quantifiers (`++`, `?+`) never retry and never cut a number in two to make a pattern
# fit. "1e5" is not a number: there would be no clear place to stop.
_NUMBER = r"(?<![\w.])(?:(?<![\w.)\]%])-)?+[$£€]?+(?:[0-9]{1,3}+(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?+(?!\d|[eE][-+]?\d)"
# What announces an answer, followed only by decoration. In "the answer is 3 + 4 = 7" it announces
# no number.
_ANNOUNCED = re.compile(
  rf"(?:\#\#\#\#|\\boxed\{{|\banswer(?:\ is)?:?)[\s*$£€\\({{]{{0,8}}+({_NUMBER})(?!\s*+(?:[-+/×÷=^]|\*(?!\*)))", re.IGNORECASE
)
_NUMBERS = re.compile(_NUMBER)


def final_number(completion: Completion, example: Mapping[str, Any]) -> float:
  """Returns 1 if the number given as the answer is correct, else 0, regardless of the reasoning.

  The answer is the number right after the last `####`, `\\boxed{`, "answer is" or "answer:".
  Without such an announcement it is the last number. Only the last 2000 characters of the response
  are read. Thousands separators, a leading currency sign, trailing units and trailing zeros
  (`1,200.0`) do not matter. The values must be exactly equal. A response that was cut off by the
  token budget earns 0, as in `final_answer`.

  Raises:
    ValueError: If the row's `answer` is not a number.

  Example:
    >>> final_number(Completion(text="3 * 400 = 1200, so\\n#### $1,200.00", token_ids=(), num_tokens=14, stopped=True), {"answer": "1200"})
    1.0
  """
  expected = _NUMBERS.fullmatch(str(example["answer"]))
  if expected is None:
    raise ValueError(f"final_number: found the answer {str(example['answer'])[:80]!r}, expected a number such as '-12', '1200' or '0.75'")
  stated = _stated(completion.text)
  return float(completion.stopped and stated is not None and stated == _value(expected[0]))


def number_text(text: str) -> str | None:
  """Returns the number given as the answer, in one spelling for equal numbers, or None.

  Example:
    >>> number_text("so\\n#### $1,200.00")
    '1200'
  """
  stated = _stated(text)
  return None if stated is None else format(stated.normalize(), "f")


def _stated(text: str) -> Decimal | None:
  if len(text) > _MAX_CHARS:
    text = text[-_MAX_CHARS:].lstrip("0123456789,.")  # It may be the second half of a number.
  text = text.replace("\u2212", "-")  # The typographic minus.
  announced, numbers = _ANNOUNCED.findall(text), _NUMBERS.findall(text)
  last = (announced or numbers)[-1:]
  return _value(last[0]) if last else None


def _value(number: str) -> Decimal:
  return Decimal(re.sub(r"[,$£€]", "", number))
