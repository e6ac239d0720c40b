"""Flash attention for GPUs: the sizes of its kernels, what they visit, and their order.

The kernels are in `flash_gpu_kernels`.
"""

from typing import NamedTuple

from jaxtyping import Array, Float

from jaxrl_llm.kernels.flash_gpu_kernels import Tiles, Visits, attend, backward_of_keys, backward_of_queries
from jaxrl_llm.kernels.flash_tpu import Ids

WIDTHS = (64, 128, 256)
"""Widths of heads. The sizes of Triton's arrays are powers of two."""


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


def forward(
  q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], v: Float[Array, "B S K C"], ids: Ids, lists: Lists,
  *, sizes: Sizes, interpret: bool,
) -> tuple[Float[Array, "B T H C"], Float[Array, "B H T"]]:  # fmt: skip
  """Computes attention and the log-sum-exp of its scores, to the base 2; see `attend`."""
  return attend(q, k, v, ids, lists.forward, tiles=sizes.forward, interpret=interpret)


def backward(
  q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], v: Float[Array, "B S K C"], d_out: Float[Array, "B T H C"],
  log_sum: Float[Array, "B H T"], mean: Float[Array, "B H T"], ids: Ids, lists: Lists, *, sizes: Sizes, interpret: bool,
) -> tuple[Float[Array, "B T H C"], Float[Array, "B S K C"], Float[Array, "B S K C"]]:  # fmt: skip
  """Computes the gradients of queries, keys and values; see `backward_of_queries`."""
  arguments = q, k, v, d_out, log_sum, mean, ids
  d_q = backward_of_queries(*arguments, lists.of_queries, tiles=sizes.of_queries, interpret=interpret)
  return d_q, *backward_of_keys(*arguments, lists.of_keys, tiles=sizes.of_keys, interpret=interpret)
