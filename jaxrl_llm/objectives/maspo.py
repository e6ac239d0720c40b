"""MASPO: token ratio x Gaussian gate x token mean."""

from jaxrl_llm.objectives.base import policy_objective, weights_by_name
from jaxrl_llm.objectives.gates import gaussian_gate
from jaxrl_llm.objectives.penalties import regularisers
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.settings import checked
from jaxrl_llm.types import Objective


@checked
def maspo(
  *,
  sigma: float = 1.0,
  alpha: float = 0.3,
  beta: float = 0.03,
  kl_coef: float = 0.0,
  kl_estimator: str = "k3",
  entropy_coef: float = 0.0,
  weights: str = "token_mean",
  max_tokens: int | None = None,
) -> Objective:
  """Fades out tokens that overshoot, by a Gaussian whose width follows the token's rarity and its advantage.

  J = (1/Σ|y|) Σ_t sg[w_t]·r_t·A_t,  w = exp(−(r − 1)²/(2s²)) where A·(r − 1) > 0, else 1  (`gates.gaussian_gate`)

  Args:
    sigma: width of the gate in units of the ratio, for a token of probability 1 and a small advantage.
    alpha: how much wider the gate is for rare tokens; 0 is the same for all.
    beta: how much wider it is per unit of positive advantage, and narrower per unit of a negative one.
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
    >>> sorted(maspo().needs)
    ['old_logprobs']

  References:
    MASPO, arXiv:2602.17550, 2026.

  Note:
    Read from descriptions of the paper and not from its code: with beta ≥ 0 both of its widths are s·(1 + beta·|A|)^(±1).
  """
  penalties, needs = regularisers(kl_coef, kl_estimator, entropy_coef)
  return policy_objective(
    ratio=token_ratio,
    gate=gaussian_gate(sigma, alpha, beta),
    weigh=weights_by_name(weights, max_tokens),
    penalties=penalties,
    needs=needs,
  )
