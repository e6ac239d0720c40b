"""Policy objectives: each is a ratio x a gate x weights, one small file an algorithm.

  objective = make("gspo", clip_high=5e-4)
  loss, metrics = value(objective, logprobs, old_logprobs, advantages, mask)

A new algorithm is a new file and a new row of `OBJECTIVES`.
"""

from typing import Any

from jaxrl_llm.objectives.arrays import value
from jaxrl_llm.objectives.dapo import dapo
from jaxrl_llm.objectives.dr_grpo import dr_grpo
from jaxrl_llm.objectives.grpo import grpo
from jaxrl_llm.objectives.gspo import gspo
from jaxrl_llm.objectives.gspo_token import gspo_token
from jaxrl_llm.objectives.ppo import ppo
from jaxrl_llm.objectives.sapo import sapo
from jaxrl_llm.objectives.settings import did_you_mean
from jaxrl_llm.objectives.sft import sft
from jaxrl_llm.types import Objective

__all__ = ["OBJECTIVES", "make", "value"]

OBJECTIVES = {
  "ppo": ppo,
  "grpo": grpo,
  "dr_grpo": dr_grpo,
  "dapo": dapo,
  "gspo": gspo,
  "gspo_token": gspo_token,
  "sapo": sapo,
  "sft": sft,
}
"""Every objective by name."""


def make(name: str, **hyperparameters: Any) -> Objective:
  """Builds an objective by name; what is not given has its paper's value.

  Args:
    name: a key of `OBJECTIVES`.
    **hyperparameters: settings of that objective.

  Returns:
    The objective.

  Raises:
    ValueError: for an unknown name, and for settings that are unknown, illegal or without effect; all problems in one line.

  Example:
    >>> sorted(make("grpo").needs)
    ['old_logprobs', 'ref_logprobs']
    >>> make("gsop")
    Traceback (most recent call last):
      ...
    ValueError: unknown objective 'gsop' (did you mean 'gspo'?); known: ppo, grpo, dr_grpo, dapo, gspo, gspo_token, sapo, sft
  """
  if not isinstance(name, str) or name not in OBJECTIVES:
    raise ValueError(f"unknown objective {name!r}{did_you_mean(name, OBJECTIVES)}; known: {', '.join(OBJECTIVES)}")
  return OBJECTIVES[name](**hyperparameters)
