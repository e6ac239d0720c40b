"""Second slots that weigh the score, ∇log π, and the trust regions in probability. Factories of
`(log_ratio, advantages, context) -> (surrogate, metrics)`.

The surrogate of the first three is sg[C]·A·log π: its gradient is C·A·∇log π of each token whatever the ratio slot holds, also beyond the
bound of the log-ratio, where that of other gates ends. Conditions say which tokens are left out, never which are kept: a comparison with a
NaN is false, so that the token stays in and the NaN reaches the loss.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.objectives.gate_statistics import clip_metrics, gate_metrics
from jaxrl_llm.objectives.prefixes import before, segment_quantile
from jaxrl_llm.segments import once_per_sequence, segment_count
from jaxrl_llm.types import GateContext, GateFn, TokenTerm

SMALLEST = 1e-30
"""A probability nearer to 1 than any float, as minus its logarithm."""


def _score(coefficient: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> Float[Array, "B T"]:
  """sg[C]·A·log π."""
  return jax.lax.stop_gradient(coefficient) * advantages * context.logprobs


def _probability(logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """exp of what should be a log-probability, without gradient; no probability is above 1."""
  return jnp.exp(jnp.minimum(jax.lax.stop_gradient(logprobs), 0))


def capped_weight(clip_high: float = 4.0, clip_low: float = 1.0) -> GateFn:
  """Capped importance weight: a large ratio counts less, and no token loses its gradient.

  sg[clip(r, 1 − clip_low, 1 + clip_high)]·A·log π

  Args:
    clip_high: how far above 1 the weight may rise: the cap is 1 + clip_high, by default 5. Infinity never binds.
    clip_low: how far below 1 it may fall; 1 never binds.

  Returns:
    The gate. Its metrics: those of `clip_metrics`, in which a clip that binds bounds the weight but does not end the gradient, and
    `gate_metrics`.

  Example:
    >>> logprobs = jnp.log(jnp.array([[.5, .5]]))
    >>> context = GateContext(logprobs, logprobs, jnp.ones((1, 2)))
    >>> _, metrics = capped_weight(4.0)(jnp.log(jnp.array([[8., .5]])), jnp.ones((1, 2)), context)
    >>> metrics["gate/max"].tolist(), metrics["actor/pg_clipfrac"].tolist()
    ([[5.0, 0.5]], [[1.0, 0.0]])

  References:
    MiniMax-M1 (CISPO), arXiv:2506.13585, 2025.

  Note:
    verl's `clip_ratio_high` is this clip_high; TRL's `epsilon_high` is the cap itself, 1 + clip_high.
  """

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> TokenTerm:
    ratio = jnp.exp(log_ratio)
    capped = (ratio > 1 + clip_high) | (ratio < 1 - clip_low)
    coefficient = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return _score(coefficient, advantages, context), clip_metrics(capped, advantages, context) | gate_metrics(coefficient)

  return gate


def gamma_weight(k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0) -> GateFn:
  """Weight that has the shape of a gamma density: 1 on-policy, 0 far away on both sides.

  sg[φ(ρ)]·A·log π,  φ(ρ) = ρ^k·e^{λ(1 − ρ)}, with the first pair where A > 0, else the second

  Args:
    k_pos: exponent k where A > 0; the largest weight is at ρ = k/λ.
    lambda_pos: rate λ where A > 0.
    k_neg: exponent where A ≤ 0.
    lambda_neg: rate where A ≤ 0.

  Returns:
    The gate. Its metrics: `vespo/phi_pos` and `vespo/phi_neg` (φ over the tokens with A > 0 and A < 0), and `gate_metrics`.

  Example:
    >>> context = GateContext(*2 * [jnp.full((1, 2), -1.)], jnp.ones((1, 2)))
    >>> surrogate, _ = gamma_weight()(jnp.array([[0., 20.]]), jnp.ones((1, 2)), context)
    >>> surrogate.tolist()
    [[-1.0, -0.0]]

  References:
    VESPO, arXiv:2602.10693, 2026.
  """

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> TokenTerm:
    positive, negative = advantages > 0, advantages < 0
    k, rate = (jnp.where(positive, a, b).astype(log_ratio.dtype) for a, b in ((k_pos, k_neg), (lambda_pos, lambda_neg)))
    phi = jnp.exp(k * log_ratio - rate * jnp.expm1(log_ratio))
    return _score(phi, advantages, context), {
      "vespo/phi_pos": jnp.where(positive, phi, jnp.nan),
      "vespo/phi_neg": jnp.where(negative, phi, jnp.nan),
      **gate_metrics(phi),
    }

  return gate


def binary_tv(logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """Total variation of "this token or another": |π − μ|, from log π and log μ. Never above the total variation of the whole vocabulary."""
  return jnp.abs(_probability(logprobs) - _probability(old_logprobs))


def binary_kl(logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """KL(μ‖π) of "this token or another" in nats: μ·log(μ/π) + (1 − μ)·log((1 − μ)/(1 − π)), from log π and log μ.

  Example:
    >>> binary_kl(jnp.log(jnp.array([[.5]])), jnp.array([[0.]])).round(4).tolist()
    [[0.6931]]
  """

  def log_other(log_p: Float[Array, "B T"]) -> Float[Array, "B T"]:
    # log(1 − p) by the form that keeps its digits on each side; 1 − p itself has none left where p is close to 1.
    return jnp.where(log_p > -0.5, jnp.log(-jnp.expm1(log_p)), jnp.log1p(-jnp.exp(log_p)))

  # Clamped on the input: a probability of 1 gives a large divergence and not an infinite one, and 0·(−∞) cannot arise.
  log_pi, log_mu = (jnp.clip(jax.lax.stop_gradient(x), -1e4, -SMALLEST) for x in (logprobs, old_logprobs))
  return jnp.exp(log_mu) * (log_mu - log_pi) - jnp.expm1(log_mu) * (log_other(log_mu) - log_other(log_pi))


DIVERGENCES = {"tv": binary_tv, "kl": binary_kl}
"""Divergences of the current policy from the anchor at the sampled token, as functions of log π and log μ."""


def divergence_ball(
  divergence: str | Callable[[Array, Array], Array] = "tv", delta_low: float = 0.15, delta_high: float = 0.15, ratio_cap: float = 20.0
) -> GateFn:
  """Trust region in divergence: no gradient for a token that has left it and would go on.

  sg[min(r, ratio_cap)·keep]·A·log π;  not kept are A > 0, π > μ, D > delta_high and A < 0, π < μ, D > delta_low

  Args:
    divergence: D, a key of `DIVERGENCES` or a function of (log π, log μ).
    delta_low: largest divergence at which a token with A < 0 may still lose probability; infinity never binds.
    delta_high: largest divergence at which a token with A > 0 may still gain probability; infinity never binds.
    ratio_cap: largest importance weight.

  Returns:
    The gate. Its metrics: those of `clip_metrics` (tokens that are not kept) and `gate_metrics`; `actor/pg_clipfrac_lower`, kept tokens
    with a capped weight; `gate/divergence/mean` and `gate/divergence/max`, of D.

  Example:
    >>> old, now = jnp.log(jnp.array([[.01, .5]])), jnp.log(jnp.array([[.05, .7]]))
    >>> _, metrics = divergence_ball("tv")(now - old, jnp.ones((1, 2)), GateContext(now, old, jnp.ones((1, 2))))
    >>> metrics["gate/mean"].round(3).tolist()
    [[5.0, 0.0]]

  References:
    Rethinking the trust region in LLM reinforcement learning (DPPO), arXiv:2602.04879, 2026.
  """
  measure = DIVERGENCES[divergence] if isinstance(divergence, str) else divergence

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> TokenTerm:
    distance = measure(context.logprobs, context.old_logprobs)
    above, below = context.logprobs > context.old_logprobs, context.logprobs < context.old_logprobs
    outside = ((advantages > 0) & above & (distance > delta_high)) | ((advantages < 0) & below & (distance > delta_low))
    ratio = jnp.exp(log_ratio)
    coefficient = jnp.where(outside, 0, jnp.minimum(ratio, ratio_cap))
    return _score(coefficient, advantages, context), {
      **clip_metrics(outside, advantages, context),
      "actor/pg_clipfrac_lower": ((ratio > ratio_cap) & ~outside).astype(ratio.dtype),
      "gate/divergence/mean": distance,
      "gate/divergence/max": distance,
      **gate_metrics(coefficient),
    }

  return gate


def prefix_budget(delta: float = 0.15, w_min: float = 0.8, budget: float = 0.02) -> GateFn:
  """Trust region in probability that a sequence spends from its first token on.

  keep·r·A;  a token with A·(r − 1) > 0 is kept where Z_t ≤ min(delta, delta + b·W_{<t} − S_{<t}), all others always

  with D = |π − μ|, w_t = 1 − (1 − w_min)·(t − 1)/(T − 1), Z = w·D, the sums W_{<t} of w and S_{<t} of Z over the sequence's tokens
  before t, and b = clip(the 90 % quantile of D over the sequence, budget, 2·budget).

  Args:
    delta: largest weighted shift of a token's probability; 0.15 is for dense models, 0.20 for mixtures of experts.
    w_min: weight of the last token; the first has 1, so that early tokens, which shift the context of all others, have less room.
    budget: shift of probability per token that a sequence may spend; up to twice that where its shifts are large.

  Returns:
    The gate. Its metrics: those of `clip_metrics` (tokens that are not kept) and `gate_metrics`; `cppo/budget`, the mean of b over the
    sequences; `gate/divergence/mean` and `gate/divergence/max`, of D.

  References:
    CPPO (prefix budgets), arXiv:2606.10968, 2026.

  Note:
    Only counted tokens are tokens of the sequence. Sums and quantile are of one sequence, so no split of the batch changes them.
  """

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> TokenTerm:
    mask, segments = context.mask, context.segments
    counted = (mask > 0).astype(log_ratio.dtype)
    shift = binary_tv(context.logprobs, context.old_logprobs)
    num_before = before(jnp.add, counted, segments, 0.0)
    weight = 1 - (1 - w_min) * num_before / jnp.maximum(segment_count(counted, segments) - 1, 1)
    spent = before(jnp.add, counted * weight * shift, segments, 0.0)
    allowance = jnp.clip(segment_quantile(shift, mask, segments, 0.9), budget, 2 * budget)
    room = jnp.minimum(delta, delta + allowance * before(jnp.add, counted * weight, segments, 0.0) - spent)
    ratio = jnp.exp(log_ratio)
    ended = (advantages * jax.lax.stop_gradient(jnp.expm1(log_ratio)) > 0) & (weight * shift > room)
    kept = jnp.where(ended, 0, ratio)
    return kept * advantages, {
      **clip_metrics(ended, advantages, context),
      "cppo/budget": once_per_sequence(allowance, mask, segments),
      "gate/divergence/mean": shift,
      "gate/divergence/max": shift,
      **gate_metrics(kept),
    }

  return gate
