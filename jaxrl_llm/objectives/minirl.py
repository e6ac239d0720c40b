"""MiniRL: token ratio x hard clip x sequence sum, weighed by the engines' mismatch."""

import functools

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.corrections import tis
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.ratios import token_ratio


@algorithm(weights="sequence_sum", settings_of=hard_clip)
def minirl(*, clip_low: float = 0.2, clip_high: float = 0.27, dual_clip: float | None = None, tis_cap: float = 5.0) -> Slots:
  """Builds the MiniRL objective, a hard clip weighed by the mismatch of learner and sampler.

  J = (1/N) Σ_i Σ_t min(k_t, tis_cap)·min(r_t·A_t, clip(r_t, 1 − clip_low, 1 + clip_high)·A_t)
  k = π_old/μ

  This is a first-order approximation of the sequence-level objective: token weights account for
  mismatch and staleness, without length normalisation.

  Args:
    tis_cap: Largest weight k of a token's mismatch between learner and sampler.

  Example:
    >>> sorted(minirl().needs)
    ['old_logprobs', 'sampler_logprobs']

  References:
    Stabilizing reinforcement learning with LLMs: formulation and practices (MiniRL),
      arXiv:2512.01374, 2025.

  Note:
    The paper writes sg[k·r]·A·log π on the tokens that the clip keeps; the gradient of the clipped
    surrogate is the same. Its advantages are R − mean of the group, without division by the
    deviation. Its advice on replaying experts is outside the loss.
  """
  gate = hard_clip(clip_low, clip_high, dual_clip)
  return Slots(ratio=token_ratio, gate=gate, correction=functools.partial(tis, cap=tis_cap))
