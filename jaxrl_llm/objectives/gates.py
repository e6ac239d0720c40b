"""Gates, the second slot of an objective: limits on how far a ratio may move the policy.

Each factory returns a function `(log_ratio, advantages, context) -> (surrogate, metrics)`.

The surrogate is maximised. Its gradient is C·A·∇log_ratio, and `gate/*` reports the coefficient C.
A metric that concerns only some tokens, e.g. those with a positive advantage, is NaN at the others.
Gates that weigh the score, ∇log π, are in `score_gates`.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.objectives.gate_statistics import clip_metrics, gate_metrics
from jaxrl_llm.objectives.prefixes import discounted_rest
from jaxrl_llm.objectives.score_gates import capped_weight, divergence_ball, gamma_weight, prefix_budget, quadratic_pull, tapered_weight
from jaxrl_llm.segments import segment_mean
from jaxrl_llm.types import GateContext, GateFn, TokenTerm


def unclipped() -> GateFn:
  """Applies plain importance sampling: r·A.

  Returns:
    The gate, with the metrics of `gate_metrics`.

  Example:
    >>> unclipped()(jnp.log(jnp.array([[2., .5]])), jnp.array([[1., -1.]]))[0].tolist()
    [[2.0, -0.5]]
  """

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext | None = None) -> TokenTerm:
    del context
    ratio = jnp.exp(log_ratio)
    return ratio * advantages, gate_metrics(ratio)

  return gate


def hard_clip(clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> GateFn:
  """Clips the surrogate: leaving the band in the direction of the advantage gains nothing.

  min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A), and at least dual_clip·A if A < 0

  Args:
    clip_low: Width of the band below 1, for tokens with A < 0; a width of 1 never binds.
    clip_high: Width of the band above 1, for tokens with A > 0; an infinite width never binds.
    dual_clip: Largest ratio that counts for tokens with A < 0, above 1; None leaves the ratio
      unbounded, as in PPO.

  Returns:
    The gate, with the metrics of `clip_metrics` and `gate_metrics`, and with
    `actor/pg_clipfrac_lower` (binding dual clips) if `dual_clip` is set.

  Example:
    >>> surrogate, metrics = hard_clip(0.25, 0.5)(jnp.log(jnp.array([[2., 2., .5, .5]])), jnp.array([[1., -1., 1., -1.]]))
    >>> surrogate.tolist()
    [[1.5, -2.0, 0.5, -0.75]]
    >>> metrics["actor/pg_clipfrac"].tolist()
    [[1.0, 0.0, 0.0, 1.0]]

  References:
    Proximal Policy Optimization Algorithms, arXiv:1707.06347, 2017, eq. 7.
    Mastering Complex Control in MOBA Games with Deep Reinforcement Learning (dual clip),
      arXiv:1912.09729, 2019.
  """

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext | None = None) -> TokenTerm:
    ratio = jnp.exp(log_ratio)
    positive, negative = advantages > 0, advantages < 0
    # Selects the bound instead of using jnp.minimum, which halves the gradient at a tie. With a
    # bound of 0, the on-policy point is a tie.
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


def without_selected(gate: GateFn) -> GateFn:
  """Wraps a gate to leave out the tokens that the objective selects.

  0 at selected tokens, else the gate's surrogate

  Returns:
    The gate, with the metrics of the wrapped one and `actor/selected_fraction`.
  """

  def wrapped(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> TokenTerm:
    surrogate, metrics = gate(log_ratio, advantages, context)
    selected = context.selected > 0
    metrics = {name: jnp.where(selected, 0, x) if name.startswith("gate/") else x for name, x in metrics.items()}
    return jnp.where(selected, 0, surrogate), metrics | {"actor/selected_fraction": context.selected}

  return wrapped


def pulled_selected(cov_kl_coef: float = 1.0) -> GateFn:
  """Applies plain importance sampling, and pulls selected tokens back to the old policy.

  r·A, minus cov_kl_coef·|log r| at selected tokens

  Args:
    cov_kl_coef: Loss per nat of distance from the old policy, at selected tokens.

  Returns:
    The gate, with the metrics of `gate_metrics` for r, and `actor/selected_fraction`.
  """

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> TokenTerm:
    ratio = jnp.exp(log_ratio)
    # The slope of jnp.abs at 0 is 1; on-policy there is no pull.
    distance = jax.lax.stop_gradient(jnp.sign(log_ratio)) * log_ratio
    surrogate = ratio * advantages - cov_kl_coef * context.selected * distance
    return surrogate, gate_metrics(ratio) | {"actor/selected_fraction": context.selected}

  return gate


def _sech2(x: Float[Array, "..."]) -> Float[Array, "..."]:
  """Computes sech²(x/2) = 4σ(x)σ(−x) without early underflow.

  The result is positive in float32 up to |x| ≈ 87, however the compiler expands σ. With p = σ(x),
  4p(1 − p) is 0 from |x| ≈ 16.6 on.
  """
  tail = jnp.exp(-jnp.abs(x))
  return 4 * tail / jnp.square(1 + tail)


@jax.custom_jvp
def soft_ratio(log_ratio: Float[Array, "*shape"], tau: Float[Array, "..."]) -> Float[Array, "*shape"]:
  """Saturates a ratio smoothly instead of clipping it.

  f(r) = (4/τ)·σ(τ(r − 1)),  ∂f/∂log r = r·sech²(τ(r − 1)/2)

  Args:
    log_ratio: Log-ratio log r, at most 20.
    tau: Temperature τ > 0 at each token; the larger, the narrower the gate. Not differentiated.

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
  # Autodiff of σ gives p(1 − p)·exp(log r), which underflows early and is 0·∞ for large ratios.
  # This form avoids both.
  coefficient = _sech2(tau * jnp.expm1(log_ratio)) * jnp.exp(log_ratio)
  return soft_ratio(log_ratio, tau), coefficient * tangents[0]


