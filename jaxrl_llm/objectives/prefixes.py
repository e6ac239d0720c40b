"""Prefixes, suffixes and quantiles of the sequences of packed rows, without an array [B, T, T]."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.segments import segment_count


def before(
  combine: Callable[[Array, Array], Array], x: Float[Array, "B T"], segments: Int[Array, "B T"] | None, empty: float
) -> Float[Array, "B T"]:
  """Combines the values of `x` at all tokens before each token in its own sequence.

  x_1 ∘ x_2 ∘ … ∘ x_{t−1}

  Args:
    combine: Associative function of two arrays.
    x: Any per-token quantity, with `empty` at tokens that do not count.
    segments: Sequence of each token, contiguous, or None for one sequence per row.
    empty: Result for the first token, and the neutral element of `combine`.

  Example:
    >>> before(jnp.add, jnp.array([[1., 2., 4., 8., 16.]]), jnp.array([[1, 1, 1, 2, 2]]), 0.0).tolist()
    [[0.0, 1.0, 3.0, 0.0, 8.0]]
  """
  segments = jnp.zeros(x.shape, int) if segments is None else segments
  begins = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
  # Shifts by one and scans with a reset at each beginning. A running total over the row would
  # cancel digits between sequences.
  shifted = jnp.where(begins, empty, jnp.roll(x, 1, axis=1))

  def merge(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
    return left[0] | right[0], jnp.where(right[0], right[1], combine(left[1], right[1]))

  return jax.lax.associative_scan(merge, (begins, shifted), axis=1)[1]


def discounted_rest(
  x: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None, discount: float
) -> Float[Array, "B T"]:
  """Sums `x` from each token to the end of its own sequence, discounted for each counted token.

  x_t + γ·x_{t+1} + γ²·x_{t+2} + …  over the counted tokens

  Args:
    x: Any per-token quantity, 0 at tokens that do not count.
    mask: 1 if a token counts; the others do not add to a distance.
    segments: Sequence of each token, contiguous, or None for one sequence per row.
    discount: Discount γ.

  Example:
    >>> x, mask = jnp.array([[1., 0., 2., 4., 8.]]), jnp.array([[1., 0., 1., 1., 1.]])
    >>> discounted_rest(x, mask, jnp.array([[1, 1, 1, 1, 2]]), 0.5).tolist()
    [[3.0, 4.0, 4.0, 4.0, 8.0]]
  """
  segments = jnp.zeros(x.shape, int) if segments is None else segments
  ends = jnp.concatenate([segments[:, 1:] != segments[:, :-1], jnp.ones_like(segments[:, :1], bool)], axis=1)
  decay = jnp.where(mask > 0, discount, 1).astype(x.dtype)

  # The scan runs from the end of the row, so `later` is to the right of `token`. A sum over the row
  # with a decay of 0 at each end would carry the NaN of one sequence into the one before it.
  def merge(later: tuple[Array, Array, Array], token: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    total = jnp.where(token[0], token[2], token[2] + token[1] * later[2])
    return later[0] | token[0], later[1] * token[1], total

  return jax.lax.associative_scan(merge, (ends, decay, x), reverse=True, axis=1)[2]


def segment_quantile(
  x: Float[Array, "B T"], mask: Float[Array, "B T"], segments: Int[Array, "B T"] | None, q: float
) -> Float[Array, "B T"]:
  """Gives every token the q-quantile of `x` over the counted tokens of its own sequence.

  The quantile interpolates between the two nearest ranks, as `jnp.quantile` does by default. `x`
  must be finite on the mask. A sequence without a counted token gets a large finite number.

  Example:
    >>> segment_quantile(jnp.array([[3., 1., 9., 2.]]), jnp.array([[1., 1., 0., 1.]]), jnp.array([[1, 1, 1, 2]]), 0.5).tolist()
    [[2.0, 2.0, 2.0, 2.0]]
  """
  segments = jnp.zeros(x.shape, int) if segments is None else segments
  # Sorts by sequence, then by value, with uncounted tokens last. The ranks of a sequence begin
  # after all tokens of smaller segments.
  ids, ordered = jax.lax.sort((segments, jnp.where(mask > 0, x, jnp.finfo(x.dtype).max)), dimension=1, num_keys=2)
  start = jax.vmap(jnp.searchsorted)(ids, segments)
  rank = q * (segment_count(mask, segments) - 1)
  below = jnp.floor(rank)
  lower, upper = (jnp.take_along_axis(ordered, start + place.astype(start.dtype), axis=1) for place in (below, jnp.ceil(rank)))
  return lower + (rank - below) * (upper - lower)
