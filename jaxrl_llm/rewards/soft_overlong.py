"""A penalty for long responses, counted in tokens."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.text_types import Completion, RewardFn


def soft_overlong(max_tokens: int, buffer_tokens: int) -> RewardFn:
  """Makes DAPO's soft overlong punishment: none, then a ramp down to -1, to be added to the reward.

  r(y) = 0 for |y| ≤ L - C;  (L - C - |y|) / C in between;  -1 for |y| ≥ L,
  with L `max_tokens` and C `buffer_tokens`

  Args:
    max_tokens: Length at which the full punishment starts, in tokens, including the stop token. If
      it exceeds the sampler's `max_new_tokens`, the full punishment is never reached.
    buffer_tokens: Length of the ramp before it, in tokens.

  Raises:
    ValueError: If the ramp is empty or longer than `max_tokens`.

  Example:
    >>> penalty = soft_overlong(max_tokens=20480, buffer_tokens=4096)
    >>> penalty(Completion(text="", token_ids=(), num_tokens=18432, stopped=True), {})
    -0.5

  References:
    DAPO: An Open-Source LLM Reinforcement Learning System at Scale. arXiv:2503.14476, 2025,
    equation 13.
  """
  if not 0 < buffer_tokens <= max_tokens:
    raise ValueError(f"soft_overlong: found {buffer_tokens=}, {max_tokens=}, expected 0 < buffer_tokens <= max_tokens")

  def soft_overlong_penalty(completion: Completion, example: Mapping[str, Any]) -> float:
    del example
    return min(0.0, max(-1.0, (max_tokens - buffer_tokens - completion.num_tokens) / buffer_tokens))

  return soft_overlong_penalty
