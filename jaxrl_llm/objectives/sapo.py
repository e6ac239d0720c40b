"""SAPO: token ratio x soft gate x sequence mean."""

from jaxrl_llm.objectives.base import policy_objective, weights_by_name
from jaxrl_llm.objectives.gates import soft_gate
from jaxrl_llm.objectives.penalties import regularisers
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.settings import checked
from jaxrl_llm.types import Objective


@checked
def sapo(
  *,
  tau_pos: float = 1.0,
  tau_neg: float = 1.05,
  kl_coef: float = 0.0,
  kl_estimator: str = "k3",
  entropy_coef: float = 0.0,
  weights: str = "sequence_mean",
  max_tokens: int | None = None,
) -> Objective:
  """Soft adaptive policy optimisation: a token's weight fades with its distance from on-policy, faster where A < 0.

  J = (1/N) Σ_i (1/|y_i|) Σ_t (4/τ)·σ(τ(r_t − 1))·A_i,  τ = tau_pos where A > 0, else tau_neg

  Args:
    tau_pos: temperature of the gate where A > 0; the larger, the narrower.
    tau_neg: temperature of the gate where A ≤ 0.
    kl_coef: loss per nat of divergence from the reference; above 0 the objective needs `ref_logprobs`.
    kl_estimator: a key of `penalties.KL_ESTIMATORS`.
    entropy_coef: reward per nat of entropy; above 0 the objective needs `entropy`.
    weights: "token_mean", "sequence_mean" or "constant".
    max_tokens: generation budget in tokens, for weights="constant" only.

  Returns:
    The objective.

  Raises:
    ValueError: for a setting that is unknown, illegal or without effect.

  Example:
    >>> sapo(tau_pos=0)
    Traceback (most recent call last):
      ...
    ValueError: sapo: tau_pos: found 0, expected a finite number > 0

  References:
    Soft Adaptive Policy Optimization, arXiv:2511.20347, 2025.

  Note:
    The raw loss is not 0 on-policy (see `gates.soft_gate`); read `sapo/centred_loss`.
    verl and TRL report the raw loss. TRL rounds τ = 1.05 to float32 also in float64, and does not bound the log-ratio.
  """
  penalties, needs = regularisers(kl_coef, kl_estimator, entropy_coef)
  return policy_objective(
    ratio=token_ratio,
    gate=soft_gate(tau_pos, tau_neg),
    weigh=weights_by_name(weights, max_tokens),
    penalties=penalties,
    needs=needs,
  )
