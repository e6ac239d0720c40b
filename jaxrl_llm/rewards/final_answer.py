"""Right or wrong, by the final answer alone."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.text_types import Completion


def final_answer(completion: Completion, example: Mapping[str, Any]) -> float:
  """1 where the response ends with the right answer, else 0; how it got there does not count.

  Right means all of: the response ended by itself; its last line is `#` and the answer, character for character (no spaces, no "010" or
  "+10" for "10"); and there is no other `#`, so that several guesses earn nothing. The row has the right answer in `answer`.

  Example:
    >>> final_answer(Completion(text="7+8=15\\n#15", token_ids=(), num_tokens=11, stopped=True), {"answer": "15"})
    1.0

  Note:
    A response that ran into the token budget earns 0 even if it shows the answer: what it would have written next is unknown, and
    rewarding it would teach a policy not to stop.
  """
  return float(completion.stopped and hashed_answer(completion.text) == str(example["answer"]))


def hashed_answer(text: str) -> str | None:
  """What follows `#` in the last line; None where the last line does not begin with it, or where there is another `#`.

  Example:
    >>> hashed_answer("7+8=15\\n#15")
    '15'
  """
  last_line = text.rpartition("\n")[2]
  return last_line[1:] if last_line.startswith("#") and text.count("#") == 1 else None