def soft_gate(tau_pos: float = 1.0, tau_neg: float = 1.05) -> GateFn:
  """Decays a token's weight smoothly with its distance from on-policy, without ever cutting it.

  (4/τ)·σ(τ(r − 1))·A with τ = tau_pos if A > 0, else tau_neg
  coefficient of A·∇log π: r·w, w = sech²(τ(r − 1)/2)

  Args:
    tau_pos: Temperature of tokens with A > 0; the larger, the narrower the gate.
    tau_neg: Temperature of tokens with A ≤ 0.

  Returns:
    The gate, with the metrics `sapo/gate_pos` and `sapo/gate_neg` (w over the tokens with A > 0 and
    A < 0), `sapo/centred_loss`, and those of `gate_metrics`.

  Example:
    >>> surrogate, metrics = soft_gate(1.0, 2.0)(jnp.zeros((1, 2)), jnp.array([[1., -1.]]))
    >>> surrogate.tolist(), metrics["sapo/centred_loss"].tolist()
    ([[2.0, -1.0]], [[-1.0, 1.0]])

  References:
    Soft Adaptive Policy Optimization, arXiv:2511.20347, 2025.

  Note:
    On-policy the surrogate is 2A/τ, not A, so the raw loss of advantages that sum to zero is not
    zero. The centred loss, −(f − 2/τ + 1)·A, has the same gradient, is −A on-policy, and is the one
    to plot.
  """

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext | None = None) -> TokenTerm:
    del context
    positive, negative = advantages > 0, advantages < 0
    tau = jnp.where(positive, tau_pos, tau_neg).astype(log_ratio.dtype)
    distance = tau * jnp.expm1(log_ratio)
    openness = _sech2(distance)
    # f − 2/τ + 1 without cancellation: 2σ(u) − 1 = tanh(u/2).
    centred = 1 + 2 / tau * jnp.tanh(distance / 2)
    return soft_ratio(log_ratio, tau) * advantages, {
      "sapo/gate_pos": jnp.where(positive, openness, jnp.nan),
      "sapo/gate_neg": jnp.where(negative, openness, jnp.nan),
      "sapo/centred_loss": -centred * advantages,
      **gate_metrics(openness * jnp.exp(log_ratio)),
    }

  return gate


