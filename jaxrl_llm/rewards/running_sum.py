"""A reward for each right step of a sum that is worked out term by term."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rewards.extraction import MAX_CHARS
from jaxrl_llm.text_types import Completion

_NUMBER = re.compile(r"[0-9]++")
_STEP = re.compile(r"(?<![0-9])([0-9]{1,9}+) ?\+ ?([0-9]{1,9}+) ?= ?([0-9]{1,9}+)")


def running_sum(completion: Completion, example: Mapping[str, Any]) -> float:
  """Returns the share of a sum's steps that are right, up to the first that is not.

  Step i must add the term i + 1 of the question to the total so far. A working that begins right
  earns its share whatever follows, so that a policy that hardly ever reaches the end of one has
  something to learn from. Whether the response ended by itself does not count.

  Raises:
    ValueError: If the row's `question` has fewer than two terms.

  Example:
    >>> completion = Completion(text=" 47 + 8 = 55, 55 + 5 = 61", token_ids=(), num_tokens=20, stopped=True)
    >>> running_sum(completion, {"question": "47 + 8 + 5 ="})
    0.5

  References:
    Solving math word problems with process- and outcome-based feedback, arXiv:2211.14275, 2022.
  """
  numbers = [int(x) for x in _NUMBER.findall(str(example.get("question", "")))]
  if len(numbers) < 2:
    raise ValueError(f"running_sum: found the question {str(example.get('question'))[:60]!r}, expected a sum of two or more whole numbers")
  total, *terms = numbers
  right = 0
  for step, term in zip(_STEP.findall(completion.text[:MAX_CHARS]), terms, strict=False):
    if tuple(map(int, step)) != (total, term, total + term):
      break
    total, right = total + term, right + 1
  return right / len(terms)
