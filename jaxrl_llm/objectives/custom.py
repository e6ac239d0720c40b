"""Any ratio x any gate x any weights."""

import functools

from jaxrl_llm.objectives.base import WEIGHTS, policy_objective, weights_by_name
from jaxrl_llm.objectives.gates import GATES
from jaxrl_llm.objectives.penalties import regularisers, value_loss
from jaxrl_llm.objectives.ratios import RATIOS
from jaxrl_llm.objectives.settings import checked, gate_settings, name_or_function
from jaxrl_llm.types import GateFn, Objective, RatioFn, WeighFn


@functools.partial(checked, rules={"weights": name_or_function(WEIGHTS)})
def custom(
  *,
  ratio: str | RatioFn = "token",
  gate: str | GateFn = "hard",
  weights: str | WeighFn = "token_mean",
  anchor: str = "old",
  kl_coef: float = 0.0,
  kl_estimator: str = "k3",
  entropy_coef: float = 0.0,
  max_tokens: int | None = None,
  value_coef: float = 0.0,
  value_clip: float | None = None,
  clip_low: float | None = None,
  clip_high: float | None = None,
  dual_clip: float | None = None,
  tau_pos: float | None = None,
  tau_neg: float | None = None,
  log_clip_low: float | None = None,
  log_clip_high: float | None = None,
  sigma: float | None = None,
  alpha: float | None = None,
  beta: float | None = None,
  k_pos: float | None = None,
  lambda_pos: float | None = None,
  k_neg: float | None = None,
  lambda_neg: float | None = None,
  delta_low: float | None = None,
  delta_high: float | None = None,
  ratio_cap: float | None = None,
  delta: float | None = None,
  w_min: float | None = None,
  budget: float | None = None,
) -> Objective:
  """Composes an objective from its three slots.

  J = Σ w·gate(ratio(log π − log π_anchor), A)

  Args:
    ratio: a key of `ratios.RATIOS`, or a function like its values.
    gate: a key of `gates.GATES`, or a gate.
    weights: a key of `base.WEIGHTS`, or a function like those of `segments`.
    anchor: "old" compares with the learner's policy at the start of the updates, "sampler" with the one that drew the tokens.
    kl_coef: loss per nat of divergence from the reference; above 0 the objective needs `ref_logprobs`.
    kl_estimator: a key of `penalties.KL_ESTIMATORS`.
    entropy_coef: reward per nat of entropy; above 0 the objective needs `entropy`.
    max_tokens: generation budget in tokens, for weights="constant" only.
    value_coef: weight of the critic's squared error; 0 is a method without a critic.
    value_clip: half-width of the band around the critic's old prediction, in units of the return; None for the plain square.
    clip_low: of the gates "hard" and "capped".
    clip_high: of the gates "hard" and "capped".
    dual_clip: of the gate "hard".
    tau_pos: of the gate "soft".
    tau_neg: of the gate "soft".
    log_clip_low: of the gate "geometric".
    log_clip_high: of the gate "geometric".
    sigma: of the gate "gaussian".
    alpha: of the gate "gaussian".
    beta: of the gate "gaussian".
    k_pos: of the gate "gamma".
    lambda_pos: of the gate "gamma".
    k_neg: of the gate "gamma".
    lambda_neg: of the gate "gamma".
    delta_low: of the gates "tv_ball" and "kl_ball".
    delta_high: of the gates "tv_ball" and "kl_ball".
    ratio_cap: of the gates "tv_ball" and "kl_ball".
    delta: of the gate "prefix_budget".
    w_min: of the gate "prefix_budget".
    budget: of the gate "prefix_budget".

  Returns:
    The objective. A setting of the gate that is None has the constant of the gate's paper (`gates.GATES`).

  Raises:
    ValueError: for a setting that is unknown, illegal or without effect, also on the chosen gate.

  Example:
    >>> smooth_sequences = custom(ratio="sequence", gate="soft", weights="sequence_mean", tau_pos=2.0)
    >>> custom(gate="geometric", clip_low=0.1)
    Traceback (most recent call last):
      ...
    ValueError: custom: clip_low: found 0.1, expected None, because gate is 'geometric' and takes log_clip_low=0.4, log_clip_high=0.4 \
(did you mean 'log_clip_low'?)

  Note:
    All combinations run; not all make sense. The gates "capped", "gamma", "tv_ball" and "kl_ball" weigh each token's own ∇log π, whatever
    the ratio.
  """
  settings = dict(locals())
  penalties, needs = regularisers(kl_coef, kl_estimator, entropy_coef)
  if not callable(gate):
    gate = GATES[gate](**{name: settings[name] for name in gate_settings(gate) if settings[name] is not None})
  return policy_objective(
    ratio=ratio if callable(ratio) else RATIOS[ratio],
    gate=gate,
    weigh=weights if callable(weights) else weights_by_name(weights, max_tokens),
    penalties=penalties,
    needs=needs,
    value_loss=value_loss(value_coef, value_clip) if value_coef else None,
    anchor=anchor,
  )
