"""Second slot of an objective: how far a ratio may carry the policy. Factories of
`(log_ratio, advantages, context) -> (surrogate, metrics)`.

The surrogate is maximised. Its gradient is C·A·∇log_ratio; the coefficient C is reported as `gate/*`. A metric that concerns only some
tokens, e.g. those with a positive advantage, is NaN at the others.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.segments import once_per_sequence, segment_sum
from jaxrl_llm.types import GateContext, GateFn, TokenMetrics


def gate_metrics(coefficient: Float[Array, "B T"]) -> TokenMetrics:
  """Statistics of C, the weight of A·∇log_ratio in the gradient."""
  return {f"gate/{statistic}": coefficient for statistic in ("mean", "min", "max", "p99")}


def clip_metrics(
  clipped: Bool[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext | None
) -> TokenMetrics:
  """Fractions of tokens and of sequences whose gradient a clip has ended, by the sign of the advantage.

  Args:
    clipped: where a clip binds.
    advantages: of each token.
    context: where sequences begin and end; None leaves the fractions of sequences out.

  Returns:
    `actor/pg_clipfrac` (over all tokens), `_pos` and `_neg` (over those with A > 0 and A < 0); `actor/pg_clipfrac_seq`, `_seq_pos` and
    `_seq_neg`, the fractions of the sequences in which a clip binds somewhere.
  """
  everyone = jnp.ones_like(clipped)
  populations = {"": everyone, "_pos": advantages > 0, "_neg": advantages < 0}

  def fraction(found: Bool[Array, "B T"], population: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.where(population, found.astype(advantages.dtype), jnp.nan)

  metrics = {f"actor/pg_clipfrac{sign}": fraction(clipped, tokens) for sign, tokens in populations.items()}
  if context is not None:
    mask, segments = context.mask, context.segments

    def anywhere(found: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
      return segment_sum(jnp.where(found, mask, 0), segments) > 0

    for sign, tokens in populations.items():
      # A sequence with advantages of both signs belongs to both populations.
      in_sequences = fraction(anywhere(clipped & tokens), anywhere(tokens))
      metrics[f"actor/pg_clipfrac_seq{sign}"] = once_per_sequence(in_sequences, mask, segments)
  return metrics


def hard_clip(clip_low: float, clip_high: float, dual_clip: float | None = None) -> GateFn:
  """Clipped surrogate: no gain from leaving the band in the advantage's own direction.

  min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A), and at least dual_clip·A where A < 0

  Args:
    clip_low: how far below 1 the ratio may fall where A < 0; 1 never binds.
    clip_high: how far above 1 the ratio may rise where A > 0; infinity never binds.
    dual_clip: largest ratio that counts where A < 0, above 1; None leaves it unbounded, as in the paper.

  Returns:
    The gate. Its metrics: those of `clip_metrics` and `gate_metrics`, and `actor/pg_clipfrac_lower` (binding dual clips) where `dual_clip`
    is set.

  Example:
    >>> surrogate, metrics = hard_clip(0.25, 0.5)(jnp.log(jnp.array([[2., 2., .5, .5]])), jnp.array([[1., -1., 1., -1.]]))
    >>> surrogate.tolist()
    [[1.5, -2.0, 0.5, -0.75]]
    >>> metrics["actor/pg_clipfrac"].tolist()
    [[1.0, 0.0, 0.0, 1.0]]

  References:
    Proximal Policy Optimization Algorithms, arXiv:1707.06347, 2017, eq. 7.
    Mastering Complex Control in MOBA Games with Deep Reinforcement Learning (dual clip), arXiv:1912.09729, 2019.
  """

  def gate(
    log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext | None = None
  ) -> tuple[Float[Array, "B T"], TokenMetrics]:
    ratio = jnp.exp(log_ratio)
    positive, negative = advantages > 0, advantages < 0
    # Selecting the bound, and not jnp.minimum, because minimum halves the gradient at a tie: with a bound of 0 that is the on-policy point.
    upper = positive & (ratio > 1 + clip_high)
    lower = negative & (ratio < 1 - clip_low)
    bounded = jnp.where(upper, 1 + clip_high, jnp.where(lower, 1 - clip_low, ratio))
    metrics = clip_metrics(upper | lower, advantages, context)
    ended = upper | lower
    if dual_clip is not None:
      beyond = negative & (ratio > dual_clip)
      bounded = jnp.where(beyond, dual_clip, bounded)
      metrics["actor/pg_clipfrac_lower"] = beyond.astype(ratio.dtype)
      ended |= beyond
    return bounded * advantages, metrics | gate_metrics(jnp.where(ended, 0, ratio))

  return gate


def _sech2(x: Float[Array, "..."]) -> Float[Array, "..."]:
  """sech²(x/2) = 4σ(x)σ(−x), positive in float32 up to |x| ≈ 87 where 4p(1 − p) is 0 from 16.6 on, however the compiler expands σ."""
  tail = jnp.exp(-jnp.abs(x))
  return 4 * tail / jnp.square(1 + tail)


@jax.custom_jvp
def soft_ratio(log_ratio: Float[Array, "*shape"], tau: Float[Array, "..."]) -> Float[Array, "*shape"]:
  """A ratio that saturates smoothly instead of being cut.

  f(r) = (4/τ)·σ(τ(r − 1)),  ∂f/∂log r = r·sech²(τ(r − 1)/2)

  Args:
    log_ratio: log r, at most 20.
    tau: temperature τ > 0 at each token; the larger, the narrower the gate. Not differentiated.

  Returns:
    f(r), between 0 and 4/τ. f(1) is 2/τ and f'(1) is 1 for any τ.

  Example:
    >>> soft_ratio(jnp.zeros((1, 2)), jnp.array([[1., 2.]])).tolist()
    [[2.0, 1.0]]
  """
  return 4 / tau * jax.nn.sigmoid(tau * jnp.expm1(log_ratio))


@soft_ratio.defjvp
def _soft_ratio_jvp(primals, tangents):
  log_ratio, tau = primals
  # Autodiff of σ gives p(1 − p)·exp(log r), which underflows early and is 0·∞ for large ratios; this form does neither.
  coefficient = _sech2(tau * jnp.expm1(log_ratio)) * jnp.exp(log_ratio)
  return soft_ratio(log_ratio, tau), coefficient * tangents[0]


def soft_gate(tau_pos: float, tau_neg: float) -> GateFn:
  """Smooth gate: a token's weight decays with its distance from on-policy and never is cut.

  (4/τ)·σ(τ(r − 1))·A with τ = tau_pos where A > 0, else tau_neg;  coefficient of A·∇log π: r·w, w = sech²(τ(r − 1)/2)

  Args:
    tau_pos: temperature where A > 0.
    tau_neg: temperature where A ≤ 0.

  Returns:
    The gate. Its metrics: `sapo/gate_pos` and `sapo/gate_neg` (w over the tokens with A > 0 and A < 0), and `sapo/centred_loss`.

  Example:
    >>> surrogate, metrics = soft_gate(1.0, 2.0)(jnp.zeros((1, 2)), jnp.array([[1., -1.]]))
    >>> surrogate.tolist(), metrics["sapo/centred_loss"].tolist()
    ([[2.0, -1.0]], [[-1.0, 1.0]])

  References:
    Soft Adaptive Policy Optimization, arXiv:2511.20347, 2025.

  Note:
    On-policy the surrogate is 2A/τ, not A, so the raw loss of advantages that sum to zero is not zero. The centred loss, −(f − 2/τ + 1)·A,
    has the same gradient, is −A on-policy, and is the one to plot.
  """

  def gate(
    log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext | None = None
  ) -> tuple[Float[Array, "B T"], TokenMetrics]:
    del context
    positive, negative = advantages > 0, advantages < 0
    tau = jnp.where(positive, tau_pos, tau_neg).astype(log_ratio.dtype)
    distance = tau * jnp.expm1(log_ratio)
    openness = _sech2(distance)
    # f − 2/τ + 1 without the cancellation: 2σ(u) − 1 = tanh(u/2).
    centred = 1 + 2 / tau * jnp.tanh(distance / 2)
    return soft_ratio(log_ratio, tau) * advantages, {
      "sapo/gate_pos": jnp.where(positive, openness, jnp.nan),
      "sapo/gate_neg": jnp.where(negative, openness, jnp.nan),
      "sapo/centred_loss": -centred * advantages,
      **gate_metrics(openness * jnp.exp(log_ratio)),
    }

  return gate
