"""MASPO: token ratio x Gaussian gate x token mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import gaussian_gate
from jaxrl_llm.objectives.ratios import token_ratio


@algorithm(weights="token_mean", settings_of=gaussian_gate)
def maspo(*, sigma: float = 1.0, alpha: float = 0.3, beta: float = 0.03) -> Slots:
  """Fades out tokens that overshoot, by a Gaussian whose width follows the token's rarity and its advantage.

  J = (1/Σ|y|) Σ_t sg[w_t]·r_t·A_t,  w = exp(−(r − 1)²/(2s²)) where A·(r − 1) > 0, else 1  (`gates.gaussian_gate`)

  Example:
    >>> sorted(maspo().needs)
    ['old_logprobs']

  References:
    MASPO, arXiv:2602.17550, 2026.

  Note:
    Read from descriptions of the paper and not from its code: with beta ≥ 0 both of its widths are s·(1 + beta·|A|)^(±1).
  """
  return Slots(ratio=token_ratio, gate=gaussian_gate(sigma, alpha, beta))
