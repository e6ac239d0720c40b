"""GSPO-token: sequence ratio with a token gradient x hard clip x sequence mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.ratios import sequence_ratio_token_gradient


@algorithm(weights="sequence_mean", settings_of=hard_clip)
def gspo_token(*, clip_low: float = 3e-4, clip_high: float = 4e-4, dual_clip: float | None = None) -> Slots:
  """Builds the GSPO-token objective: GSPO's hard clip with a gradient for each token alone.

  J = (1/N) Σ_i (1/|y_i|) Σ_t min(s_t·A_t, clip(s_t, 1 − clip_low, 1 + clip_high)·A_t)
  s_t = sg[s_i]·π(y_t)/sg[π(y_t)]

  It is for advantages that differ between the tokens of a response, and equals GSPO if they do not.

  Example:
    >>> sorted(gspo_token(clip_low=3e-3, clip_high=4e-3).needs)
    ['old_logprobs']

  References:
    Group Sequence Policy Optimization, arXiv:2507.18071, 2025, eq. 13 and 14.

  Note:
    verl computes this form under the name gspo; TRL has it as a separate trainer. Both agree with
    it in value and gradient.
  """
  return Slots(ratio=sequence_ratio_token_gradient, gate=hard_clip(clip_low, clip_high, dual_clip))
