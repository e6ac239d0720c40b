"""Clip-Cov: token ratio x hard clip, without some tokens of large covariance x token mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import hard_clip, without_selected
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.selections import random_covariances


@algorithm(weights="token_mean", settings_of=hard_clip)
def clip_cov(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
  cov_share: float = 2e-4,
  cov_low: float = 1.0,
  cov_high: float = 5.0,
) -> Slots:
  """Builds the Clip-Cov objective, a hard clip that detaches a few tokens of large covariance.

  J = (1/Σ|y|) Σ_t min(r_t·A_t, clip(r_t, 1 − clip_low, 1 + clip_high)·A_t) over tokens not selected
  selected: ⌊cov_share·Σ|y|⌋ random tokens with cov_low ≤ cov_t ≤ cov_high  (see `selections`)

  Tokens of large covariance of log-probability and advantage lower the entropy most.

  Args:
    cov_share: Share of the batch's tokens that are detached, at least one.
    cov_low: Smallest covariance, in nats times advantage, of a token that may be detached.
    cov_high: Largest such covariance.

  Example:
    >>> sorted(clip_cov().needs)
    ['old_logprobs']

  References:
    The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv:2505.22617,
      2025, section 4.2.

  Note:
    The tokens are selected once per update, from the whole global batch, by log π_old. verl and the
    authors select them in each micro-batch, by the current policy, among those that the clip does
    not end.
  """
  gate = without_selected(hard_clip(clip_low, clip_high, dual_clip))
  return Slots(ratio=token_ratio, gate=gate, prepare=random_covariances(cov_share, cov_low, cov_high))
