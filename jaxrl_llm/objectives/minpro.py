"""MinPRO: prefix minimum x capped weight x token mean."""

from jaxrl_llm.objectives.base import policy_objective, weights_by_name
from jaxrl_llm.objectives.penalties import regularisers
from jaxrl_llm.objectives.ratios import prefix_min_ratio
from jaxrl_llm.objectives.score_gates import capped_weight
from jaxrl_llm.objectives.settings import checked
from jaxrl_llm.types import Objective


@checked
def minpro(
  *,
  clip_high: float = 4.0,
  kl_coef: float = 0.0,
  kl_estimator: str = "k3",
  entropy_coef: float = 0.0,
  weights: str = "token_mean",
  max_tokens: int | None = None,
) -> Objective:
  """CISPO whose weight also has the least ratio before the token, a stand-in for the product of the whole prefix.

  J = (1/Σ|y|) Σ_t sg[min(r_t·min_{j<t} r_j, 1 + clip_high)]·A_t·log π_t

  Args:
    clip_high: how far above 1 a token's weight may rise: the cap is 1 + clip_high.
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
    >>> sorted(minpro().needs)
    ['old_logprobs']

  References:
    MinPRO, arXiv:2601.22718, 2026.

  Note:
    The paper's cap is not known to us; the default is that of `cispo`. The minimum of an empty prefix is 1.
  """
  penalties, needs = regularisers(kl_coef, kl_estimator, entropy_coef)
  return policy_objective(
    ratio=prefix_min_ratio,
    gate=capped_weight(clip_high),
    weigh=weights_by_name(weights, max_tokens),
    penalties=penalties,
    needs=needs,
  )
