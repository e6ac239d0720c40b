"""Dr. GRPO: token ratio x hard clip x constant weights."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.ratios import token_ratio


@algorithm(weights="constant", max_tokens=3000, settings_of=hard_clip)
def dr_grpo(*, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Slots:
  """Builds the Dr. GRPO objective: GRPO's hard clip without its length bias.

  J = (1/N) Σ_i (1/max_tokens) Σ_t min(r_t·A_i, clip(r_t, 1 − clip_low, 1 + clip_high)·A_i)

  The weight of a token does not depend on the length of its response.

  Example:
    >>> import jax.numpy as jnp
    >>> dr_grpo(max_tokens=4).weigh(jnp.array([[1., 1.], [1., 0.]]), None).tolist()
    [[0.125, 0.125], [0.125, 0.0]]

  References:
    Understanding R1-Zero-Like Training: A Critical Perspective, arXiv:2503.20783, 2025.

  Note:
    The other half of the method is in the advantages: `group_advantages(..., normalize_std=False)`.
    `max_tokens` is a setting and not a shape; without its `loss_scale_factor`, verl divides by the
    padded width.
  """
  return Slots(ratio=token_ratio, gate=hard_clip(clip_low, clip_high, dual_clip))
