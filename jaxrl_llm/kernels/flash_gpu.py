"""Flash attention for GPUs: the sizes of its kernels, and the blocks that they visit.

The kernels are in `flash_gpu_kernels`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

WIDTHS = (64, 128, 256)
"""Widths of heads. The sizes of Triton's arrays are powers of two."""


class Tiles(NamedTuple):
  """How a kernel is divided.

  Attributes:
    queries: Queries per block.
    keys: Keys per block.
    warps: Number of warps of a program.
    stages: Number of blocks that are read ahead, and the one that is computed.
  """

  queries: int
  keys: int
  warps: int
  stages: int


class Visits(NamedTuple):
  """Blocks that the program of each block visits, first those that need no mask.

  Attributes:
    blocks: Indices of the blocks.
    counts: Number of blocks of which all pairs are visible, and of those with any visible pair.
  """

  blocks: Int[Array, "B I J"]
  counts: Int[Array, "B I 2"]


def visits(seen: Bool[Array, "B I J"], whole: Bool[Array, "B I J"]) -> Visits:
  """Lists the blocks of axis J to visit.

  Args:
    seen: Whether a pair of blocks has a visible pair of tokens.
    whole: Whether all pairs of its tokens are visible.

  Example:
    >>> seen, whole = jnp.array([[[True, False, True, True]]]), jnp.array([[[False, False, True, False]]])
    >>> listed = visits(seen, whole)
    >>> listed.blocks[0, 0, :3].tolist(), listed.counts.tolist()
    ([2, 0, 3], [[[1, 3]]])
  """
  rank = jnp.where(seen, jnp.where(whole, 0, 1), 2)
  counts = jnp.stack([jnp.sum(seen & whole, axis=2), jnp.sum(seen, axis=2)], axis=2)
  return Visits(jnp.argsort(rank, axis=2, stable=True).astype(jnp.int32), counts.astype(jnp.int32))


class Sizes(NamedTuple):
  """Tiles of the three kernels."""

  forward: Tiles
  of_queries: Tiles
  of_keys: Tiles

  @property
  def queries(self) -> int:
    """Number of queries of the largest block; all are powers of two."""
    return max(tiles.queries for tiles in self)

  @property
  def keys(self) -> int:
    """Number of keys of the largest block."""
    return max(tiles.keys for tiles in self)


def reads(head_dim: int) -> bool:
  """Returns whether the kernels read heads of this width."""
  return head_dim in WIDTHS


def sizes_of(q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], stripe: int | None) -> Sizes:
  """Returns the tiles of the kernels for these queries and keys.

  They are small enough for every stripe.
  """
  return _SIZES[q.shape[3], q.dtype.itemsize]


_SIZES = {
  (64, 2): Sizes(Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 128, 8, 2)),
  (128, 2): Sizes(Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 2), Tiles(64, 64, 8, 2)),
  (256, 2): Sizes(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 1), Tiles(32, 32, 8, 1)),
  (64, 4): Sizes(Tiles(64, 32, 8, 2), Tiles(32, 32, 4, 2), Tiles(32, 32, 8, 2)),
  (128, 4): Sizes(Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
  (256, 4): Sizes(Tiles(32, 32, 8, 1), Tiles(32, 16, 8, 1), Tiles(16, 16, 8, 1)),
}
"""Tiles by the width of a head and the bytes of a number.

Triton 3.9 compiles each kernel to at most 99 KiB of shared memory, what the smallest GPUs since
Ampere have.
"""


class Lists(NamedTuple):
  """Blocks that the programs of each kernel visit: blocks of keys, of keys, and of queries."""

  forward: Visits
  of_queries: Visits
  of_keys: Visits
