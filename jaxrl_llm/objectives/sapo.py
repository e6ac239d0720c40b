"""SAPO: token ratio x soft gate x sequence mean."""

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.gates import soft_gate
from jaxrl_llm.objectives.ratios import token_ratio


@algorithm(weights="sequence_mean", settings_of=soft_gate)
def sapo(*, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Slots:
  """Builds the SAPO objective (soft adaptive policy optimisation), a smooth gate and no clip.

  J = (1/N) Σ_i (1/|y_i|) Σ_t (4/τ)·σ(τ(r_t − 1))·A_i,  τ = tau_pos if A > 0, else tau_neg

  The weight of a token fades with its distance from on-policy, faster if A < 0.

  Example:
    >>> sapo(tau_pos=0)
    Traceback (most recent call last):
      ...
    ValueError: sapo: tau_pos: found 0, expected a finite number > 0

  References:
    Soft Adaptive Policy Optimization, arXiv:2511.20347, 2025.

  Note:
    The raw loss is not 0 on-policy (see `gates.soft_gate`); read `sapo/centred_loss`. verl and TRL
    report the raw loss. TRL rounds τ = 1.05 to float32 even in float64, and does not bound the
    log-ratio.
  """
  return Slots(ratio=token_ratio, gate=soft_gate(tau_pos, tau_neg))
