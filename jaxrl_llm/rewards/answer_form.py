"""A reward for the requested form of a response, regardless of its content."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.text_types import Completion

_LAST_LINE = re.compile(r"#### -?[0-9]{1,12}(?:\.[0-9]{1,6})?")


def answer_form(completion: Completion, example: Mapping[str, Any]) -> float:
  """Returns 1 if the response ends with its answer in the requested form, else 0.

  The response must have stopped by itself, and its last line must be `####` and a plain number.
  There must be no other `####`.

  Example:
    >>> answer_form(Completion(text="3 * 4 = 12\\n#### 12", token_ids=(), num_tokens=9, stopped=True), {})
    1.0
  """
  del example
  last_line = completion.text.rstrip().rpartition("\n")[2]
  return float(completion.stopped and completion.text.count("####") == 1 and _LAST_LINE.fullmatch(last_line) is not None)
