"""RLOO: sequence product x hard clip x sequence mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.ratios import product_ratio


@algorithm(weights="sequence_mean", settings_of=hard_clip)
def rloo(*, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Slots:
  """Builds the RLOO objective (REINFORCE leave-one-out), a hard clip of responses.

  J = (1/N) Σ_i min(ρ_i·A_i, clip(ρ_i, 1 − clip_low, 1 + clip_high)·A_i),  log ρ_i = Σ_t log r_t

  A whole response is one action, compared by its true importance weight.

  Example:
    >>> sorted(rloo().needs)
    ['old_logprobs']

  References:
    Back to Basics: Revisiting REINFORCE-style optimization for learning from human feedback in
      LLMs, arXiv:2402.14740, 2024.

  Note:
    The clip is TRL's. The paper has none, which is clip_low=1.0 with clip_high=float("inf").

    Advantages are those of leave-one-out, R_i minus the mean of the group's others. Each token of a
    response has the same ρ, and the mean of |y| equal values is that value. weights="sequence_mean"
    thus gives the gradient ρ·A·Σ_t ∇log π_t of a response, not a length-normalised one. As a
    product of |y| ratios, ρ soon leaves the band; with one update per rollout batch it is 1.
  """
  return Slots(ratio=product_ratio, gate=hard_clip(clip_low, clip_high, dual_clip))
