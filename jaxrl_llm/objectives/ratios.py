"""Ratios, the first slot of an objective: the level at which the policies are compared.

Each is a function `(log_ratio, mask, segments) -> log_ratio`. It takes the log-ratio z_t of each
token, the mask (1 for a token that counts) and the sequence of each token (None for one sequence
per row). It returns the log-ratio that the gate sees at each token. Everything stays in log space
until the gate takes the only `exp`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.objectives.prefixes import before
from jaxrl_llm.segments import segment_mean, segment_sum
from jaxrl_llm.types import RatioFn

LOG_RATIO_BOUND = 20.0
"""Bound on log-ratios in absolute value.

exp(±20) is 4.9e8 and 2.1e-9: far outside any trust region, yet finite in float32, even if squared.
"""


def compares(level: str | None) -> Callable[[RatioFn], RatioFn]:
  """Decorates a ratio with its level of comparison (see `types.Objective.ratio_level`)."""

  def decorate(ratio: RatioFn) -> RatioFn:
    ratio.level = level
    return ratio

  return decorate


def bounded_log_ratio(logprobs: Float[Array, "B T"], anchor_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """Computes the log-ratio of two policies at each token, bounded so that no later `exp` overflows.

  z = clip(log π − log π_anchor, −20, 20)

  Log-probabilities are in nats, and finite outside the mask (see `base.on_mask`). NaN stays NaN.

  Example:
    >>> bounded_log_ratio(jnp.array([[-1., -900.]]), jnp.array([[-3., -1.]])).tolist()
    [[2.0, -20.0]]

  Note:
    The gradient ends where the bound binds: a token with |log-ratio| > 20 no longer moves the
    policy.
  """
  return jnp.clip(logprobs - anchor_logprobs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@compares(None)
def no_ratio(log_ratio: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Makes no comparison: the ratio is 1, with the gradient of the token.

  log r_t = z_t − sg[z_t]

  Example:
    >>> no_ratio(jnp.array([[1., -3.]]), jnp.ones((1, 2)), None).tolist()
    [[0.0, 0.0]]

  References:
    Simple statistical gradient-following algorithms for connectionist reinforcement learning
      (REINFORCE), Williams, 1992.
  """
  del mask, segments
  return log_ratio - jax.lax.stop_gradient(log_ratio)


@compares("token")
def token_ratio(log_ratio: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Keeps each token's own ratio.

  log r_t = z_t

  References:
    Proximal Policy Optimization Algorithms, arXiv:1707.06347, 2017.
  """
  del mask, segments
  return log_ratio


@compares("sequence")
def sequence_ratio(log_ratio: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Gives every token the length-normalised ratio of its whole sequence.

  log s = (1/|y|) Σ_t z_t

  Example:
    >>> sequence_ratio(jnp.array([[1., 3., 9.]]), jnp.array([[1., 1., 0.]]), None).tolist()
    [[2.0, 2.0, 2.0]]

  References:
    Group Sequence Policy Optimization, arXiv:2507.18071, 2025, eq. 7.

  Note:
    s is the |y|-th root of the sequence's importance weight, and thus a low-variance but biased
    stand-in for it.
  """
  return segment_mean(log_ratio, mask, segments)


@compares("sequence")
def sequence_ratio_token_gradient(
  log_ratio: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None
) -> Float[Array, "B T"]:
  """Combines the value of the sequence ratio with the gradient of the token.

  log s_t = sg[log s] + z_t − sg[z_t]

  Each token of a sequence can then have its own advantage.

  References:
    Group Sequence Policy Optimization, arXiv:2507.18071, 2025, eq. 14.
  """
  stop = jax.lax.stop_gradient
  # Computes z − sg[z] first: it is exactly 0, so the value is exactly that of `sequence_ratio`.
  return stop(segment_mean(log_ratio, mask, segments)) + (log_ratio - stop(log_ratio))


@compares("product")
def product_ratio(log_ratio: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Gives every token the importance weight of its whole sequence.

  log ρ = clip(Σ_t z_t, −20, 20)

  Example:
    >>> product_ratio(jnp.array([[1., 3., 9.]]), jnp.array([[1., 1., 0.]]), None).tolist()
    [[4.0, 4.0, 4.0]]

  References:
    Back to Basics: Revisiting REINFORCE-style optimization (RLOO), arXiv:2402.14740, 2024.

  Note:
    The weight is unbiased, but its variance grows exponentially with the length. If the bound
    binds, the gradient of the whole sequence ends.
  """
  return jnp.clip(segment_sum(jnp.where(mask > 0, log_ratio, 0), segments), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@compares("token")
def prefix_min_ratio(log_ratio: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Multiplies each token's ratio by the smallest ratio before it.

  log r_t = clip(z_t + min_{j<t} z_j, −20, 20) over the counted tokens j of the sequence

  The first token has z_t. The minimum stands in for the product over the prefix and cannot explode.

  Example:
    >>> prefix_min_ratio(jnp.array([[1., -2., 3., -1.]]), jnp.array([[1., 1., 1., 1.]]), jnp.array([[1, 1, 1, 2]])).tolist()
    [[1.0, -1.0, 1.0, -1.0]]

  References:
    MinPRO, arXiv:2601.22718, 2026.
  """
  least = before(jnp.minimum, jnp.where(mask > 0, log_ratio, jnp.inf), segments, jnp.inf)
  return jnp.clip(log_ratio + jnp.where(jnp.isposinf(least), 0, least), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


RATIOS = {
  "none": no_ratio,
  "token": token_ratio,
  "sequence": sequence_ratio,
  "sequence_token_gradient": sequence_ratio_token_gradient,
  "product": product_ratio,
  "prefix_min": prefix_min_ratio,
}
"""Ratios by name."""
