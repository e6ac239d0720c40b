"""LUSPO: sequence ratio x hard clip x sequence sum."""

from jaxrl_llm.objectives.base import policy_objective, weights_by_name
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.penalties import regularisers
from jaxrl_llm.objectives.ratios import sequence_ratio
from jaxrl_llm.objectives.settings import checked
from jaxrl_llm.types import Objective


@checked
def luspo(
  *,
  clip_low: float = 2e-3,
  clip_high: float = 2.5e-3,
  dual_clip: float | None = None,
  kl_coef: float = 0.0,
  kl_estimator: str = "k3",
  entropy_coef: float = 0.0,
  weights: str = "sequence_sum",
  max_tokens: int | None = None,
) -> Objective:
  """Length-unbiased sequence policy optimisation: GSPO with each response weighed by its length.

  J = (1/N) Σ_i |y_i|·min(s_i·A_i, clip(s_i, 1 − clip_low, 1 + clip_high)·A_i),  log s_i = (1/|y_i|) Σ_t log r_t

  Args:
    clip_low: how far below 1 a sequence's ratio may fall where A < 0.
    clip_high: how far above 1 a sequence's ratio may rise where A > 0.
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
    >>> sorted(luspo().needs)
    ['old_logprobs']

  References:
    LUSPO, arXiv:2602.05261, 2026.

  Note:
    The factor |y| is the sum over a response's tokens where GSPO has the mean. TRL divides by the rows of a micro-batch, empty ones
    included. log s shrinks as 1/√|y|: widen the paper's clip for short responses.
  """
  penalties, needs = regularisers(kl_coef, kl_estimator, entropy_coef)
  return policy_objective(
    ratio=sequence_ratio,
    gate=hard_clip(clip_low, clip_high, dual_clip),
    weigh=weights_by_name(weights, max_tokens),
    penalties=penalties,
    needs=needs,
  )
