"""First slot of an objective: at which level the policies are compared, as functions `(log_ratio, mask, segments) -> log_ratio`.

They take the log-ratio z_t of each token, the mask (1 where a token counts) and the sequence of each token (None for one sequence per
row), and give the log-ratio that the gate sees at each token. Everything stays in log space until the gate takes the one `exp`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.objectives.prefixes import before
from jaxrl_llm.segments import segment_mean, segment_sum
from jaxrl_llm.types import RatioFn

LOG_RATIO_BOUND = 20.0
"""exp(±20) is 4.9e8 and 2.1e-9: far outside any trust region, yet finite, squares included, in float32."""


def compares(level: str | None) -> Callable[[RatioFn], RatioFn]:
  """Decorates a ratio with the level at which it compares the policies (`types.Objective.ratio_level`)."""

  def decorate(ratio: RatioFn) -> RatioFn:
    ratio.level = level
    return ratio

  return decorate


def bounded_log_ratio(logprobs: Float[Array, "B T"], anchor_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
  """Log-ratio of two policies at each token, bounded so that no later `exp` overflows.

  z = clip(log π − log π_anchor, −20, 20)

  Log-probabilities are in nats, and finite off the mask (see `base.on_mask`). NaN stays NaN.

  Example:
    >>> bounded_log_ratio(jnp.array([[-1., -900.]]), jnp.array([[-3., -1.]])).tolist()
    [[2.0, -20.0]]

  Note:
    The bound kills the gradient where it binds: a token with |log-ratio| > 20 no longer moves the policy.
  """
  return jnp.clip(logprobs - anchor_logprobs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@compares(None)
def no_ratio(log_ratio: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """No comparison: the ratio is 1, with the gradient of the token.

  log r_t = z_t − sg[z_t]

  Example:
    >>> no_ratio(jnp.array([[1., -3.]]), jnp.ones((1, 2)), None).tolist()
    [[0.0, 0.0]]

  References:
    Simple statistical gradient-following algorithms for connectionist reinforcement learning (REINFORCE), Williams, 1992.
  """
  del mask, segments
  return log_ratio - jax.lax.stop_gradient(log_ratio)


@compares("token")
def token_ratio(log_ratio: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Each token keeps its own ratio.

  log r_t = z_t

  References:
    Proximal Policy Optimization Algorithms, arXiv:1707.06347, 2017.
  """
  del mask, segments
  return log_ratio


@compares("sequence")
def sequence_ratio(log_ratio: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Length-normalised ratio of the whole sequence, given to every token of it.

  log s = (1/|y|) Σ_t z_t

  Example:
    >>> sequence_ratio(jnp.array([[1., 3., 9.]]), jnp.array([[1., 1., 0.]]), None).tolist()
    [[2.0, 2.0, 2.0]]

  References:
    Group Sequence Policy Optimization, arXiv:2507.18071, 2025, eq. 7.

  Note:
    s is the |y|-th root of the sequence's importance weight, hence a low-variance but biased stand-in for it.
  """
  return segment_mean(log_ratio, mask, segments)


@compares("sequence")
def sequence_ratio_token_gradient(
  log_ratio: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None
) -> Float[Array, "B T"]:
  """Value of the sequence ratio, gradient of the token: lets each token of a sequence have its own advantage.

  log s_t = sg[log s] + z_t − sg[z_t]

  References:
    Group Sequence Policy Optimization, arXiv:2507.18071, 2025, eq. 14.
  """
  stop = jax.lax.stop_gradient
  # z − sg[z] first: it is exactly 0, so the value is exactly that of `sequence_ratio`.
  return stop(segment_mean(log_ratio, mask, segments)) + (log_ratio - stop(log_ratio))


@compares("product")
def product_ratio(log_ratio: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Importance weight of the whole sequence, given to every token of it.

  log ρ = clip(Σ_t z_t, −20, 20)

  Example:
    >>> product_ratio(jnp.array([[1., 3., 9.]]), jnp.array([[1., 1., 0.]]), None).tolist()
    [[4.0, 4.0, 4.0]]

  References:
    Back to Basics: Revisiting REINFORCE-style optimization (RLOO), arXiv:2402.14740, 2024.

  Note:
    Unbiased, but its variance grows exponentially with the length. The bound ends the gradient of the whole sequence where it binds.
  """
  return jnp.clip(segment_sum(jnp.where(mask > 0, log_ratio, 0), segments), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


@compares("token")
def prefix_min_ratio(log_ratio: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
  """Each token's ratio times the least ratio before it, a stand-in for the product of the prefix that cannot explode.

  log r_t = clip(z_t + min_{j<t} z_j, −20, 20) over the counted tokens j of the sequence;  the first token has z_t

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
"""First slots by name."""
