"""DPPO: token ratio x ball of total variation x token mean."""

from jaxrl_llm.objectives.base import policy_objective, weights_by_name
from jaxrl_llm.objectives.penalties import regularisers
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.score_gates import divergence_ball
from jaxrl_llm.objectives.settings import checked
from jaxrl_llm.types import Objective


@checked
def dppo_tv(
  *,
  delta_low: float = 0.15,
  delta_high: float = 0.15,
  ratio_cap: float = 20.0,
  anchor: str = "sampler",
  kl_coef: float = 0.0,
  kl_estimator: str = "k3",
  entropy_coef: float = 0.0,
  weights: str = "token_mean",
  max_tokens: int | None = None,
) -> Objective:
  """Divergence proximal policy optimisation, with the total variation of the sampled token for a trust region.

  J = (1/Σ|y|) Σ_t sg[min(r_t, ratio_cap)·keep_t]·A_t·log π_t,  D = |π − μ| of "this token or another"

  Args:
    delta_low: largest divergence at which a token with A < 0 may still lose probability.
    delta_high: largest divergence at which a token with A > 0 may still gain probability.
    ratio_cap: largest importance weight.
    anchor: "sampler" measures from the policy that drew the tokens, "old" from the learner's at the start of the updates.
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
    >>> dppo_tv().needs
    frozenset({'sampler_logprobs'})

  References:
    Rethinking the trust region in LLM reinforcement learning, arXiv:2602.04879, 2026.

  Note:
    verl takes the threshold from PPO's `clip_ratio` and the cap from `clip_ratio_c`, whose default is that of the dual clip, 3, unless set
    to the 20 of the paper; here both have names and values of their own. The anchor of the paper is the policy of the sampling engine;
    anchor="old" takes `old_logprobs`.
  """
  penalties, needs = regularisers(kl_coef, kl_estimator, entropy_coef)
  return policy_objective(
    ratio=token_ratio,
    gate=divergence_ball("tv", delta_low, delta_high, ratio_cap),
    weigh=weights_by_name(weights, max_tokens),
    penalties=penalties,
    needs=needs,
    anchor=anchor,
  )
