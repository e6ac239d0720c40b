"""A reward for using the requested tags."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.text_types import Completion, RewardFn


def tags(names: Sequence[str] = ("think", "answer"), *, alone: bool = True, opened: bool = False, require_stop: bool = True) -> RewardFn:
  """Makes a reward that is 1 if the response uses the tags correctly, else 0.

  Each tag must occur exactly once, closed and non-empty, in the given order and without nesting.

  Args:
    names: Names of the tags, without angle brackets.
    alone: Whether only whitespace may stand between and around the tags.
    opened: Whether the prompt ends with the first tag already open, as in some chat templates, so
      that the response only closes it.
    require_stop: Whether a response that was cut off by the token budget earns 0.

  Raises:
    ValueError: If there are no names, or a name is not a word or occurs twice.

  Example:
    >>> completion = Completion(text="<think>7+8</think>\\n<answer>15</answer>", token_ids=(), num_tokens=12, stopped=True)
    >>> tags()(completion, {})
    1.0

  References:
    DeepSeek-R1, arXiv:2501.12948, 2025: the format reward.
  """
  if isinstance(names, str) or not names or len(set(names)) != len(names) or not all(re.fullmatch(r"[\w-]+", name) for name in names):
    raise ValueError(f"tags: found {names!r}, expected a list of different words such as ['think', 'answer']")
  expected = [form.format(name) for name in names for form in ("<{}>", "</{}>")]
  token = re.compile("|".join(map(re.escape, expected)))

  def tags_reward(completion: Completion, example: Mapping[str, Any]) -> float:
    del example
    if require_stop and not completion.stopped:
      return 0.0
    text = expected[0] + completion.text if opened else completion.text
    between = token.split(text)
    if token.findall(text) != expected:
      return 0.0
    outside, inside = between[0::2], between[1::2]
    return float(all(part.strip() for part in inside) and not (alone and any(part.strip() for part in outside)))

  return tags_reward
