"""VESPO: sequence product x gamma weight x token mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.ratios import product_ratio
from jaxrl_llm.objectives.score_gates import gamma_weight


@algorithm(weights="token_mean", settings_of=gamma_weight)
def vespo(*, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0) -> Slots:
  """Builds the VESPO objective, a gamma weight of each response.

  J = (1/Σ|y|) Σ_i Σ_t sg[φ(ρ_i)]·A_t·log π_t,  φ(ρ) = ρ^k·e^{λ(1 − ρ)},  log ρ_i = Σ_t log r_t

  Variational sequence-level soft policy optimisation weighs each response by a smooth function of
  its true importance weight.

  Example:
    >>> sorted(vespo().needs)
    ['old_logprobs']

  References:
    VESPO, arXiv:2602.10693, 2026.

  Note:
    The constants and the denominator, all tokens of the batch, are those of the authors' code and
    of TRL. TRL multiplies the engines' mismatch π_old/μ into ρ, where φ damps it too; here a
    correction weighs the loss, as for every objective (see `corrections.tis`). TRL bounds log ρ at
    log 1e-8 from below and turns a NaN weight into 0; here the bound is −20, and a NaN reaches the
    loss.
  """
  return Slots(ratio=product_ratio, gate=gamma_weight(k_pos, lambda_pos, k_neg, lambda_neg))
