"""Custom objectives: any ratio x any gate x any weights."""

import inspect
from collections.abc import Callable
from typing import Any

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.base import WEIGHTS
from jaxrl_llm.objectives.gates import GATES
from jaxrl_llm.objectives.penalties import value_loss
from jaxrl_llm.objectives.ratios import RATIOS
from jaxrl_llm.objectives.settings import name_or_function
from jaxrl_llm.types import GateFn, Objective, RatioFn


@algorithm(weights="token_mean", rules={"weights": name_or_function(WEIGHTS)})
def custom(
  *,
  ratio: str | RatioFn = "token",
  gate: str | GateFn = "hard",
  anchor: str = "old",
  value_coef: float = 0.0,
  value_clip: float | None = None,
  **gate_settings: Any,
) -> Slots:
  """Composes an objective from its three slots.

  J = Σ w·gate(ratio(log π − log π_anchor), A)

  Args:
    ratio: Key of `ratios.RATIOS`, or a function like its values.
    gate: Key of `gates.GATES`, or a gate.
    anchor: Policy that the ratio compares with: "old" for the learner's at the start of the
      updates, "sampler" for the one that drew the tokens.
    value_coef: Weight of the critic's squared error; 0 for a method without a critic.
    value_clip: Half-width of the band around the critic's old prediction, in units of the return;
      None for the plain square.
    **gate_settings: Settings of the chosen gate; None stands for the constant of the gate's paper
      (see `gates.GATES`).

  Example:
    >>> smooth_sequences = custom(ratio="sequence", gate="soft", weights="sequence_mean", tau_pos=2.0)
    >>> custom(gate="geometric", clip_low=0.1)
    Traceback (most recent call last):
      ...
    ValueError: custom: clip_low: found 0.1, expected None, because gate is 'geometric' and takes \
log_clip_low=0.4, log_clip_high=0.4 (did you mean 'log_clip_low'?)

  Note:
    `weights` may also be a function like those of `segments`. All combinations run, but not all
    make sense. The gates "capped", "gamma", "tv_ball" and "kl_ball" weigh each token's own ∇log π,
    whatever the ratio.
  """
  return Slots(
    ratio=ratio if callable(ratio) else RATIOS[ratio],
    gate=gate if callable(gate) else GATES[gate](**gate_settings),
    value_loss=value_loss(value_coef, value_clip) if value_coef else None,
    anchor=anchor,
  )


def is_gate(function: Callable[..., Any]) -> bool:
  """Returns whether a function is a gate, `(log_ratio, advantages, context)`, and no factory.

  Example:
    >>> from jaxrl_llm.objectives.gates import hard_clip
    >>> is_gate(hard_clip(0.2, 0.2)), is_gate(hard_clip), is_gate(custom)
    (True, False, False)
  """
  parameters = inspect.signature(function).parameters.values()
  return sum(x.default is x.empty and x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD) for x in parameters) >= 2


def with_gate(gate: GateFn) -> Callable[..., Objective]:
  """Returns the factory of `custom` with a gate, which has no settings of gates."""

  def made(**settings: Any) -> Objective:
    return custom(gate=gate, **settings)

  left_out = {"gate"} | {setting for factory in GATES.values() for setting in inspect.signature(factory).parameters}
  parameters = inspect.signature(custom).parameters.values()
  made.__signature__ = inspect.Signature([x for x in parameters if x.name not in left_out])
  made.__doc__, made.rules = custom.__doc__, custom.rules
  return made
