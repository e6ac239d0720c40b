"""Gates that weigh the score, ∇log π, and gates that bound the shift in probability.

Each factory returns a function `(log_ratio, advantages, context) -> (surrogate, metrics)`, the
second slot of an objective.

The surrogate of most of them is sg[C]·A·log π. Its gradient is C·A·∇log π at each token,
whatever the ratio slot computes. Unlike that of other gates, it does not end at the bound of the
log-ratio. Conditions select the tokens to leave out, never those to keep: a comparison with a NaN
is false, so the token stays in and the NaN reaches the loss.
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
"""Minus the logarithm of a probability that is closer to 1 than any float."""


def _score(coefficient: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> Float[Array, "B T"]:
  """Returns the surrogate sg[C]·A·log π."""
  return jax.lax.stop_gradient(coefficient) * advantages * context.logprobs


def _probability(logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """Converts log-probabilities to probabilities of at most 1, without gradient."""
  return jnp.exp(jnp.minimum(jax.lax.stop_gradient(logprobs), 0))


def capped_weight(clip_high: float = 4.0, clip_low: float = 1.0) -> GateFn:
  """Caps the importance weight: a large ratio counts less, and no token loses its gradient.

  sg[clip(r, 1 − clip_low, 1 + clip_high)]·A·log π

  Args:
    clip_high: Distance of the cap above 1: the cap is 1 + clip_high, by default 5. Infinity never
      binds.
    clip_low: Distance of the smallest weight below 1; 1 never binds.

  Returns:
    The gate, with the metrics of `clip_metrics` and `gate_metrics`. A clip that binds bounds the
    weight but does not end the gradient.

  Example:
    >>> logprobs = jnp.log(jnp.array([[.5, .5]]))
    >>> context = GateContext(logprobs, logprobs, jnp.ones((1, 2)))
    >>> _, metrics = capped_weight(4.0)(jnp.log(jnp.array([[8., .5]])), jnp.ones((1, 2)), context)
    >>> metrics["gate/max"].tolist(), metrics["actor/pg_clipfrac"].tolist()
    ([[5.0, 0.5]], [[1.0, 0.0]])

  References:
    MiniMax-M1 (CISPO), arXiv:2506.13585, 2025.

  Note:
    verl's `clip_ratio_high` is this clip_high; TRL's `epsilon_high` is the cap itself, 1 +
    clip_high.
  """

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> TokenTerm:
    ratio = jnp.exp(log_ratio)
    capped = (ratio > 1 + clip_high) | (ratio < 1 - clip_low)
    coefficient = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return _score(coefficient, advantages, context), clip_metrics(capped, advantages, context) | gate_metrics(coefficient)

  return gate


def tapered_weight(ratio_cap: float = 1.0) -> GateFn:
  """Weighs good tokens as fresh ones, and bad ones less, the further the policy has left them.

  sg[C]·A·log π,  C = 1 if A ≥ 0, else min(ρ, ratio_cap)

  Args:
    ratio_cap: Largest importance weight of a token with A < 0.

  Returns:
    The gate, with the metrics of `clip_metrics` (counting tokens with a capped weight) and
    `gate_metrics`, and `topr/weight_neg`, C over the tokens with A < 0.

  Example:
    >>> logprobs = jnp.log(jnp.array([[.5, .5, .5]]))
    >>> context = GateContext(logprobs, logprobs, jnp.ones((1, 3)))
    >>> _, metrics = tapered_weight()(jnp.log(jnp.array([[4., 4., .5]])), jnp.array([[1., -1., -1.]]), context)
    >>> metrics["gate/mean"].tolist()
    [[1.0, 1.0, 0.5]]

  References:
    Tapered Off-Policy REINFORCE (TOPR), arXiv:2503.14286, 2025.
  """

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> TokenTerm:
    ratio, negative = jnp.exp(log_ratio), advantages < 0
    # A NaN of the ratio stays where the weight is 1.
    coefficient = jnp.where(negative | jnp.isnan(ratio), jnp.minimum(ratio, ratio_cap), 1)
    return _score(coefficient, advantages, context), {
      **clip_metrics(negative & (ratio > ratio_cap), advantages, context),
      "topr/weight_neg": jnp.where(negative, coefficient, jnp.nan),
      **gate_metrics(coefficient),
    }

  return gate


def quadratic_pull(pull: float = 0.05) -> GateFn:
  """Pulls every token back to the old policy, in proportion to its log-ratio.

  A·log π − (pull/2)·(log r)²

  Args:
    pull: Loss per squared nat of log-ratio, halved.

  Returns:
    The gate, with the metrics of `gate_metrics` for C = 1 − pull·log r/A, 1 where A is 0, and
    `gate/pull`, the square with its factor.

  Example:
    >>> logprobs = jnp.log(jnp.array([[.5, .5]]))
    >>> context = GateContext(logprobs, logprobs, jnp.ones((1, 2)))
    >>> _, metrics = quadratic_pull(0.5)(jnp.array([[1., 0.]]), jnp.ones((1, 2)), context)
    >>> metrics["gate/min"].tolist()
    [[0.5, 1.0]]

  References:
    Offline Regularised Reinforcement Learning for Large Language Models Alignment (DRO),
      arXiv:2405.19107, 2024.
  """

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> TokenTerm:
    square = pull / 2 * jnp.square(log_ratio)
    moves = advantages != 0
    coefficient = jnp.where(moves, 1 - pull * log_ratio / jnp.where(moves, advantages, 1), 1)
    metrics = gate_metrics(coefficient) | {"gate/pull": square}
    return advantages * context.logprobs - square, metrics

  return gate


def gamma_weight(k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0) -> GateFn:
  """Weighs tokens by the shape of a gamma density: 1 on-policy, 0 far away on both sides.

  sg[φ(ρ)]·A·log π,  φ(ρ) = ρ^k·e^{λ(1 − ρ)}, with the first pair if A > 0, else the second

  Args:
    k_pos: Exponent k of tokens with A > 0; the weight is largest at ρ = k/λ.
    lambda_pos: Rate λ of tokens with A > 0.
    k_neg: Exponent k of tokens with A ≤ 0.
    lambda_neg: Rate λ of tokens with A ≤ 0.

  Returns:
    The gate, with the metrics `vespo/phi_pos` and `vespo/phi_neg` (φ over the tokens with A > 0 and
    A < 0), and those of `gate_metrics`.

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
  """Computes |π − μ|, the total variation of "this token or another", from log π and log μ.

  It never exceeds the total variation over the whole vocabulary.
  """
  return jnp.abs(_probability(logprobs) - _probability(old_logprobs))


