"""DAPO: token ratio x asymmetric hard clip x token mean."""

from jaxrl_llm.objectives.base import policy_objective, weights_by_name
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.penalties import regularisers
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.settings import checked
from jaxrl_llm.types import Objective


@checked
def dapo(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  dual_clip: float | None = None,
  kl_coef: float = 0.0,
  kl_estimator: str = "k3",
  entropy_coef: float = 0.0,
  weights: str = "token_mean",
  max_tokens: int | None = None,
) -> Objective:
  """Decoupled clip: more room upwards, so that rare tokens can grow; every token of the batch weighs the same.

  J = (1/Σ|y|) Σ_i Σ_t min(r_t·A_i, clip(r_t, 1 − clip_low, 1 + clip_high)·A_i)

  Args:
    clip_low: how far below 1 a token's ratio may fall where A < 0.
    clip_high: how far above 1 a token's ratio may rise where A > 0.
    dual_clip: largest ratio that counts where A < 0; None leaves it unbounded.
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
    >>> dapo(max_tokens=512)
    Traceback (most recent call last):
      ...
    ValueError: dapo: max_tokens: found 512, expected None, because weights is 'token_mean' and would ignore it

  References:
    DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv:2503.14476, 2025, eq. 8.

  Note:
    Dynamic sampling and the soft overlong penalty, the method's other parts, belong to the rollout and the reward.
  """
  penalties, needs = regularisers(kl_coef, kl_estimator, entropy_coef)
  return policy_objective(
    ratio=token_ratio,
    gate=hard_clip(clip_low, clip_high, dual_clip),
    weigh=weights_by_name(weights, max_tokens),
    penalties=penalties,
    needs=needs,
  )
