"""Whether a response has the form that was asked for, whatever it says."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.text_types import Completion

_LAST_LINE = re.compile(r"#### -?[0-9]{1,12}(?:\.[0-9]{1,6})?")


def answer_form(completion: Completion, example: Mapping[str, Any]) -> float:
  """1 where the response ended by itself and its last line is `####` and a plain number, the only `####` in it; else 0.

  Example:
    >>> answer_form(Completion(text="3 * 4 = 12\\n#### 12", token_ids=(), num_tokens=9, stopped=True), {})
    1.0
  """
  del example
  last_line = completion.text.rstrip().rpartition("\n")[2]
  return float(completion.stopped and completion.text.count("####") == 1 and _LAST_LINE.fullmatch(last_line) is not None)
