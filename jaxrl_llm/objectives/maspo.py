"""MASPO: token ratio x Gaussian gate x token mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import gaussian_gate
from jaxrl_llm.objectives.ratios import token_ratio


@algorithm(weights="token_mean", settings_of=gaussian_gate)
def maspo(*, sigma: float = 1.0, alpha: float = 0.3, beta: float = 0.03) -> Slots:
  """Builds the MASPO objective, a Gaussian that fades out tokens that overshoot.

  J = (1/Σ|y|) Σ_t sg[w_t]·r_t·A_t
  w = exp(−(r − 1)²/(2s²)) if A·(r − 1) > 0, else 1  (see `gates.gaussian_gate`)

  The width s of the Gaussian follows the token's rarity and its advantage.

  Example:
    >>> sorted(maspo().needs)
    ['old_logprobs']

  References:
    MASPO, arXiv:2602.17550, 2026.

  Note:
    This implements descriptions of the paper, not its code: with beta ≥ 0 both of its widths are
    s·(1 + beta·|A|)^(±1).
  """
  return Slots(ratio=token_ratio, gate=gaussian_gate(sigma, alpha, beta))
