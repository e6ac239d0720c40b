"""Dr. GRPO: token ratio x hard clip x constant weights."""

from jaxrl_llm.objectives.base import policy_objective, weights_by_name
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.penalties import regularisers
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.settings import checked
from jaxrl_llm.types import Objective


@checked
def dr_grpo(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
  kl_coef: float = 0.0,
  kl_estimator: str = "k3",
  entropy_coef: float = 0.0,
  weights: str = "constant",
  max_tokens: int | None = 3000,
) -> Objective:
  """GRPO without its length bias: a token's weight does not depend on how long its response is.

  J = (1/N) Σ_i (1/max_tokens) Σ_t min(r_t·A_i, clip(r_t, 1 − clip_low, 1 + clip_high)·A_i)

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
    >>> import jax.numpy as jnp
    >>> dr_grpo(max_tokens=4).weigh(jnp.array([[1., 1.], [1., 0.]]), None).tolist()
    [[0.125, 0.125], [0.125, 0.0]]

  References:
    Understanding R1-Zero-Like Training: A Critical Perspective, arXiv:2503.20783, 2025.

  Note:
    The other half of the method is in the advantages: `group_advantages(..., normalize_std=False)`.
    `max_tokens` is a setting and not a shape: without its `loss_scale_factor` verl divides by the padded width.
  """
  penalties, needs = regularisers(kl_coef, kl_estimator, entropy_coef)
  return policy_objective(
    ratio=token_ratio,
    gate=hard_clip(clip_low, clip_high, dual_clip),
    weigh=weights_by_name(weights, max_tokens),
    penalties=penalties,
    needs=needs,
  )
