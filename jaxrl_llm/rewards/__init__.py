"""What a response is worth. A reward function sees one completion and its example, and returns one number; no JAX."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxrl_llm.rewards.answer import final_answer
from jaxrl_llm.rewards.form import answer_form
from jaxrl_llm.rewards.number import final_number
from jaxrl_llm.rewards.overlong import soft_overlong
from jaxrl_llm.rewards.scoring import WeightedReward, score

if TYPE_CHECKING:  # `types` imports jax, which whoever only scores need not load.
  from jaxrl_llm.types import RewardFn

__all__ = ["REWARDS", "WeightedReward", "answer_form", "final_answer", "final_number", "make", "score", "soft_overlong"]

REWARDS: dict[str, Callable[..., RewardFn]] = {
  "answer_form": lambda: answer_form,
  "final_answer": lambda: final_answer,
  "final_number": lambda: final_number,
  "soft_overlong": soft_overlong,
}


def make(name: str, **settings) -> RewardFn:
  """A reward function by name.

  Args:
    name: a key of `REWARDS`.
    **settings: what that reward takes.

  Returns:
    The reward function.

  Raises:
    ValueError: no such reward, or settings it does not take. One line, with the fix.

  Example:
    >>> make("final_anser")
    Traceback (most recent call last):
    ...
    ValueError: reward: found 'final_anser', expected one of answer_form, final_answer, ...; did you mean 'final_answer'?
  """
  if name not in REWARDS:
    close = difflib.get_close_matches(str(name), REWARDS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"reward: found {name!r}, expected one of {', '.join(REWARDS)}{hint}")
  parameters = inspect.signature(REWARDS[name]).parameters
  if set(settings) != set(parameters):
    raise ValueError(f"reward {name!r}: found settings {sorted(settings)}, expected {sorted(parameters)}")
  return REWARDS[name](**settings)
