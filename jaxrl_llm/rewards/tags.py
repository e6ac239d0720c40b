"""Whether a response keeps the tags it was asked for."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.text_types import Completion, RewardFn


def tags(names: Sequence[str] = ("think", "answer"), *, alone: bool = True, opened: bool = False, require_stop: bool = True) -> RewardFn:
  """1 where a response has each tag exactly once, closed, in this order, none inside another, and each with something in it; else 0.

  Args:
    names: of the tags, without the angle brackets.
    alone: nothing but spaces may stand between and around them.
    opened: the prompt ends with the first tag already open, as some chat templates have it, so the response only closes it.
    require_stop: a response that ran into the token budget earns 0.

  Raises:
    ValueError: no names, or one that is no word or comes twice.

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
