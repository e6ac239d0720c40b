"""Right or wrong, by the number with which a written-out solution ends."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from jaxrl_llm.text_types import Completion

_MAX_CHARS = 2000  # Only the end of a response is read: the answer stands there, and work on hostile text stays bounded.

# ASCII digits only. A sign counts where it cannot be a subtraction: "10-5" ends with 5. Possessive (`++`, `?+`), so that nothing is ever
# tried twice and no number is cut in two to make a pattern fit. "1e5" is no number: we would not know where else to stop.
_NUMBER = r"(?<![\w.])(?:(?<![\w.)\]%])-)?+[$£€]?+(?:[0-9]{1,3}+(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?+(?!\d|[eE][-+]?\d)"
# What a solver writes in front of its answer, and then nothing but decoration. In "the answer is 3 + 4 = 7" it announces no number.
_ANNOUNCED = re.compile(
  rf"(?:\#\#\#\#|\\boxed\{{|\banswer(?:\ is)?:?)[\s*$£€\\({{]{{0,8}}+({_NUMBER})(?!\s*+(?:[-+/×÷=^]|\*(?!\*)))", re.IGNORECASE
)
_NUMBERS = re.compile(_NUMBER)


def final_number(completion: Completion, example: Mapping[str, Any]) -> float:
  """1 where the number that the response gives as its answer is the right one, else 0; how it got there does not count.

  That number is the one right after the last `####`, `\\boxed{`, "answer is" or "answer:"; without such an announcement, the last number of
  the response, of which the last 2000 characters are read. Thousands separators, a currency sign in front, units behind and trailing zeros
  (`1,200.0`) do not matter; the value has to be equal exactly. A response that ran into the token budget earns 0, as in `final_answer`.

  Raises:
    ValueError: a row whose `answer` is no number.

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
  """The number that a response gives as its answer, in one spelling for equal numbers; None where it has none.

  Example:
    >>> number_text("so\\n#### $1,200.00")
    '1200'
  """
  stated = _stated(text)
  return None if stated is None else format(stated.normalize(), "f")


def _stated(text: str) -> Decimal | None:
  if len(text) > _MAX_CHARS:
    text = text[-_MAX_CHARS:].lstrip("0123456789,.")  # What may be the second half of a number.
  text = text.replace("\u2212", "-")  # The typographic minus.
  announced, numbers = _ANNOUNCED.findall(text), _NUMBERS.findall(text)
  found = (announced or numbers)[-1:]
  return _value(found[0]) if found else None


def _value(number: str) -> Decimal:
  return Decimal(re.sub(r"[,$£€]", "", number))
