"""Rewards for the length of a response, in tokens."""

from collections.abc import Mapping
from math import cos, pi
from typing import Any

from jaxrl_llm.text_types import Completion, RewardFn


def length_target(target_tokens: int, tolerance_tokens: int) -> RewardFn:
  """Makes a reward that is 1 at the target length and falls linearly to 0 on both sides.

  r(y) = max(0, 1 − ||y| − T| / C),  with T `target_tokens` and C `tolerance_tokens`

  Args:
    target_tokens: Target length in tokens, including the stop token.
    tolerance_tokens: Distance from the target at which the reward reaches 0, in tokens.

  Raises:
    ValueError: If the target or the tolerance is not positive.

  Example:
    >>> length_target(100, 50)(Completion(text="", token_ids=(), num_tokens=75, stopped=True), {})
    0.5
  """
  if target_tokens <= 0 or tolerance_tokens <= 0:
    raise ValueError(f"length_target: found {target_tokens=}, {tolerance_tokens=}, expected two positive numbers of tokens")

  def length_target_reward(completion: Completion, example: Mapping[str, Any]) -> float:
    del example
    return max(0.0, 1 - abs(completion.num_tokens - target_tokens) / tolerance_tokens)

  return length_target_reward


def cosine_length(shortest: float, longest: float, max_tokens: int) -> RewardFn:
  """Makes a reward that is a half cosine of the length, the same for right and wrong answers.

  r(y) = b + (a − b)·(1 + cos(π·|y|/L)) / 2,  with a `shortest`, b `longest`, L `max_tokens`

  Args:
    shortest: Reward of an empty response.
    longest: Reward of a response of `max_tokens` or more.
    max_tokens: Length L in tokens, including the stop token.

  Raises:
    ValueError: If `max_tokens` is not positive, or both ends have the same reward.

  Example:
    >>> cosine_length(1.0, 0.5, 1000)(Completion(text="", token_ids=(), num_tokens=500, stopped=True), {})
    0.75

  References:
    Demystifying Long Chain-of-Thought Reasoning in LLMs, arXiv:2502.03373, 2025, whose reward is
    one such curve for right and another for wrong answers; this is a term to add to a verifier's.
  """
  if max_tokens <= 0 or shortest == longest:
    raise ValueError(f"cosine_length: found {shortest=}, {longest=}, {max_tokens=}, expected different rewards and max_tokens above 0")

  def cosine_length_reward(completion: Completion, example: Mapping[str, Any]) -> float:
    del example
    done = min(completion.num_tokens / max_tokens, 1.0)
    return longest + (shortest - longest) * (1 + cos(pi * done)) / 2

  return cosine_length_reward


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
