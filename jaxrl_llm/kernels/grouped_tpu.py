"""Products of groups of rows with a matrix for each group, for TPUs.

The product and the gradient of the rows are `jax.lax.ragged_dot`, for which every libtpu has a
kernel. Before version 0.0.45 it has none for the gradient of the matrices, and computes products of
all rows, masked, for each matrix. The kernel used here is part of JAX and needs no newer libtpu.
Newer ones use it too, so that the tests, which interpret it on CPUs, cover what every TPU runs.
"""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.precision import default_precision_of, precision_of

_ROWS = (512, 256, 128)
"""Rows per tile. A tile that holds rows of two groups is multiplied once for each of them."""

_MOST_BYTES = 14 * 2**20
"""Most bytes of tiles in the cores' memory, of which v5e and v5p lend a kernel 16 MiB."""

_MOST_TILES = 1152
"""Tiles of rows per call, a third of those at which the kernel's float32 histogram miscounts."""


def products(
  rows: Float[Array, "M A"], matrices: Float[Array, "E ..."], sizes: Int[Array, " E"], *, contracted: int
) -> Float[Array, "M B"]:
  """Contracts each group of rows with an axis of its matrix, 1 or 2, by `ragged_dot`.

  It has tiles of our own if there are some that suit its shape.
  """
  matrices = matrices if contracted == 1 else jnp.swapaxes(matrices, 1, 2)
  tiles = tiles_of_product(*rows.shape, *matrices.shape[::2], rows.dtype.itemsize)
  with set_xla_metadata(ragged_dot_tiling=",".join(map(str, tiles))) if tiles else nullcontext():
    y = jax.lax.ragged_dot(rows, matrices, sizes, precision=precision_of(rows, matrices))
  # libtpu's kernel does not write the rows after the last group. A token whose other copies are in
  # a group sums the gradients of all of them.
  return y if contracted == 1 else jnp.where((jnp.arange(len(rows)) < jnp.sum(sizes))[:, None], y, 0)


def tiles_of_product(num_rows: int, width: int, num_groups: int, hidden: int, itemsize: int) -> tuple[int, int, int] | None:
  """Returns the sizes of a product's tiles: rows, the contracted axis, and columns.

  libtpu 0.0.42.1 takes tiles of 640 columns for a matrix of 768, and reads the rows twice and
  multiplies 1,280 columns. Here, tiles of columns are even, and as few as fit beside a whole
  contracted axis, so that a matrix is read once.

  Returns:
    None if no tile of whole 128 x 128 blocks fits, so that libtpu chooses.

  Example:
    >>> tiles_of_product(221184, 2048, 32, 768, 2), tiles_of_product(221184, 4096, 64, 1536, 2)
    ((512, 2048, 768), (256, 4096, 512))
    >>> tiles_of_product(13, 6, 5, 4, 4)
  """
  best = None
  for few in _ROWS:
    is_suited = num_rows % few == 0 and (8 * few * num_groups <= num_rows or few == _ROWS[-1])
    for parts in range(1, hidden // 128 + 1) if is_suited and width % 128 == 0 and hidden % 128 == 0 else ():
      tall = hidden // parts
      num_bytes = 2 * itemsize * (few * width + width * tall + few * tall) + 4 * few * tall
      if hidden % parts == 0 and tall % 128 == 0 and num_bytes <= _MOST_BYTES:
        best = min(best or (parts, -few, tall), (parts, -few, tall))
        break
  return (-best[1], width, best[2]) if best else None


def of_matrices(
  rows: Float[Array, "M D"], ct: Float[Array, "M F"], sizes: Int[Array, " E"], *, few: int | None = None, interpret: bool = False
) -> Float[Array, "E D F"]:
  """Computes rowsᵀ·ct of each group, summed in float32; rows after the last group count nothing.

  Args:
    rows: Rows, the groups one after the other.
    ct: Cotangents of the products of the rows.
    sizes: Number of rows in each group.
    few: Number of rows per tile, a multiple of 128; None chooses it.
    interpret: Whether to emulate the kernel, slowly, on devices other than TPUs.
  """
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

  tiles = tiling(*rows.shape, ct.shape[1], len(sizes), rows.dtype.itemsize, few=few)
  padding = ((0, -len(rows) % tiles[0]), (0, 0))
  rows, ct = jnp.pad(rows, padding), jnp.pad(ct, padding)
  most, ends, sums = _MOST_TILES * tiles[0], jnp.cumsum(sizes), None
  num_parts = -(-len(rows) // most)
  for start in range(0, len(rows), most):
    of_part = jnp.diff(jnp.clip(ends - start, 0, most), prepend=0).astype(jnp.int32)
    dtype = rows.dtype if num_parts == 1 else jnp.float32
    of_rows = slice(start, start + most)
    options = dict(preferred_element_type=dtype, tiling=tiles, existing_out=sums, interpret=interpret)
    with default_precision_of(rows, ct):
      sums = tgmm(rows[of_rows].T, ct[of_rows], of_part, **options)
  return sums


def tiling(num_rows: int, width: int, hidden: int, num_groups: int, itemsize: int, *, few: int | None = None) -> tuple[int, int, int]:
  """Returns the sizes of the kernel's tiles: rows, and both axes of a matrix.

  Example:
    >>> tiling(147456, 2048, 768, 128, 2), tiling(13, 6, 4, 5, 4)
    ((128, 1024, 768), (128, 6, 4))
  """
  few = few or next((size for size in _ROWS if 8 * size * num_groups <= num_rows), _ROWS[-1])
  return few, *(_even(size, 2048 // itemsize) for size in (width, hidden))


def _even(size: int, most: int) -> int:
  """Returns the smallest tile, a multiple of 128, that covers an axis in as few tiles as `most`."""
  return size if size <= most else -(-size // (-(-size // most) * 128)) * 128
