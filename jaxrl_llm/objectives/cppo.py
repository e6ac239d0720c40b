"""CPPO: token ratio x prefix budget x token mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.score_gates import prefix_budget


@algorithm(weights="token_mean", settings_of=prefix_budget)
def cppo(*, delta: float = 0.15, w_min: float = 0.8, budget: float = 0.02, anchor: str = "sampler") -> Slots:
  """Builds the CPPO objective, with a budget for the shift in probability of each prefix.

  J = (1/Σ|y|) Σ_t keep_t·r_t·A_t  (see `score_gates.prefix_budget`)

  A response spends the budget from its first token on, so early tokens have less room.

  Args:
    anchor: Policy that the shift is measured from: "sampler" for the one that drew the tokens,
      "old" for the learner's at the start of the updates.

  Example:
    >>> cppo(w_min=0)
    Traceback (most recent call last):
      ...
    ValueError: cppo: w_min: found 0, expected a number > 0 and <= 1, the weight of the first token

  References:
    CPPO (prefix budgets), arXiv:2606.10968, 2026.

  Note:
    The quantile is over the counted tokens of one sequence, as in the authors' code, so no split of
    the batch changes it. The default anchor is the sampler's policy; anchor="old" uses
    `old_logprobs`.
  """
  return Slots(ratio=token_ratio, gate=prefix_budget(delta, w_min, budget), anchor=anchor)
