"""TOPR: product of token ratios x weight by the sign of the advantage x sequence sum."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.ratios import product_ratio
from jaxrl_llm.objectives.score_gates import tapered_weight


@algorithm(weights="sequence_sum", settings_of=tapered_weight)
def topr(*, ratio_cap: float = 1.0, anchor: str = "sampler") -> Slots:
  """Builds the TOPR objective (tapered off-policy REINFORCE), a weight capped if A < 0.

  J = (1/N) Σ_i Σ_t sg[C_i]·A·log π_t
  C = 1 if A ≥ 0, else min(ρ, ratio_cap),  ρ = Π_t π/π_anchor

  It is made for data of any age. Good responses are imitated however unlikely they have become. Bad
  ones are pushed down only as long as the policy still writes them, which bounds the loss.

  Args:
    anchor: Policy that the ratio compares with: "sampler" for the one that drew the tokens, "old"
      for the learner's at the start of the updates.

  Example:
    >>> topr().needs
    frozenset({'sampler_logprobs'})

  References:
    Tapered Off-Policy REINFORCE: stable and efficient reinforcement learning for LLMs (TOPR),
      arXiv:2503.14286, 2025.

  Note:
    The paper's sign is that of the reward less a baseline, one for a response; here it is that of
    each token's advantage. log ρ is bounded at ±20.
  """
  return Slots(ratio=product_ratio, gate=tapered_weight(ratio_cap), anchor=anchor)
