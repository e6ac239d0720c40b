"""CISPO: token ratio x capped weight x token mean."""

from jaxrl_llm.objectives.base import policy_objective, weights_by_name
from jaxrl_llm.objectives.penalties import regularisers
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.score_gates import capped_weight
from jaxrl_llm.objectives.settings import checked
from jaxrl_llm.types import Objective


@checked
def cispo(
  *,
  clip_high: float = 4.0,
  clip_low: float = 1.0,
  kl_coef: float = 0.0,
  kl_estimator: str = "k3",
  entropy_coef: float = 0.0,
  weights: str = "token_mean",
  max_tokens: int | None = None,
) -> Objective:
  """Clipped importance-sampling policy optimisation: caps the weight of a token and keeps its gradient.

  J = (1/Σ|y|) Σ_t sg[clip(r_t, 1 − clip_low, 1 + clip_high)]·A_t·log π_t

  Args:
    clip_high: how far above 1 a token's weight may rise: the cap is 1 + clip_high, by default 5.
    clip_low: how far below 1 it may fall; 1 never binds.
    kl_coef: loss per nat of divergence from the reference; above 0 the objective needs `ref_logprobs`.
    kl_estimator: a key of `penalties.KL_ESTIMATORS`.
    entropy_coef: reward per nat of entropy; above 0 the objective needs `entropy`.
    weights: "token_mean", "sequence_mean", "sequence_sum" or "constant".
    max_tokens: generation budget in tokens, for weights="constant" only.

  Returns:
    The objective.

  Raises:
    ValueError: for a setting that is unknown, illegal or without effect.

  Example:
    >>> sorted(cispo(clip_high=1.0).needs)
    ['old_logprobs']

  References:
    MiniMax-M1: scaling test-time compute efficiently with lightning attention, arXiv:2506.13585, 2025.
    The art of scaling reinforcement learning compute for LLMs (ScaleRL), arXiv:2510.13786, 2025, for the cap of 5.

  Note:
    MiniMax did not publish its cap. TRL's `epsilon_high` is the cap itself, so 5.0 there is clip_high=4.0 here, and it never caps from
    below; verl's convention is this one, but its default is the `clip_ratio` of PPO on both sides. `actor/pg_clipfrac` counts capped tokens
    of either sign of A, as verl does; TRL counts those with A > 0.
  """
  penalties, needs = regularisers(kl_coef, kl_estimator, entropy_coef)
  return policy_objective(
    ratio=token_ratio,
    gate=capped_weight(clip_high, clip_low),
    weigh=weights_by_name(weights, max_tokens),
    penalties=penalties,
    needs=needs,
  )