def geometric_clip(log_clip_low: float = 0.4, log_clip_high: float = 0.4) -> GateFn:
  """Clips each token in log space and uses the geometric mean over the sequence as the ratio.

  g·A,  log g = (1/|y|) Σ_t z̃_t
  z̃ = min(z, log_clip_high) if A > 0, max(z, −log_clip_low) if A < 0

  Args:
    log_clip_low: Width of the band below a log-ratio of 0, for tokens with A < 0; an infinite width
      never binds.
    log_clip_high: Width of the band above a log-ratio of 0, for tokens with A > 0; an infinite
      width never binds.

  Returns:
    The gate, for token log-ratios, with the metrics of `clip_metrics` (over tokens) and
    `gate_metrics`. C is g on tokens that are not clipped.

  Example:
    >>> context = GateContext(*2 * [jnp.zeros((1, 2))], jnp.ones((1, 2)))
    >>> surrogate, metrics = geometric_clip(0.5, 0.5)(jnp.array([[1., -0.5]]), jnp.ones((1, 2)), context)
    >>> surrogate.tolist(), metrics["gate/mean"].tolist()
    ([[1.0, 1.0]], [[0.0, 1.0]])

  References:
    Geometric-Mean Policy Optimization, arXiv:2507.20673, 2025.

  Note:
    The coefficient assumes one advantage per sequence. If advantages differ within a sequence, the
    gradient of a token has their mean.
  """

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> TokenTerm:
    upper = (advantages > 0) & (log_ratio > log_clip_high)
    lower = (advantages < 0) & (log_ratio < -log_clip_low)
    bounded = jnp.where(upper, log_clip_high, jnp.where(lower, -log_clip_low, log_ratio))
    mean = jnp.exp(segment_mean(bounded, context.mask, context.segments))
    metrics = clip_metrics(upper | lower, advantages, context) | gate_metrics(jnp.where(upper | lower, 0, mean))
    return mean * advantages, metrics

  return gate


def gaussian_gate(sigma: float = 1.0, alpha: float = 0.3, beta: float = 0.03) -> GateFn:
  """Fades out tokens that overshoot, with more room for rare tokens and positive advantages.

  sg[w]·r·A,  w = exp(−(r − 1)²/(2s²)) if A·(r − 1) > 0, else 1
  s = sigma·π_old^(−alpha)·(1 + beta·|A|)^(±1), with the plus sign if A > 0

  Args:
    sigma: Width of the gate in units of the ratio, for a token of probability 1 and a small
      advantage.
    alpha: Exponent by which the gate widens for rare tokens; 0 gives all tokens the same width.
    beta: Relative widening of the gate per unit of positive advantage, and narrowing per unit of
      negative advantage.

  Returns:
    The gate, with the metrics `maspo/gate_pos` and `maspo/gate_neg` (w over the tokens with A > 0
    and A < 0), and those of `gate_metrics`.

  Example:
    >>> context = GateContext(*2 * [jnp.zeros((1, 2))], jnp.ones((1, 2)))
    >>> surrogate, _ = gaussian_gate(1.0, 0.0, 0.0)(jnp.log(jnp.array([[2., .5]])), jnp.ones((1, 2)), context)
    >>> surrogate.round(4).tolist()
    [[1.2131, 0.5]]

  References:
    MASPO, arXiv:2602.17550, 2026.
  """

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> TokenTerm:
    positive, negative = advantages > 0, advantages < 0
    # Uses 1/s instead of s: π_old^alpha is at most 1, but π_old^(−alpha) overflows. 1 + beta·|A| is
    # positive for any advantage.
    widening = 1 + beta * jnp.abs(advantages)
    inverse_width = jnp.exp(alpha * jnp.minimum(context.old_logprobs, 0)) * jnp.where(negative, widening, 1 / widening) / sigma
    excess = jax.lax.stop_gradient(jnp.expm1(log_ratio))
    overshoots = (positive & (excess > 0)) | (negative & (excess < 0))
    weight = jnp.where(overshoots, jnp.exp(-jnp.square(excess * inverse_width) / 2), 1)
    ratio = jnp.exp(log_ratio)
    return weight * ratio * advantages, {
      "maspo/gate_pos": jnp.where(positive, weight, jnp.nan),
      "maspo/gate_neg": jnp.where(negative, weight, jnp.nan),
      **gate_metrics(weight * ratio),
    }

  return gate


