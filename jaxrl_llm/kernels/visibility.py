"""Visibility between the tokens of packed rows, as a mask or by block.

Backends that never hold a whole mask use blocks.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jaxrl_llm.kernels.stripes import Stripes

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Score of a key that is not seen. It is finite, so that the difference of two is 0, not NaN."""

_NO_SEGMENT = jnp.iinfo(jnp.int32).max


class Window(NamedTuple):
  """A sliding window over sequences, wherever their rows hold their tokens.

  Attributes:
    firsts: First position of its sequence that each query sees.
    positions: Position of each key in its sequence.
  """

  firsts: Int[Array, "*batch T"]
  positions: Int[Array, "*batch S"]

  def sees(self, queries: Any = ..., keys: Any = ...) -> Bool[Array, "*rows T S"]:
    """Returns which queries do not come too late for which keys, of some rows or blocks."""
    return self.positions[keys][..., None, :] >= self.firsts[queries][..., None]


class Rows(NamedTuple):
  """Packed rows, as attention sees them. A field that the backend does not read is never computed.

  Attributes:
    segments: Segment of each token, from 1; 0 is padding.
    prefixes: Segment of the same row that precedes a token's own, such as the prompt of a response;
      0 is none. None if no token has a prefix.
    mask: Boolean mask, True if a query may attend to a key.
    stripes: Order of the tokens if it is not that of the rows.
    window: Part of its sequence that each token sees; None if it sees all that comes before it.
  """

  segments: Int[Array, "B T"]
  prefixes: Int[Array, "B T"] | None
  mask: Bool[Array, "B T T"]
  stripes: Stripes | None = None
  window: Window | None = None


def within(rows: Rows, positions: Int[Array, "B T"], size: int | Int[Array, ""]) -> Rows:
  """Returns rows in which each token sees the last `size` tokens of its sequence, itself included.

  Example:
    The second token of a response sees itself, the first one, and the end of its prompt:

    >>> rows = packed(jnp.array([[1, 1, 2, 2]]), jnp.array([[0, 0, 1, 1]]))
    >>> within(rows, jnp.array([[0, 1, 2, 3]]), 3).mask[0, 3].astype(int).tolist()
    [0, 1, 1, 1]
  """
  window = Window(positions - size + 1, positions)
  return rows._replace(mask=rows.mask & window.sees(), window=window)


def packed(segments: Int[Array, "B T"], prefixes: Int[Array, "B T"] | None = None, stripes: Stripes | None = None) -> Rows:
  """Makes rows with causal attention within each sequence.

  The token in slot i sees that in slot j ≤ i if segmentᵢ = segmentⱼ or prefixᵢ = segmentⱼ.

  Args:
    segments: Segment of each token; see `Rows`. Padding sees nothing.
    prefixes: Prefix of each token; see `Rows`. Several sequences may share one.
    stripes: Order of the tokens; None for that of the rows.

  Example:
    One prompt of two tokens with two responses. The second response does not see the first:

    >>> segments, prefixes = jnp.array([[1, 1, 2, 3, 3]]), jnp.array([[0, 0, 1, 1, 1]])
    >>> packed(segments, prefixes).mask[0, 4].astype(int).tolist()
    [1, 1, 0, 1, 1]
  """
  slots = jnp.arange(segments.shape[1]) if stripes is None else jnp.asarray(stripes.slots)
  return Rows(segments, prefixes, visible(segments, prefixes, segments, slots[:, None] >= slots), stripes)


def visible(
  segments: Int[Array, "*batch T"], prefixes: Int[Array, "*batch T"] | None, keys: Int[Array, "*batch S"], causal: Bool[Array, "*rows T S"]
) -> Bool[Array, "*batch T S"]:
  """Returns which queries, given by segment and prefix, see which keys, given by segment.

  `causal` is True if the key does not come after the query.
  """
  keys = keys[..., None, :]
  seen = segments[..., None] == keys
  if prefixes is not None:
    seen |= prefixes[..., None] == keys
  return seen & (keys > 0) & causal


def blocks_seen(
  segments: Int[Array, "B I q"],
  prefixes: Int[Array, "B I q"] | None,
  keys: Int[Array, "B J k"],
  last: Int[Array, " I"],
  window: Window | None = None,
) -> Bool[Array, "B I J"]:
  """Returns which blocks of keys hold a key that a block of queries sees.

  Compares ranges of segments, not every pair. The result is exact if segments ascend along a row;
  otherwise it may include further blocks, but misses none. Arguments are those of `visible`, cut
  into blocks; keys are in the order of the row, and `last` is the last slot of the row that a block
  of queries holds. A window is cut as they are.
  """
  first, highest = jnp.where(keys > 0, keys, _NO_SEGMENT).min(-1)[:, None], keys.max(-1)[:, None]

  def meets(ids):
    return (jnp.where(ids > 0, ids, _NO_SEGMENT).min(-1)[..., None] <= highest) & (first <= ids.max(-1)[..., None])

  seen = meets(segments)
  if prefixes is not None:
    seen |= meets(prefixes)
  seen &= last[:, None] >= jnp.arange(keys.shape[1]) * keys.shape[2]
  if window is None:
    return seen
  earliest = jnp.where(segments > 0, window.firsts, _NO_SEGMENT).min(-1)
  return seen & (jnp.where(keys > 0, window.positions, -_NO_SEGMENT).max(-1)[:, None] >= earliest[..., None])


def padded(x: Shaped[Array, "B T ..."], block: int) -> Shaped[Array, "B S ..."]:
  """Pads rows with zeros to a whole number of blocks; nothing sees segment 0."""
  return jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2))
