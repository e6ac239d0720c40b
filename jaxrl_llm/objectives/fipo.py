"""FIPO: token ratio x hard clip, weighed by the discounted log-ratios to come x token mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import future_gate
from jaxrl_llm.objectives.ratios import token_ratio


@algorithm(weights="token_mean", settings_of=future_gate)
def fipo(
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  dual_clip: float | None = 10.0,
  half_life: float = 32.0,
  future_cap: float = 0.2,
  safe_ratio: float = 4.0,
) -> Slots:
  """Builds the FIPO objective, a hard clip weighed by the log-ratios still to come.

  J = (1/Σ|y|) Σ_t sg[w_t]·min(r_t·A_t, clip(r_t, 1 − clip_low, 1 + clip_high)·A_t)
  w_t = clip(e^{F_t}, 1, 1 + future_cap),  F_t = Σ_{j≥t} γ^(j−t)·log r_j,  γ = 2^(−1/half_life)

  It credits tokens with where the policy moves after them. A token with r > dual_clip adds nothing
  to F, and w = 1 if A < 0 and r > safe_ratio.

  Example:
    >>> sorted(fipo(future_cap=0.1).needs)
    ['old_logprobs']

  References:
    FIPO: Eliciting Deep Reasoning with Future-KL Influenced Policy Optimization, arXiv:2603.19835,
      2026.

  Note:
    The equations are those of ms-swift's code, the band is DAPO's, on which the method builds, and
    dual_clip=10 is that of the authors' run of 32B weights; ms-swift has none by default. Its
    safety rule clips w to 0.8 … 1, which is 1 for a weight that is never below 1. j − t counts the
    tokens of the policy alone; in ms-swift it also counts the replies of an environment.
  """
  gate = future_gate(clip_low, clip_high, dual_clip, half_life, future_cap, safe_ratio)
  return Slots(ratio=token_ratio, gate=gate)
