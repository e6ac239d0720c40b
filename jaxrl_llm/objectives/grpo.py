"""GRPO: token ratio x hard clip x sequence mean, with a KL penalty."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.ratios import token_ratio


@algorithm(weights="sequence_mean", kl_coef=0.04, settings_of=hard_clip)
def grpo(*, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Slots:
  """Builds the GRPO objective (group relative policy optimisation), a hard clip and a KL penalty.

  J = (1/N) Σ_i (1/|y_i|) Σ_t [ min(r_t·A_i, clip(r_t, 1 − clip_low, 1 + clip_high)·A_i)
                             − kl_coef·k3_t ]

  The advantages come from `advantages.group_advantages`.

  Example:
    >>> sorted(grpo().needs), sorted(grpo(kl_coef=0.0).needs)
    (['old_logprobs', 'ref_logprobs'], ['old_logprobs'])

  References:
    DeepSeekMath, arXiv:2402.03300, 2024, eq. 3 and 4.

  Note:
    The paper makes one update per round of sampling, so its clip never binds; 0.2 is PPO's. TRL's
    `delta` caps the ratio before both branches: above 1 + clip_high it is `dual_clip`. TRL, and
    verl if given the global batch size, count rows without a counted token in the mean over
    sequences; here they are not counted. TRL averages an entropy bonus over tokens; here it has the
    objective's weights.
  """
  return Slots(ratio=token_ratio, gate=hard_clip(clip_low, clip_high, dual_clip))
