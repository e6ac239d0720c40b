"""LUSPO: sequence ratio x hard clip x sequence sum."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.ratios import sequence_ratio


@algorithm(weights="sequence_sum", settings_of=hard_clip)
def luspo(*, clip_low: float = 2e-3, clip_high: float = 2.5e-3, dual_clip: float | None = None) -> Slots:
  """Builds the LUSPO objective (length-unbiased sequence policy optimisation), a hard clip.

  J = (1/N) Σ_i |y_i|·min(s_i·A_i, clip(s_i, 1 − clip_low, 1 + clip_high)·A_i)
  log s_i = (1/|y_i|) Σ_t log r_t

  This is GSPO with each response weighed by its length.

  Example:
    >>> sorted(luspo().needs)
    ['old_logprobs']

  References:
    LUSPO, arXiv:2602.05261, 2026.

  Note:
    The factor |y| comes from the sum over a response's tokens, instead of GSPO's mean. TRL divides
    by the rows of a micro-batch, empty ones included. log s shrinks as 1/√|y|: widen the paper's
    clip for short responses.
  """
  return Slots(ratio=sequence_ratio, gate=hard_clip(clip_low, clip_high, dual_clip))
