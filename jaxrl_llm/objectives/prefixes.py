"""What stands before a token in its own sequence, and quantiles over a sequence: for packed rows, without an array [B, T, T]."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.segments import segment_count


def before(
  combine: Callable[[Array, Array], Array], x: Float[Array, "B T"], segments: Int[Array, "B T"] | None, empty: float
) -> Float[Array, "B T"]:
  """All `x` that stand before each token in its own sequence, combined.

  x_1 ∘ x_2 ∘ … ∘ x_{t−1}

  Args:
    combine: an associative function of two arrays.
    x: any per-token quantity; put `empty` where a token does not count.
    segments: sequence of each token, contiguous, or None for one sequence per row.
    empty: what the first token gets, and the neutral element of `combine`.

  Example:
    >>> before(jnp.add, jnp.array([[1., 2., 4., 8., 16.]]), jnp.array([[1, 1, 1, 2, 2]]), 0.0).tolist()
    [[0.0, 1.0, 3.0, 0.0, 8.0]]
  """
  segments = jnp.zeros(x.shape, int) if segments is None else segments
  begins = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
  # Shifted by one and scanned with a reset at each beginning; a running total of the row would cancel digits between sequences.
  shifted = jnp.where(begins, empty, jnp.roll(x, 1, axis=1))

  def merge(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    return left[0] | right[0], jnp.where(right[0], right[1], combine(left[1], right[1]))

  return jax.lax.associative_scan(merge, (begins, shifted), axis=1)[1]


def segment_quantile(
  x: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None, q: float
) -> Float[Array, "B T"]:
  """The q-quantile of `x` over the counted tokens of each token's own sequence, given back to every token of it.

  Interpolated between the two nearest ranks, as `jnp.quantile` does by default. `x` is finite on the mask; a sequence without a counted
  token reads a large finite number.

  Example:
    >>> segment_quantile(jnp.array([[3., 1., 9., 2.]]), jnp.array([[1., 1., 0., 1.]]), jnp.array([[1, 1, 1, 2]]), 0.5).tolist()
    [[2.0, 2.0, 2.0, 2.0]]
  """
  segments = jnp.zeros(x.shape, int) if segments is None else segments
  # Sorted by sequence, then by value, what does not count last: a sequence's ranks begin behind all tokens of smaller segments.
  ids, ordered = jax.lax.sort((segments, jnp.where(mask > 0, x, jnp.finfo(x.dtype).max)), dimension=1, num_keys=2)
  start = jax.vmap(jnp.searchsorted)(ids, segments)
  rank = q * (segment_count(mask, segments) - 1)
  below = jnp.floor(rank)
  lower, upper = (jnp.take_along_axis(ordered, start + place.astype(start.dtype), axis=1) for place in (below, jnp.ceil(rank)))
  return lower + (rank - below) * (upper - lower)
