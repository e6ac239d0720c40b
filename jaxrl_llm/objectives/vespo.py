"""VESPO: sequence product x gamma weight x token mean."""

from jaxrl_llm.objectives.base import policy_objective, weights_by_name
from jaxrl_llm.objectives.penalties import regularisers
from jaxrl_llm.objectives.ratios import product_ratio
from jaxrl_llm.objectives.score_gates import gamma_weight
from jaxrl_llm.objectives.settings import checked
from jaxrl_llm.types import Objective


@checked
def vespo(
  *,
  k_pos: float = 2.0,
  lambda_pos: float = 3.0,
  k_neg: float = 3.0,
  lambda_neg: float = 2.0,
  kl_coef: float = 0.0,
  kl_estimator: str = "k3",
  entropy_coef: float = 0.0,
  weights: str = "token_mean",
  max_tokens: int | None = None,
) -> Objective:
  """Variational sequence-level soft policy optimisation: a response counts by a smooth function of its true importance weight.

  J = (1/Σ|y|) Σ_i Σ_t sg[φ(ρ_i)]·A_t·log π_t,  φ(ρ) = ρ^k·e^{λ(1 − ρ)},  log ρ_i = Σ_t log r_t

  Args:
    k_pos: exponent k where A > 0; the largest weight is at ρ = k/λ.
    lambda_pos: rate λ where A > 0.
    k_neg: exponent where A ≤ 0.
    lambda_neg: rate where A ≤ 0.
    kl_coef: loss per nat of divergence from the reference; above 0 the objective needs `ref_logprobs`.
    kl_estimator: a key of `penalties.KL_ESTIMATORS`.
    entropy_coef: reward per nat of entropy; above 0 the objective needs `entropy`.
    weights: "token_mean", "sequence_mean", "sequence_sum" or "constant".
    max_tokens: generation budget in tokens, for weights="constant" only.

  Returns:
    The objective.

  Raises:
    ValueError: for a setting that is unknown, illegal or without effect.

  Example:
    >>> sorted(vespo().needs)
    ['old_logprobs']

  References:
    VESPO, arXiv:2602.10693, 2026.

  Note:
    The constants are those of the authors' code and of TRL. TRL multiplies the engines' mismatch π_old/μ into ρ, where φ damps it too; here
    a correction weighs the loss as it does for every objective (`corrections.tis`). TRL bounds log ρ at log 1e-8 from below and turns a NaN
    weight into 0; here the bound is −20, and a NaN reaches the loss.
  """
  penalties, needs = regularisers(kl_coef, kl_estimator, entropy_coef)
  return policy_objective(
    ratio=product_ratio,
    gate=gamma_weight(k_pos, lambda_pos, k_neg, lambda_neg),
    weigh=weights_by_name(weights, max_tokens),
    penalties=penalties,
    needs=needs,
  )
