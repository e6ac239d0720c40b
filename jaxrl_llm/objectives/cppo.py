"""CPPO: token ratio x prefix budget x token mean."""

from jaxrl_llm.objectives.base import policy_objective, weights_by_name
from jaxrl_llm.objectives.penalties import regularisers
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.score_gates import prefix_budget
from jaxrl_llm.objectives.settings import checked
from jaxrl_llm.types import Objective


@checked
def cppo(
  *,
  delta: float = 0.15,
  w_min: float = 0.8,
  budget: float = 0.02,
  anchor: str = "sampler",
  kl_coef: float = 0.0,
  kl_estimator: str = "k3",
  entropy_coef: float = 0.0,
  weights: str = "token_mean",
  max_tokens: int | None = None,
) -> Objective:
  """A trust region in probability that a response spends from its first token on, so that early tokens have less room.

  J = (1/Σ|y|) Σ_t keep_t·r_t·A_t  (`score_gates.prefix_budget`)

  Args:
    delta: largest weighted shift |π − μ| of a token; 0.15 is for dense models, 0.20 for mixtures of experts.
    w_min: weight of the last token's shift; the first token's is 1.
    budget: shift of probability per token that a response may spend; up to twice that where its shifts are large.
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
    >>> cppo(w_min=0)
    Traceback (most recent call last):
      ...
    ValueError: cppo: w_min: found 0, expected a number > 0 and <= 1, the weight of the first token

  References:
    CPPO (prefix budgets), arXiv:2606.10968, 2026.

  Note:
    The quantile is over the counted tokens of one sequence, as in the authors' code, and so no split of the batch changes it. The anchor is
    the sampler's policy; anchor="old" takes `old_logprobs`.
  """
  penalties, needs = regularisers(kl_coef, kl_estimator, entropy_coef)
  return policy_objective(
    ratio=token_ratio,
    gate=prefix_budget(delta, w_min, budget),
    weigh=weights_by_name(weights, max_tokens),
    penalties=penalties,
    needs=needs,
    anchor=anchor,
  )
