"""GSPO: sequence ratio x hard clip x sequence mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.ratios import sequence_ratio


@algorithm(weights="sequence_mean", settings_of=hard_clip)
def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float | None = None) -> Slots:
  """Builds the GSPO objective (group sequence policy optimisation), a hard clip of responses.

  J = (1/N) Σ_i min(s_i·A_i, clip(s_i, 1 − clip_low, 1 + clip_high)·A_i)
  log s_i = (1/|y_i|) Σ_t log r_t

  A response is weighed and clipped as a whole.

  Example:
    >>> wider = gspo(clip_low=3e-3, clip_high=4e-3)
    >>> sorted(wider.needs)
    ['old_logprobs']

  References:
    Group Sequence Policy Optimization, arXiv:2507.18071, 2025, eq. 5 and 7.

  Note:
    log s shrinks as 1/√|y|: the paper's clip is for responses of thousands of tokens. Widen it for
    short ones. verl bounds log s at 10 from above and always uses this aggregation, whatever its
    setting says. TRL counts clipped sequences, which is `actor/pg_clipfrac_seq` here;
    `actor/pg_clipfrac` counts their tokens, as the paper does. TRL's band is PPO's 0.2 unless set.
  """
  return Slots(ratio=sequence_ratio, gate=hard_clip(clip_low, clip_high, dual_clip))
