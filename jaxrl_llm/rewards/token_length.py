"""Rewards for the length of a response, in tokens."""

from collections.abc import Mapping, Sequence
from math import cos, pi
from typing import Any

import numpy as np
from jaxtyping import Float

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


def length_by_pass_rate(context: float = 0.0, turns: float = 0.0) -> RewardFn:
  """Makes the length of a response among those to its prompt, times the prompt's mean reward.

  r_i = max(0, mean R)·(o_i / max o + context·c_i / max c + turns·n_i / max n)

  As a term of negative weight it presses for brevity only as far as the prompt is solved.

  Args:
    context: Weight of the c tokens of an environment's replies, beside 1 for the o tokens that the
      policy wrote.
    turns: Weight of the n turns of a conversation.

  Returns:
    A reward function with the attribute `of_group`, which has all responses to a prompt. By itself
    it gives 0, because a single response has no pass rate.

  Raises:
    ValueError: If a weight is negative.

  Example:
    >>> responses = [Completion(text="", token_ids=(), num_tokens=n, stopped=True) for n in (10, 20, 40, 40)]
    >>> length_by_pass_rate().of_group(np.array([1.0, 0.0, 1.0, 0.0]), responses).tolist()
    [0.125, 0.25, 0.5, 0.5]

  References:
    prime-rl, pull request 2901, 2026, with the weights -0.25 for written tokens, and -0.1 each for
    context and turns: `reward.terms=('length_by_pass_rate=-0.25',)`, `context=0.4`, `turns=0.4`.

  Note:
    A negative mean reward counts as 0: it would favour length.
  """
  if not (context >= 0 and turns >= 0):
    raise ValueError(f"length_by_pass_rate: found {context=}, {turns=}, expected two numbers from 0; the term's weight is negative")

  def of_group(verdicts: Float[np.ndarray, " G"], completions: Sequence[Completion]) -> Float[np.ndarray, " G"]:
    written = np.array([completion.num_tokens for completion in completions], float)
    ends = [max((turn.end + 1 for turn in completion.turns), default=0) for completion in completions]
    replies, spoken = np.maximum(ends - written, 0), np.array([len(completion.turns) for completion in completions], float)
    share = lambda counts: counts / max(np.max(counts), 1)
    return max(0.0, float(np.mean(verdicts, dtype=float))) * (share(written) + context * share(replies) + turns * share(spoken))

  def no_length_alone(completion: Completion, example: Mapping[str, Any]) -> float:
    del completion, example
    return 0.0

  no_length_alone.of_group = of_group
  return no_length_alone
