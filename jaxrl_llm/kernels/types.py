"""Keys and values, the blocks of them to read, and softmaxes over a part of them."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class KeyValues(NamedTuple):
  """Keys and values of one layer for the same S tokens of each of B rows.

  Tokens are the innermost axis of keys, and the head's width is the innermost axis of values. Both
  products of decoding then read memory in order. GPUs hold `KeyValuesByToken`.

  Attributes:
    k: Rotated keys.
    v: Values.
    k_scale: Scale of each key if the dtype is int8; None otherwise.
    v_scale: Scale of each value if the dtype is int8; None otherwise.
  """

  k: Float[Array, "B K C S"] | Int[Array, "B K C S"]
  v: Float[Array, "B K S C"] | Int[Array, "B K S C"]
  k_scale: Float[Array, "B K S"] | None = None
  v_scale: Float[Array, "B K S"] | None = None

  @property
  def token_axes(self) -> tuple[int, int, int, int]:
    """Axis of the tokens in each field."""
    return (3, 2, 2, 2)


class KeyValuesByToken(KeyValues):
  """Keys and values of which each token's lie together: `k` is [B K S C], as `v` is.

  A GPU writes a token by one transaction a head, where the tokens' own axis as the innermost one
  would scatter it over as many lines of memory as a head is wide; its products read both in order.
  """

  __slots__ = ()

  @property
  def token_axes(self) -> tuple[int, int, int, int]:
    """Axis of the tokens in each field."""
    return (2, 2, 2, 2)


class Visits(NamedTuple):
  """The blocks that the kernel of `ragged` reads for each group of rows.

  Attributes:
    blocks: Position (row in the group)·(blocks per row) + (block) of each block to read, in order;
      arbitrary after the last one.
    counts: Number of blocks to read.
  """

  blocks: Int[Array, "groups visits"]
  counts: Int[Array, " groups"]


class Partial(NamedTuple):
  """An unnormalised softmax over a part of the keys.

  Attributes:
    top: Maximum of the scores.
    total: Sum Σ exp(score − top).
    mix: Weighted sum Σ exp(score − top)·v.
  """

  top: Float[Array, "B K G"]
  total: Float[Array, "B K G"]
  mix: Float[Array, "B K G C"]
