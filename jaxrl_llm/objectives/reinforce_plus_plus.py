"""REINFORCE++: token ratio x hard clip x token mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.ratios import token_ratio


@algorithm(weights="token_mean", settings_of=hard_clip)
def reinforce_plus_plus(*, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Slots:
  """Builds the REINFORCE++ objective: PPO's hard clip without a critic.

  J = (1/Σ|y|) Σ_t min(r_t·A_t, clip(r_t, 1 − clip_low, 1 + clip_high)·A_t)

  The advantages are normalised over the whole batch.

  Example:
    >>> sorted(reinforce_plus_plus(kl_coef=0.01).needs)
    ['old_logprobs', 'ref_logprobs']

  References:
    REINFORCE++, arXiv:2501.03262, 2025.

  Note:
    The method is in its advantages: the reward at the end of a response, minus the KL to the
    reference at each token, summed from that token on and whitened over the batch. The KL belongs
    to the reward, hence kl_coef=0 here.
  """
  return Slots(ratio=token_ratio, gate=hard_clip(clip_low, clip_high, dual_clip))
