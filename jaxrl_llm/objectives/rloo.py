"""RLOO: sequence product x hard clip x sequence mean."""

from jaxrl_llm.objectives.base import policy_objective, weights_by_name
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.penalties import regularisers
from jaxrl_llm.objectives.ratios import product_ratio
from jaxrl_llm.objectives.settings import checked
from jaxrl_llm.types import Objective


@checked
def rloo(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
  kl_coef: float = 0.0,
  kl_estimator: str = "k3",
  entropy_coef: float = 0.0,
  weights: str = "sequence_mean",
  max_tokens: int | None = None,
) -> Objective:
  """REINFORCE leave-one-out: a whole response is one action, compared by its true importance weight.

  J = (1/N) Σ_i min(ρ_i·A_i, clip(ρ_i, 1 − clip_low, 1 + clip_high)·A_i),  log ρ_i = Σ_t log r_t

  Args:
    clip_low: how far below 1 a response's ratio may fall where A < 0.
    clip_high: how far above 1 a response's ratio may rise where A > 0.
    dual_clip: largest ratio that counts where A < 0; None leaves it unbounded.
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
    >>> sorted(rloo().needs)
    ['old_logprobs']

  References:
    Back to Basics: Revisiting REINFORCE-style optimization for learning from human feedback in LLMs, arXiv:2402.14740, 2024.

  Note:
    Advantages are those of leave-one-out, R_i minus the mean of the group's others. ρ stands at each token of a response, and the mean of
    |y| equal values is the value: weights="sequence_mean" gives the gradient ρ·A·Σ_t ∇log π_t of a response, not a length-normalised one.
    As a product of |y| ratios ρ leaves the band soon; with one update a rollout batch it is 1.
  """
  penalties, needs = regularisers(kl_coef, kl_estimator, entropy_coef)
  return policy_objective(
    ratio=product_ratio,
    gate=hard_clip(clip_low, clip_high, dual_clip),
    weigh=weights_by_name(weights, max_tokens),
    penalties=penalties,
    needs=needs,
  )
