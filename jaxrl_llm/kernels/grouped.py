"""Products of groups of rows with a matrix for each group: the choice, and those for CPUs.

XLA expands `jax.lax.ragged_dot` on CPUs and GPUs into a product of every row with every matrix.
Here, one product takes the first rows of all groups, each with the matrix of its group alone, and a
loop what is left of those that are larger than most.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.kernels import grouped_gpu, grouped_tpu
from jaxrl_llm.kernels.precision import dot, precision_of

_ROOM = 1.25
"""Rows of a tile per row of a group of average size: a smaller tile leaves more to the loop."""

_DENSE_BYTES = 64 * 2**20
"""Most bytes of groups x rows x width for which GPUs take `ragged_dot`, which is dense there."""


class Kernels(NamedTuple):
  """The products of a platform, of which a grouped product and its gradients consist.

  Attributes:
    products: Function `(rows [M A], matrices, sizes, *, contracted) -> [M B]` that contracts each
      group of rows with axis 1 or 2 of its matrix.
    of_matrices: Function `(rows [M D], ct [M F], sizes) -> [E D F]` that computes rowsᵀ·ct of each
      group, summed in float32. Rows after the last group count nothing.
  """

  products: Callable[..., Array]
  of_matrices: Callable[..., Array]


def grouped_matmul_for(
  platform: str, *, dense_bytes: int = _DENSE_BYTES, interpret: bool = False, tile: int | None = None
) -> Callable[[Array, Array, Array], Array]:
  """Returns the function `(rows [M D], matrices [E D F], sizes [E]) -> [M F]` for a platform.

  Group e is the next `sizes[e]` rows. The result for rows after the last group is arbitrary, and
  their gradient is 0 if the cotangents of their results are.

  Args:
    platform: Platform of the devices: cpu, gpu, tpu, or another one, on which XLA chooses the
      method.
    dense_bytes: Most bytes of groups x rows x width for which a GPU runs no kernel, but XLA's dense
      product.
    tile: Number of rows of a product on a CPU; None for one that follows from the numbers of rows
      and groups, on which the order of the sums then depends.
    interpret: Whether to emulate the kernels of a TPU or GPU, slowly, on other devices.

  Example:
    >>> product = grouped_matmul_for("cpu")
    >>> product(jnp.ones((3, 1)), jnp.array([[[5.0]], [[7.0]]]), jnp.array([1, 2])).tolist()
    [[5.0], [7.0], [7.0]]

  References:
    MegaBlocks, arXiv:2211.15841, 2022.
  """
  emulated = lambda function: partial(function, interpret=interpret)
  of_platforms = {
    "cpu": Kernels(_products if tile is None else partial(_products_in_float32, tile=tile), _of_matrices),
    "gpu": Kernels(emulated(grouped_gpu.products), emulated(grouped_gpu.of_matrices)),
    "tpu": Kernels(grouped_tpu.products, emulated(grouped_tpu.of_matrices)),
  }
  if platform not in of_platforms:
    return ragged_matmul
  product = partial(_grouped_matmul, of_platforms[platform])
  return partial(_or_dense, product=product, dense_bytes=dense_bytes) if platform == "gpu" else product


def _or_dense(
  rows: Float[Array, "M D"], matrices: Float[Array, "E D F"], sizes: Int[Array, " E"], *, product: Callable, dense_bytes: int
) -> Float[Array, "M F"]:
  """Multiplies by the kernels, or small arrays by XLA."""
  if len(matrices) * len(rows) * max(matrices.shape[1:]) * rows.dtype.itemsize <= dense_bytes:
    return ragged_matmul(rows, matrices, sizes)
  return product(rows, matrices, sizes)


def ragged_matmul(rows: Float[Array, "M D"], matrices: Float[Array, "E D F"], sizes: Int[Array, " E"]) -> Float[Array, "M F"]:
  """Multiplies each group of rows by its matrix with `ragged_dot`; see `grouped_matmul_for`."""
  return jax.lax.ragged_dot(rows, matrices, sizes, precision=precision_of(rows, matrices))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(
  kernels: Kernels, rows: Float[Array, "M D"], matrices: Float[Array, "E D F"], sizes: Int[Array, " E"]
) -> Float[Array, "M F"]:
  return kernels.products(rows, matrices, sizes, contracted=1)


def _bwd(kernels: Kernels, saved: tuple[Array, Array, Array], ct: Array) -> tuple[Array, Array, None]:
  rows, matrices, sizes = saved
  of_rows = kernels.products(ct, matrices, sizes, contracted=2)
  return of_rows, kernels.of_matrices(rows, ct, sizes).astype(matrices.dtype), None


_grouped_matmul.defvjp(lambda kernels, *arrays: (_grouped_matmul(kernels, *arrays), arrays), _bwd)


def _tile(num_rows: int, num_groups: int) -> int:
  return max(8, math.ceil(_ROOM * num_rows / (8 * num_groups)) * 8)


class _Tiles(NamedTuple):
  """Tiles of the rows of all groups: one for each group, and `num_more` for what is left of some.

  Attributes:
    rows: Row of each slot of the groups' first tiles. Slots after a group's end have later rows.
    is_own: Whether the slot's row is the group's.
    num_more: Number of further tiles.
    more: Function that returns the group and first row of a further tile, and which slots are the
      group's.
  """

  rows: Int[Array, "E tile"]
  is_own: Bool[Array, "E tile"]
  num_more: Int[Array, ""]
  more: Callable[[Array], tuple[Array, Array, Array]]


def _tiles(sizes: Int[Array, " E"], tile: int) -> _Tiles:
  ends = jnp.cumsum(sizes)
  slots, starts = jnp.arange(tile), ends - sizes
  counts = jnp.maximum(sizes - 1, 0) // tile
  counted = jnp.cumsum(counts)

  def more(k: Array) -> tuple[Array, Array, Array]:
    group = jnp.searchsorted(counted, k, side="right")
    start = ends[group] - sizes[group] + tile * (1 + k - counted[group] + counts[group])
    return group, start, (start + slots < ends[group])[:, None]

  return _Tiles(starts[:, None] + slots, slots < sizes[:, None], counted[-1], more)


def _products(
  rows: Float[Array, "M A"], matrices: Float[Array, "E ..."], sizes: Int[Array, " E"], *, contracted: int, tile: int | None = None
) -> Float[Array, "M B"]:
  """Contracts each group of rows with an axis of its matrix, 1 or 2."""
  num_rows, tile = len(rows), tile or _tile(len(rows), len(matrices))
  tiles, precision = _tiles(sizes, tile), precision_of(rows, matrices)
  rows = jnp.pad(rows, ((0, tile), (0, 0)))
  first = jax.lax.dot_general(rows[tiles.rows], matrices, (((2,), (contracted,)), ((0,), (0,))), precision=precision)
  groups = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=num_rows)
  places = jnp.arange(num_rows) - tiles.rows[groups, 0]
  products = jnp.where((places < jnp.minimum(sizes[groups], tile))[:, None], first[groups, jnp.minimum(places, tile - 1)], 0)

  def step(k: Array, products: Array) -> Array:
    group, start, is_own = tiles.more(k)
    x = jax.lax.dynamic_slice_in_dim(rows, start, tile)
    y = jax.lax.dot_general(x, matrices[group], (((1,), (contracted - 1,)), ((), ())), precision=precision)
    y = jnp.where(is_own, y, jax.lax.dynamic_slice_in_dim(products, start, tile))
    return jax.lax.dynamic_update_slice_in_dim(products, y, start, 0)

  return jax.lax.fori_loop(0, tiles.num_more, step, jnp.pad(products, ((0, tile), (0, 0))))[:num_rows]


def _products_in_float32(
  rows: Float[Array, "M A"], matrices: Float[Array, "E ..."], sizes: Int[Array, " E"], **options: int
) -> Float[Array, "M B"]:
  """Computes `_products` in float32, because CPUs have those of bfloat16 in some shapes only."""
  return _products(rows.astype(jnp.float32), matrices.astype(jnp.float32), sizes, **options).astype(rows.dtype)


def _of_matrices(rows: Float[Array, "M D"], ct: Float[Array, "M F"], sizes: Int[Array, " E"]) -> Float[Array, "E D F"]:
  """Computes rowsᵀ·ct of each group, summed over its tiles in float32."""
  tile = _tile(len(rows), len(sizes))
  tiles, precision = _tiles(sizes, tile), precision_of(rows, ct)
  rows, ct = (jnp.pad(x, ((0, tile), (0, 0))) for x in (rows, ct))
  first = jnp.where(tiles.is_own[:, :, None], ct[tiles.rows], 0)
  totals = jax.lax.dot_general(
    rows[tiles.rows], first, (((1,), (1,)), ((0,), (0,))), precision=precision, preferred_element_type=jnp.float32
  )

  def step(k: Array, totals: Array) -> Array:
    group, start, is_own = tiles.more(k)
    x, y = (jax.lax.dynamic_slice_in_dim(z, start, tile) for z in (rows, ct))
    return totals.at[group].add(dot(x, jnp.where(is_own, y, 0), 0, 0))

  return jax.lax.fori_loop(0, tiles.num_more, step, totals)
