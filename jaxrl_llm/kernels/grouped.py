"""Products of groups of rows with a matrix for each group: the choice, and those for CPUs.

XLA expands `jax.lax.ragged_dot` on CPUs and GPUs into a product of every row with every matrix.
Here, tiles of rows are multiplied by the matrix of their group alone.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import grouped_gpu, grouped_tpu
from jaxrl_llm.kernels.precision import precision_of

_TILES = 2
"""Tiles per group of average size: more of them waste fewer rows, but read a matrix more often."""

_DENSE_BYTES = 64 * 2**20
"""Most bytes of groups x rows x width for which GPUs take `ragged_dot`, which is dense there."""


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
  """
  of_platforms = {
    "cpu": grouped_matmul,
    "gpu": partial(_on_gpu, dense_bytes=dense_bytes, interpret=interpret),
    "tpu": partial(grouped_tpu.grouped_matmul, interpret=interpret),
  }
  return of_platforms.get(platform, ragged_matmul)


def _on_gpu(
  rows: Float[Array, "M D"], matrices: Float[Array, "E D F"], sizes: Int[Array, " E"], *, dense_bytes: int, interpret: bool
) -> Float[Array, "M F"]:
  """Multiplies by the kernels, or small arrays by XLA."""
  if len(matrices) * len(rows) * max(matrices.shape[1:]) * rows.dtype.itemsize <= dense_bytes:
    return ragged_matmul(rows, matrices, sizes)
  return grouped_gpu.grouped_matmul(rows, matrices, sizes, interpret=interpret)


def ragged_matmul(rows: Float[Array, "M D"], matrices: Float[Array, "E D F"], sizes: Int[Array, " E"]) -> Float[Array, "M F"]:
  """Multiplies each group of rows by its matrix with `ragged_dot`; see `grouped_matmul_for`."""
  return jax.lax.ragged_dot(rows, matrices, sizes, precision=precision_of(rows, matrices))


@jax.custom_vjp
def grouped_matmul(rows: Float[Array, "M D"], matrices: Float[Array, "E D F"], sizes: Int[Array, " E"]) -> Float[Array, "M F"]:
  """Multiplies each group of rows by its matrix; see `grouped_matmul_for`.

  Example:
    >>> grouped_matmul(jnp.ones((3, 1)), jnp.array([[[5.0]], [[7.0]]]), jnp.array([1, 2])).tolist()
    [[5.0], [7.0], [7.0]]
  """
  return _products(rows, matrices, sizes, contracted=1)


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
      more = jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), precision=precision_of(x, y), preferred_element_type=jnp.float32)
      return start + tile, total + more

    zeros = jnp.zeros((rows.shape[1], ct.shape[1]), jnp.float32)
    return jax.lax.while_loop(lambda state: state[0] < ends[e], step, (starts[e], zeros))[1]

  return jax.lax.map(of_group, jnp.arange(len(sizes)))


def _bwd(saved: tuple[Array, Array, Array], ct: Array) -> tuple[Array, Array, None]:
  rows, matrices, sizes = saved
  return _products(ct, matrices, sizes, contracted=2), _of_matrices(rows, ct, sizes).astype(matrices.dtype), None


grouped_matmul.defvjp(lambda rows, matrices, sizes: (grouped_matmul(rows, matrices, sizes), (rows, matrices, sizes)), _bwd)
