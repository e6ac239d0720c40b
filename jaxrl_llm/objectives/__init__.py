"""Policy objectives, each a ratio x a gate x weights, with one small file per algorithm.

  objective = make("gspo", clip_high=5e-4)
  loss, metrics = value(objective, logprobs, old_logprobs, advantages, mask)

`custom` takes the three parts by name. A new algorithm is a new file and a new row of `OBJECTIVES`,
or a file anywhere: `factory` also takes import paths.
"""

from collections.abc import Callable
from typing import Any

from jaxrl_llm.objectives.arrays import value
from jaxrl_llm.objectives.cispo import cispo
from jaxrl_llm.objectives.clip_cov import clip_cov
from jaxrl_llm.objectives.cppo import cppo
from jaxrl_llm.objectives.custom import custom, is_gate, with_gate
from jaxrl_llm.objectives.dapo import dapo
from jaxrl_llm.objectives.divergence import divergence
from jaxrl_llm.objectives.dppo import dppo_kl, dppo_tv
from jaxrl_llm.objectives.dr_grpo import dr_grpo
from jaxrl_llm.objectives.dro import dro
from jaxrl_llm.objectives.fipo import fipo
from jaxrl_llm.objectives.gmpo import gmpo
from jaxrl_llm.objectives.grpo import grpo
from jaxrl_llm.objectives.gspo import gspo
from jaxrl_llm.objectives.gspo_token import gspo_token
from jaxrl_llm.objectives.kl_cov import kl_cov
from jaxrl_llm.objectives.luspo import luspo
from jaxrl_llm.objectives.maspo import maspo
from jaxrl_llm.objectives.minirl import minirl
from jaxrl_llm.objectives.minpro import minpro
from jaxrl_llm.objectives.ppo import ppo
from jaxrl_llm.objectives.reinforce import reinforce
from jaxrl_llm.objectives.reinforce_plus_plus import reinforce_plus_plus
from jaxrl_llm.objectives.rloo import rloo
from jaxrl_llm.objectives.sapo import sapo
from jaxrl_llm.objectives.settings import did_you_mean
from jaxrl_llm.objectives.sft import sft
from jaxrl_llm.objectives.topr import topr
from jaxrl_llm.objectives.vespo import vespo
from jaxrl_llm.settings import import_path
from jaxrl_llm.types import Objective

__all__ = ["OBJECTIVES", "divergence", "factory", "make", "value"]

OBJECTIVES = {
  "ppo": ppo,
  "grpo": grpo,
  "dr_grpo": dr_grpo,
  "dapo": dapo,
  "gspo": gspo,
  "gspo_token": gspo_token,
  "sapo": sapo,
  "reinforce": reinforce,
  "rloo": rloo,
  "reinforce_plus_plus": reinforce_plus_plus,
  "cispo": cispo,
  "gmpo": gmpo,
  "minirl": minirl,
  "luspo": luspo,
  "vespo": vespo,
  "dppo_tv": dppo_tv,
  "dppo_kl": dppo_kl,
  "cppo": cppo,
  "minpro": minpro,
  "maspo": maspo,
  "dro": dro,
  "clip_cov": clip_cov,
  "kl_cov": kl_cov,
  "fipo": fipo,
  "topr": topr,
  "custom": custom,
  "sft": sft,
}
"""Factories of objectives by name."""


def factory(name: str) -> Callable[..., Objective]:
  """Returns the function of settings by keyword that makes an objective.

  Args:
    name: Key of `OBJECTIVES`, or import path MODULE:FUNCTION of such a function or of a gate, which
      stands for `custom` with that gate.

  Raises:
    ValueError: If there is no such objective. One line, with the fix.

  Example:
    >>> factory("jaxrl_llm.objectives.sapo:sapo") is factory("sapo")
    True
    >>> factory("gsop")
    Traceback (most recent call last):
      ...
    ValueError: unknown objective 'gsop' (did you mean 'gspo'?); known: ppo, grpo, dr_grpo, dapo, \
gspo, gspo_token, sapo, reinforce, rloo, reinforce_plus_plus, cispo, gmpo, minirl, luspo, vespo, \
dppo_tv, dppo_kl, cppo, minpro, maspo, dro, clip_cov, kl_cov, fipo, topr, custom, sft; or \
MODULE:FUNCTION
  """
  if isinstance(name, str) and ":" in name:
    made = import_path.load_factory(name, where=f"objective.name {name!r}")
    return with_gate(made) if is_gate(made) else made
  if not isinstance(name, str) or name not in OBJECTIVES:
    known = f"{', '.join(OBJECTIVES)}; or MODULE:FUNCTION"
    raise ValueError(f"unknown objective {name!r}{did_you_mean(name, OBJECTIVES)}; known: {known}")
  return OBJECTIVES[name]


def make(name: str, **hyperparameters: Any) -> Objective:
  """Builds an objective by name.

  Args:
    name: Name of the objective; see `factory`.
    **hyperparameters: Settings of the objective; the defaults are those of its paper, or of the
      implementation that its page names where the paper gives none.

  Returns:
    The objective.

  Raises:
    ValueError: If the name is unknown, or if a setting is unknown, illegal or without effect. All
      problems are in one line.

  Example:
    >>> sorted(make("grpo").needs)
    ['old_logprobs', 'ref_logprobs']
  """
  chosen = factory(name)
  if name in OBJECTIVES:
    return chosen(**hyperparameters)
  return import_path.make(chosen, hyperparameters, Objective, where=f"objective.name {name!r}")