def binary_kl(logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """Computes KL(μ‖π) of "this token or another" in nats, from log π and log μ.

  μ·log(μ/π) + (1 − μ)·log((1 − μ)/(1 − π))

  Example:
    >>> binary_kl(jnp.log(jnp.array([[.5]])), jnp.array([[0.]])).round(4).tolist()
    [[0.6931]]
  """

  def log_other(log_p: Float[Array, "B T"]) -> Float[Array, "B T"]:
    # log(1 − p), in the form that keeps its digits on each side. If p is close to 1, 1 − p itself
    # has none left.
    return jnp.where(log_p > -0.5, jnp.log(-jnp.expm1(log_p)), jnp.log1p(-jnp.exp(log_p)))

  # Clamps the input: a probability of 1 gives a large but finite divergence, and 0·(−∞) cannot
  # arise.
  log_pi, log_mu = (jnp.clip(jax.lax.stop_gradient(x), -1e4, -SMALLEST) for x in (logprobs, old_logprobs))
  return jnp.exp(log_mu) * (log_mu - log_pi) - jnp.expm1(log_mu) * (log_other(log_mu) - log_other(log_pi))


DIVERGENCES = {"tv": binary_tv, "kl": binary_kl}
"""Divergences of the current policy from the anchor at the sampled token.

Each is a function of log π and log μ.
"""


def divergence_ball(
  divergence: str | Callable[[Array, Array], Array] = "tv", delta_low: float = 0.15, delta_high: float = 0.15, ratio_cap: float = 20.0
) -> GateFn:
  """Ends the gradient of tokens that have left a trust region in divergence and would move further.

  sg[min(r, ratio_cap)·keep]·A·log π
  keep = 0 if A > 0, π > μ, D > delta_high or if A < 0, π < μ, D > delta_low, else 1

  Args:
    divergence: Divergence D, as a key of `DIVERGENCES` or a function of (log π, log μ).
    delta_low: Largest divergence at which a token with A < 0 may still lose probability; infinity
      never binds.
    delta_high: Largest divergence at which a token with A > 0 may still gain probability; infinity
      never binds.
    ratio_cap: Largest importance weight.

  Returns:
    The gate, with the metrics of `clip_metrics` (counting tokens that are not kept) and
    `gate_metrics`; `actor/pg_clipfrac_lower`, counting kept tokens with a capped weight; and
    `gate/divergence/mean` and `gate/divergence/max`, of D.

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
  """Bounds the shift in probability that a sequence spends from its first token on.

  keep·r·A
  keep = 0 if A·(r − 1) > 0 and Z_t > min(delta, delta + b·W_{<t} − S_{<t}), else 1

  Here D = |π − μ|, w_t = 1 − (1 − w_min)·(t − 1)/(T − 1) and Z = w·D. W_{<t} and S_{<t} are the
  sums of w and of Z over the sequence's tokens before t. b = clip(the 90 % quantile of D over the
  sequence, budget, 2·budget).

  Args:
    delta: Largest weighted shift of a token's probability; 0.15 is for dense models, 0.20 for
      mixtures of experts.
    w_min: Weight of the last token. The first has weight 1, so that early tokens, which shift the
      context of all others, have less room.
    budget: Shift of probability per token that a sequence may spend; up to twice as much if its
      shifts are large.

  Returns:
    The gate, with the metrics of `clip_metrics` (counting tokens that are not kept) and
    `gate_metrics`; `cppo/budget`, the mean of b over the sequences; and `gate/divergence/mean` and
    `gate/divergence/max`, of D.

  References:
    CPPO (prefix budgets), arXiv:2606.10968, 2026.

  Note:
    Only counted tokens belong to the sequence. The sums and the quantile are per sequence, so no
    split of the batch changes them.
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
