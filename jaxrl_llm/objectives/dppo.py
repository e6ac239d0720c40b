"""DPPO: token ratio x ball of total variation or KL divergence x token mean."""

import functools

from jaxrl_llm.objectives.algorithm import Slots, algorithm
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.score_gates import divergence_ball


def dppo(divergence: str, *, delta_low: float = 0.15, delta_high: float = 0.15, ratio_cap: float = 20.0, anchor: str = "sampler") -> Slots:
  """Builds a DPPO objective: a ball of total variation (`dppo_tv`) or KL divergence (`dppo_kl`).

  J = (1/Σ|y|) Σ_t sg[min(r_t, ratio_cap)·keep_t]·A_t·log π_t
  D of "this token or another": |π − μ| for `dppo_tv`, KL(μ‖π) in nats for `dppo_kl`

  Divergence proximal policy optimisation bounds a divergence at the sampled token.

  Args:
    anchor: Policy that the divergence is measured from: "sampler" for the one that drew the tokens,
      "old" for the learner's at the start of the updates.

  Example:
    >>> dppo_tv().needs
    frozenset({'sampler_logprobs'})
    >>> dppo_kl(delta_low=-1)
    Traceback (most recent call last):
      ...
    ValueError: dppo_kl: delta_low: found -1, expected a number >= 0

  References:
    Rethinking the trust region in LLM reinforcement learning, arXiv:2602.04879, 2026.

  Note:
    verl takes the threshold from PPO's `clip_ratio` and the cap from `clip_ratio_c`, which is the
    dual clip's 3 unless set to the 20 of the paper; here both have names and values of their own.
    verl's KL adds 1e-8 to each 1 − p; here log(1 − p) is computed without cancellation. The anchor
    of the paper is the policy of the sampling engine; anchor="old" uses `old_logprobs`.
  """
  return Slots(ratio=token_ratio, gate=divergence_ball(divergence, delta_low, delta_high, ratio_cap), anchor=anchor)


_algorithm = functools.partial(algorithm, weights="token_mean", settings_of=divergence_ball)
dppo_tv = _algorithm(name="dppo_tv")(functools.partial(dppo, "tv"))
dppo_kl = _algorithm(name="dppo_kl")(functools.partial(dppo, "kl", delta_low=0.05, delta_high=0.05))
