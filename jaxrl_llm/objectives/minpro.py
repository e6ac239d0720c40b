"""MinPRO: prefix minimum x capped weight x token mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.ratios import prefix_min_ratio
from jaxrl_llm.objectives.score_gates import capped_weight


@algorithm(weights="token_mean", settings_of=capped_weight)
def minpro(*, clip_high: float = 4.0) -> Slots:
  """Builds the MinPRO objective, CISPO with the smallest ratio of the prefix in its weight.

  J = (1/Σ|y|) Σ_t sg[min(r_t·min_{j<t} r_j, 1 + clip_high)]·A_t·log π_t

  The smallest ratio before the token stands in for the product over the whole prefix.

  Example:
    >>> sorted(minpro().needs)
    ['old_logprobs']

  References:
    MinPRO, arXiv:2601.22718, 2026.

  Note:
    The paper's cap is unknown to us; the default is that of `cispo`. The minimum over an empty
    prefix is 1.
  """
  return Slots(ratio=prefix_min_ratio, gate=capped_weight(clip_high))