def future_gate(
  clip_low: float = 0.2,
  clip_high: float = 0.28,
  dual_clip: float | None = 10.0,
  half_life: float = 32.0,
  future_cap: float = 0.2,
  safe_ratio: float = 4.0,
) -> GateFn:
  """Clips the surrogate, and weighs a token more if the policy has favoured what follows it.

  sg[w_t]·hard_clip(r_t, A_t),  w_t = clip(e^{F_t}, 1, 1 + future_cap)
  F_t = Σ_{j≥t} γ^(j−t)·log r_j over the sequence,  γ = 2^(−1/half_life)

  Two exceptions keep outliers out: a token with r > dual_clip adds nothing to F, and w = 1 at
  tokens with A < 0 and r > safe_ratio.

  Args:
    clip_low: Width of the band below 1, for tokens with A < 0.
    clip_high: Width of the band above 1, for tokens with A > 0.
    dual_clip: Largest ratio that counts for tokens with A < 0, and that adds to F; None for no such
      bound.
    half_life: Distance at which a later token counts half, in tokens.
    future_cap: Largest weight, less 1.
    safe_ratio: Largest ratio at which a token with A < 0 may have a weight above 1.

  Returns:
    The gate, with the metrics of `hard_clip`, whose C includes the weight, and `fipo/weight/mean`,
    `fipo/weight/max` and `fipo/future_kl`, of w and F.

  Example:
    >>> context = GateContext(*2 * [jnp.zeros((1, 3))], jnp.ones((1, 3)))
    >>> _, metrics = future_gate(half_life=1.0, future_cap=0.5)(jnp.array([[0., 0., .2]]), jnp.ones((1, 3)), context)
    >>> metrics["fipo/weight/mean"].round(3).tolist()
    [[1.051, 1.105, 1.221]]

  References:
    FIPO: Eliciting Deep Reasoning with Future-KL Influenced Policy Optimization, arXiv:2603.19835,
      2026.
  """
  clip, discount = hard_clip(clip_low, clip_high, dual_clip), 2 ** (-1 / half_life)

  def gate(log_ratio: Float[Array, "B T"], advantages: Float[Array, "B T"], context: GateContext) -> TokenTerm:
    surrogate, metrics = clip(log_ratio, advantages, context)
    moved = jax.lax.stop_gradient(log_ratio)
    ratio = jnp.exp(moved)
    added = jnp.where(context.mask > 0, moved if dual_clip is None else jnp.where(ratio > dual_clip, 0, moved), 0)
    future = discounted_rest(added, context.mask, context.segments, discount)
    # Clips F instead of its exponential, which overflows.
    weight = jnp.exp(jnp.clip(future, 0, jnp.log1p(future_cap)))
    weight = jnp.where((advantages < 0) & (ratio > safe_ratio), 1, weight)
    metrics = {name: weight * x if name.startswith("gate/") else x for name, x in metrics.items()}
    return weight * surrogate, metrics | {"fipo/weight/mean": weight, "fipo/weight/max": weight, "fipo/future_kl": future}

  return gate


GATES = {
  "none": unclipped,
  "hard": hard_clip,
  "soft": soft_gate,
  "geometric": geometric_clip,
  "gaussian": gaussian_gate,
  "capped": capped_weight,
  "gamma": gamma_weight,
  "tv_ball": functools.partial(divergence_ball, "tv"),
  "kl_ball": functools.partial(divergence_ball, "kl", delta_low=0.05, delta_high=0.05),
  "prefix_budget": prefix_budget,
  "quadratic": quadratic_pull,
  "tapered": tapered_weight,
  "future": future_gate,
}
"""Gate factories by name; the defaults of their settings are the constants of the papers."""
