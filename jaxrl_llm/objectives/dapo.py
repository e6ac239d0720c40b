"""DAPO: token ratio x asymmetric hard clip x token mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import hard_clip
from jaxrl_llm.objectives.ratios import token_ratio


@algorithm(weights="token_mean", settings_of=hard_clip)
def dapo(*, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = None) -> Slots:
  """Builds the DAPO objective, a hard clip that is wider above 1 than below.

  J = (1/Σ|y|) Σ_i Σ_t min(r_t·A_i, clip(r_t, 1 − clip_low, 1 + clip_high)·A_i)

  The decoupled clip leaves more room upwards, so that rare tokens can grow. Every token of the
  batch has the same weight.

  Example:
    >>> dapo(max_tokens=512)
    Traceback (most recent call last):
      ...
    ValueError: dapo: max_tokens: found 512, expected None, because weights is 'token_mean' and \
would ignore it

  References:
    DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv:2503.14476, 2025, eq. 8.

  Note:
    Eqs. 8 and 12 of the paper divide by the tokens of one prompt's group, inside the expectation
    over prompts, which is weights="prompt_mean". The default is the denominator of verl's
    implementation, all tokens of the batch, so that a prompt with long responses weighs more.

    The other parts of the method, dynamic sampling and the soft overlong penalty, belong to the
    rollout and the reward.
  """
  return Slots(ratio=token_ratio, gate=hard_clip(clip_low, clip_high, dual_clip))
