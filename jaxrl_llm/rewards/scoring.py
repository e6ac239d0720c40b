"""Calling reward functions: strict about what they return, so that a bug in one stops the run and not the learning."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.messages import one_line
from jaxrl_llm.rewards.spec import RewardSpec
from jaxrl_llm.text_types import Completion, RewardFn

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


class Outcome(NamedTuple):
  """What came of one call of one reward function.

  Attributes:
    value: the reward; None where it failed, which is never a reward of 0.
    cause: None where it did not fail, else why: a key of `CAUSES`.
    detail: of the failure, in one line; for a log.
  """

  value: float | None
  cause: str | None = None
  detail: str = ""


class WeightedReward(NamedTuple):
  """One term of the total reward.

  Attributes:
    name: under which it is logged and blamed.
    fn: the reward function.
    weight: its factor in the total.
    spec: what another process builds the function from; None for one that stays in this process.
    routes: terms of which each example's `reward` names the one that judges it; empty for a term that judges all.
    shapes: whether it only shapes the reward, such as a penalty for length: samples that differ in such terms alone are not told apart.
    batch_fn: `(completions, examples) -> outcomes`, for what scores many responses at once, in this process; None calls `fn` for each.
  """

  name: str
  fn: RewardFn
  weight: float = 1.0
  spec: RewardSpec | None = None
  shapes: bool = False
  routes: tuple["WeightedReward", ...] = ()
  batch_fn: Callable[[Sequence[Completion], Sequence[Mapping[str, Any]]], list[Outcome]] | None = None


def score(
  rewards: Sequence[WeightedReward], completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """Rewards of a batch: Σ weight · reward, and each reward by itself.

  Args:
    rewards: the terms, with distinct names.
    completions: the responses.
    examples: each response's own row, so as many rows as responses; nothing is broadcast.

  Returns:
    The totals, float32 `[N]`, and the unweighted rewards by name, each float32 `[N]`.

  Raises:
    ValueError: unequal lengths, no or repeated or wrongly weighted terms, or a reward function that raised or returned anything but one
      finite number. One line that names the function.

  Example:
    >>> from jaxrl_llm.text_types import Completion
    >>> completion = Completion(text="four", token_ids=(1, 2), num_tokens=2, stopped=True)
    >>> brevity = WeightedReward("brevity", lambda completion, example: 1 / completion.num_tokens, weight=0.5)
    >>> total, parts = score([brevity], [completion], [{"answer": "4"}])
    >>> total.tolist(), parts["brevity"].tolist()
    ([0.25], [0.5])
  """
  check_terms(rewards, completions, examples)
  parts = {}
  for reward in rewards:
    values = [_call(reward, i, completion, example) for i, (completion, example) in enumerate(zip(completions, examples, strict=True))]
    parts[reward.name] = np.array(values, np.float32)
  total = sum(reward.weight * parts[reward.name].astype(np.float64) for reward in rewards)  # One rounding, at the end.
  return np.asarray(total, np.float32), parts


def check_terms(rewards: Sequence[WeightedReward], completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]]) -> None:
  """A ValueError for unequal lengths, and for no or repeated or wrongly weighted terms."""
  names = [reward.name for reward in rewards]
  if not names or len(set(names)) != len(names):
    raise ValueError(f"rewards: found {names}, expected one or more distinct names")
  if len(completions) != len(examples):
    raise ValueError(f"rewards: found {len(completions)} completions and {len(examples)} examples, expected as many of each")
  for reward in rewards:
    if not np.isfinite(reward.weight):
      raise ValueError(f"reward {reward.name!r}: found weight {reward.weight}, expected a finite number")


def number_of(value: Any) -> np.float32 | None:
  """What a reward function returned as float32, perhaps not finite; None where it is not one real number."""
  try:
    number = np.asarray(value)
  except Exception:  # Some objects refuse to be arrays in their own ways.
    return None
  if number.shape != () or number.dtype.kind not in "biuf":
    return None
  with np.errstate(over="ignore"):  # Too large for float32 becomes infinite.
    return np.float32(number)


def _call(reward: WeightedReward, index: int, completion: Completion, example: Mapping[str, Any]) -> np.float32:
  where = f"reward {reward.name!r}, completion {index} ({_short.repr(completion.text)})"
  try:
    value = reward.fn(completion, example)
  except Exception as error:
    raise ValueError(f"{where}: it raised {one_line(error)}, expected one finite number") from error
  number = number_of(value)
  if number is not None and np.isfinite(number):
    return number
  shown = " ".join(_short.repr(value).split())
  raise ValueError(f"{where}: it returned {shown} of type {type(value).__name__}, expected one finite number")
