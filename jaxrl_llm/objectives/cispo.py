"""CISPO: token ratio x capped weight x token mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.score_gates import capped_weight


@algorithm(weights="token_mean", settings_of=capped_weight)
def cispo(*, clip_high: float = 4.0, clip_low: float = 1.0) -> Slots:
  """Builds the CISPO objective (clipped importance-sampling policy optimisation), a capped weight.

  J = (1/Σ|y|) Σ_t sg[clip(r_t, 1 − clip_low, 1 + clip_high)]·A_t·log π_t

  It caps the weight of a token and keeps its gradient.

  Example:
    >>> sorted(cispo(clip_high=1.0).needs)
    ['old_logprobs']

  References:
    MiniMax-M1: scaling test-time compute efficiently with lightning attention, arXiv:2506.13585,
      2025.
    The art of scaling reinforcement learning compute for LLMs (ScaleRL), arXiv:2510.13786, 2025,
      for the cap of 5.

  Note:
    Eq. 4 of MiniMax-M1 divides by the tokens of one prompt's group, as DAPO's does, which is
    weights="prompt_mean". The default is verl's denominator, all tokens of the batch.

    MiniMax did not publish its cap. TRL's `epsilon_high` is the cap itself, so 5.0 there is
    clip_high=4.0 here, and TRL never caps from below. verl's convention is the one used here, but
    its default is PPO's `clip_ratio` on both sides. `actor/pg_clipfrac` counts capped tokens of
    either sign of A, as verl does; TRL counts those with A > 0.
  """
  return Slots(ratio=token_ratio, gate=capped_weight(clip_high, clip_low))
