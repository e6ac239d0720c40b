"""A reward for the final answer alone."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.text_types import Completion


def final_answer(completion: Completion, example: Mapping[str, Any]) -> float:
  """Returns 1 if the response ends with the correct answer, else 0, regardless of its reasoning.

  Three conditions must hold. The response ended by itself. Its last line is `#` and the answer,
  character for character (no spaces, no "010" or "+10" for "10"). There is no other `#`, so that
  several guesses earn nothing. The row holds the correct answer in `answer`.

  Example:
    >>> final_answer(Completion(text="7+8=15\\n#15", token_ids=(), num_tokens=11, stopped=True), {"answer": "15"})
    1.0

  Note:
    A response that was cut off by the token budget earns 0 even if it shows the answer. Its
    continuation is unknown, and rewarding it would teach a policy not to stop.
  """
  return float(completion.stopped and hashed_answer(completion.text) == str(example["answer"]))


def hashed_answer(text: str) -> str | None:
  """Returns the text after `#` in the last line.

  Returns None if the last line does not begin with `#`, or if there is another `#`.

  Example:
    >>> hashed_answer("7+8=15\\n#15")
    '15'
  """
  last_line = text.rpartition("\n")[2]
  return last_line[1:] if last_line.startswith("#") and text.count("#") == 1 else None
