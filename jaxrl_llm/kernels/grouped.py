"""Products of groups of rows with a matrix for each group: the choice, and those for CPUs.

XLA expands `jax.lax.ragged_dot` on CPUs and GPUs into a product of every row with every matrix.
Here, tiles of rows are multiplied by the matrix of their group alone.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import grouped_gpu, grouped_tpu
from jaxrl_llm.kernels.precision import dot, precision_of

_TILES = 2
"""Tiles per group of average size: more of them waste fewer rows, but read a matrix more often."""

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
  platform: str, *, dense_bytes: int = _DENSE_BYTES, interpret: bool = False
) -> Callable[[Array, Array, Array], Array]:
  """Returns the function `(rows [M D], matrices [E D F], sizes [E]) -> [M F]` for a platform.

  Group e is the next `sizes[e]` rows. The result for rows after the last group is arbitrary, and
  their gradient is 0 if the cotangents of their results are.

  Args:
    platform: Platform of the devices: cpu, gpu, tpu, or another one, on which XLA chooses the
      method.
    dense_bytes: Most bytes of groups x rows x width for which a GPU runs no kernel, but XLA's dense
      product.
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
    "cpu": Kernels(_products, _of_matrices),
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
  return max(8, -(-num_rows // (8 * _TILES * num_groups)) * 8)


def _bounds(sizes: Int[Array, " E"]) -> tuple[Int[Array, " E"], Int[Array, " E"]]:
  ends = jnp.cumsum(sizes)
  return ends - sizes, ends


def _products(
  rows: Float[Array, "M A"], matrices: Float[Array, "E ..."], sizes: Int[Array, " E"], *, contracted: int
) -> Float[Array, "M B"]:
  """Contracts each group of rows with an axis of its matrix, 1 or 2.

  A group's last tile may reach into the next group, whose own tiles are written later.
  """
  (starts, ends), tile = _bounds(sizes), _tile(len(rows), len(matrices))
  padded = jnp.pad(rows, ((0, tile), (0, 0)))

  def of_group(e: Array, products: Array) -> Array:
    matrix = matrices[e]

    def step(state):
      start, products = state
      x = jax.lax.dynamic_slice_in_dim(padded, start, tile)
      y = jax.lax.dot_general(x, matrix, (((1,), (contracted - 1,)), ((), ())), precision=precision_of(x, matrix))
      return start + tile, jax.lax.dynamic_update_slice_in_dim(products, y, start, 0)

    return jax.lax.while_loop(lambda state: state[0] < ends[e], step, (starts[e], products))[1]

  products = jnp.zeros((len(padded), matrices.shape[3 - contracted]), rows.dtype)
  return jax.lax.fori_loop(0, len(matrices), of_group, products)[: len(rows)]


def _of_matrices(rows: Float[Array, "M D"], ct: Float[Array, "M F"], sizes: Int[Array, " E"]) -> Float[Array, "E D F"]:
  """Computes rowsᵀ·ct of each group, summed over its tiles in float32."""
  (starts, ends), tile = _bounds(sizes), _tile(len(rows), len(sizes))
  rows, ct = (jnp.pad(x, ((0, tile), (0, 0))) for x in (rows, ct))

  def of_group(e: Array) -> Array:
    def step(state):
      start, total = state
      x, y = (jax.lax.dynamic_slice_in_dim(z, start, tile) for z in (rows, ct))
      y = jnp.where((start + jnp.arange(tile) < ends[e])[:, None], y, 0)
      more = dot(x, y, 0, 0)
      return start + tile, total + more

    zeros = jnp.zeros((rows.shape[1], ct.shape[1]), jnp.float32)
    return jax.lax.while_loop(lambda state: state[0] < ends[e], step, (starts[e], zeros))[1]

  return jax.lax.map(of_group, jnp.arange(len(sizes)))
