"""Which tokens of packed rows see which: as a mask, and block by block for what never holds one."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
"""The score of a key that is not seen. Finite, so that a difference of two of them is 0 and not a NaN."""

_NO_SEGMENT = jnp.iinfo(jnp.int32).max


class Rows(NamedTuple):
  """Packed rows, as attention sees them. Whatever of them a backend does not read is never computed.

  Attributes:
    segments: sequence of each token, from 1; 0 is padding.
    prefixes: the segment of its row that stands before a token's own, such as the prompt of a response; 0 is none. None: there are none.
    mask: True where a query may attend to a key.
  """

  segments: Int[Array, "B T"]
  prefixes: Int[Array, "B T"] | None
  mask: Bool[Array, "B T T"]


def packed(segments: Int[Array, "B T"], prefixes: Int[Array, "B T"] | None = None) -> Rows:
  """Causal attention within each sequence of a row: token i sees token j ≤ i where segmentᵢ = segmentⱼ, or prefixᵢ = segmentⱼ.

  Args:
    segments: See `Rows`; padding sees nothing.
    prefixes: See `Rows`; several sequences may share one.

  Example:
    One prompt of two tokens with two responses, the second of which does not see the first:

    >>> segments, prefixes = jnp.array([[1, 1, 2, 3, 3]]), jnp.array([[0, 0, 1, 1, 1]])
    >>> packed(segments, prefixes).mask[0, 4].astype(int).tolist()
    [1, 1, 0, 1, 1]
  """
  slots = jnp.arange(segments.shape[1])
  return Rows(segments, prefixes, visible(segments, prefixes, segments, slots[:, None] >= slots))


def visible(
  segments: Int[Array, "*batch T"], prefixes: Int[Array, "*batch T"] | None, keys: Int[Array, "*batch S"], causal: Bool[Array, "*rows T S"]
) -> Bool[Array, "*batch T S"]:
  """Returns True where a query, of the given segment and prefix, sees a key, whose segment is in `keys`.

  `causal` is True where the key does not come after the query.
  """
  keys = keys[..., None, :]
  seen = segments[..., None] == keys
  if prefixes is not None:
    seen |= prefixes[..., None] == keys
  return seen & (keys > 0) & causal


def blocks_seen(
  segments: Int[Array, "B I q"], prefixes: Int[Array, "B I q"] | None, keys: Int[Array, "B J k"], last: Int[Array, " I"]
) -> Bool[Array, "B I J"]:
  """Which blocks of keys a block of queries cannot do without; the others hold nothing that it sees.

  Compares the ranges of the segments and not every pair: exact where segments ascend along a row, and else never too few. Arguments
  are as for `visible`, in blocks; `last` is the slot of the last query of each block in its row.
  """
  first, highest = jnp.where(keys > 0, keys, _NO_SEGMENT).min(-1)[:, None], keys.max(-1)[:, None]

  def meets(ids):
    return (jnp.where(ids > 0, ids, _NO_SEGMENT).min(-1)[..., None] <= highest) & (first <= ids.max(-1)[..., None])

  seen = meets(segments)
  if prefixes is not None:
    seen |= meets(prefixes)
  return seen & (last[:, None] >= jnp.arange(keys.shape[1]) * keys.shape[2])


def padded(x: Shaped[Array, "B T ..."], block: int) -> Shaped[Array, "B S ..."]:
  """Pads rows with zeros to a whole number of blocks; segment 0 is padding, which nothing sees."""
  return jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2))
