"""Attention of a decoding step that reads the tokens of each row, not all allocated columns.

The cache has as many columns as the longest row needs, and a mask would read all of them for every
row. Here, each group of rows has a list of the blocks of columns in which any of its rows sees a
token, made once per step for all layers, and the kernel of the platform fetches only these.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.devices.mesh import BATCH_AXES, num_row_shards, platform_of
from jaxrl_llm.kernels import ragged_gpu, ragged_tpu
from jaxrl_llm.kernels.partial import nothing_of
from jaxrl_llm.kernels.types import KeyValues, Partial, Visits
from jaxrl_llm.models.cache import View
from jaxrl_llm.models.cache import attend as attend_all
from jaxrl_llm.models.cache import attend_prompts as attend_all_prompts


class Kernel(NamedTuple):
  """The kernel of a platform, and what it can read.

  Attributes:
    attend: Function `(q, held, ages, lengths, read, *, interpret) -> Partial` for one device.
    reads: Function from the width of a head to whether the kernel reads it.
    widths: Those widths in words.
    columns: Columns per block, the first that divides the cache.
    rows: Largest number of rows in a group.
    is_default: Whether "auto" selects the kernel.
    is_emulated: Whether the platform can only emulate the kernel, slowly.
    queries: Most queries of a prompt's rows that the kernel takes for one head; 0 if XLA reads
      prompts.
  """

  attend: Callable[..., Partial]
  reads: Callable[[int], bool]
  widths: str
  columns: tuple[int, ...]
  rows: int
  is_default: bool = False
  is_emulated: bool = False
  queries: int = 0


_TPU = Kernel(ragged_tpu.attend, ragged_tpu.reads, ragged_tpu.WIDTHS, ragged_tpu.COLUMNS, ragged_tpu.ROWS, is_default=True)
_GPU = Kernel(ragged_gpu.attend, ragged_gpu.reads, ragged_gpu.WIDTHS, ragged_gpu.COLUMNS, ragged_gpu.ROWS, is_default=True, queries=64)
KERNELS = {"tpu": _TPU, "gpu": _GPU, "cpu": _TPU._replace(is_default=False, is_emulated=True)}
"""Kernels by platform; CPUs emulate that of TPUs."""


def kernel_of(platform: str) -> Kernel:
  """Returns the kernel of a platform; others than those of `KERNELS` do as CPUs do."""
  return KERNELS.get(platform, KERNELS["cpu"])


def is_used(backend: str, platform: str, head_dim: int, columns: int) -> bool:
  """Returns whether a block of the cache is read by the kernel.

  Args:
    backend: "auto", "xla" or "ragged".
    platform: Platform of the devices: "cpu", "gpu" or "tpu".
    head_dim: Width of a head.
    columns: Number of columns of the block.

  Raises:
    ValueError: If "ragged" is asked for and the kernel cannot read the block.

  Example:
    >>> is_used("auto", "tpu", 128, 4096), is_used("auto", "gpu", 128, 4096), is_used("auto", "tpu", 128, 100)
    (True, True, False)
    >>> is_used("auto", "cpu", 128, 4096)
    False
  """
  kernel = kernel_of(platform)
  fits = kernel.reads(head_dim) and block_columns(columns, platform) is not None
  if backend != "ragged":
    return backend == "auto" and kernel.is_default and fits
  if not fits:
    raise ValueError(
      f"config.serving.attention: found 'ragged' for heads of width {head_dim} and a block of {columns} columns on a {platform}, "
      f"expected {kernel.widths} and a multiple of {min(kernel.columns)}; choose 'xla', or other rollout.cache_blocks"
    )
  return True


def block_columns(size: int, platform: str) -> int | None:
  """Returns the number of columns of a block; None if the kernel cannot divide the cache.

  Example:
    >>> block_columns(16384, "tpu"), block_columns(384, "tpu"), block_columns(100, "tpu"), block_columns(16384, "gpu")
    (256, 128, None, 64)
  """
  return next((columns for columns in kernel_of(platform).columns if size % columns == 0), None)


def rows_per_group(num_rows: int, platform: str) -> int:
  """Returns the number of rows in a group, so that each of two cores of a chip has one.

  Example:
    >>> rows_per_group(32, "tpu"), rows_per_group(4, "tpu"), rows_per_group(1, "tpu"), rows_per_group(32, "gpu")
    (16, 2, 1, 1)
  """
  most = min(kernel_of(platform).rows, max(num_rows // 2, 1))
  return max(size for size in range(1, most + 1) if num_rows % size == 0)


def visits(ages: Int[Array, " S"], lengths: Int[Array, " B"], *, rows: int, columns: int) -> Visits:
  """Lists the blocks that hold a token of each row, by groups of `rows` rows.

  Args:
    ages: Number of steps since each column was written.
    lengths: Number of tokens that each row sees, which are those younger than it.
    rows: Number of rows in a group, from `rows_per_group`.
    columns: Number of columns of a block, from `block_columns`.

  Example:
    >>> ages = jnp.arange(512)[::-1]
    >>> read = visits(ages, jnp.array([3, 400]), rows=2, columns=256)
    >>> read.counts.tolist(), read.blocks[0, :3].tolist()
    ([3], [1, 2, 3])
  """
  youngest = jnp.min(ages.reshape(-1, columns), axis=1)
  is_read = (youngest < lengths[:, None]).reshape(len(lengths) // rows, -1)
  order = jnp.argsort(~is_read, axis=1, stable=True)
  return Visits(order.astype(jnp.int32), jnp.sum(is_read, axis=1).astype(jnp.int32))


def last_visits(lengths: Int[Array, " B"], size: int, *, columns: int) -> Visits:
  """Lists the blocks that hold a token of each row, of rows that end with the last column.

  It is what `visits` lists for groups of one row, without a sort.

  Args:
    lengths: Number of tokens of each row.
    size: Number of columns.
    columns: Number of columns of a block, from `block_columns`.

  Example:
    >>> read = last_visits(jnp.array([3, 300]), 512, columns=128)
    >>> read.counts.tolist(), read.blocks[1, :3].tolist()
    ([1, 3], [1, 2, 3])
  """
  counts = -(-lengths // columns)
  return Visits((size // columns - counts)[:, None] + jnp.arange(size // columns), counts)


def attend_block(q: Float[Array, "B K G C"], held: KeyValues, view: View, block: int, *, mesh: Mesh | None) -> Partial:
  """Attends from the queries of each row to its own tokens in a block of the cache."""
  reads = view.reads[block]
  if not isinstance(reads, Visits):
    attend_whole = lambda: attend_all(q, held, view.sees(block))
    return attend_whole() if reads is None else jax.lax.cond(reads, attend_whole, lambda: nothing_of(q))
  return attend(q, held, view.ages[block], view.own_lengths, reads, kernel=kernel_of(platform_of(mesh)), mesh=mesh)


def attend_prompts(q: Float[Array, "B K G C"], held: KeyValues, view: View, *, mesh: Mesh | None) -> Partial:
  """Attends from the queries of each row to its prompt, which all rows of a prompt read once.

  For the kernel, the rows of a prompt are one row with the queries of all.
  """
  if view.prompt_reads is None:
    return attend_all_prompts(q, held, view)
  ages, lengths = jnp.arange(held.v.shape[2])[::-1], jnp.sum(view.prompts, axis=1)
  kernel = kernel_of(platform_of(mesh))
  each = lambda q, held: attend(q, held, ages, lengths, view.prompt_reads, kernel=kernel, mesh=mesh)
  return attend_all_prompts(q, held, view, each)


def attend(
  q: Float[Array, "B K G C"],
  held: KeyValues,
  ages: Int[Array, " S"],
  lengths: Int[Array, " B"],
  read: Visits,
  *,
  kernel: Kernel,
  mesh: Mesh | None = None,
) -> Partial:
  """Attends from queries to the cached tokens of their rows, with scores and sums in float32.

  Args:
    q: Queries, grouped by the key-value head that they read.
    held: Keys and values, in float32, bfloat16 or int8.
    ages: Number of steps since each column was written.
    lengths: Number of tokens that each row sees.
    read: Blocks to read, from `visits`.
    kernel: Kernel of the platform.
    mesh: Device mesh; None is one device. Rows are sharded over data, fsdp and expert, heads over
      tensor.

  Returns:
    The part of the softmax. A row that sees nothing has a total of 1 and a mix of 0.

  References:
    Ragged paged attention, arXiv:2604.15464, 2026.
  """
  local = partial(kernel.attend, interpret=kernel.is_emulated)
  if mesh is None or mesh.size == 1:
    return local(q, held, ages, lengths, read)
  rows = BATCH_AXES if q.shape[0] % num_row_shards(mesh) == 0 else None
  heads = PartitionSpec(rows, "tensor" if q.shape[1] % mesh.shape["tensor"] == 0 else None)
  whole = PartitionSpec()
  by_row = PartitionSpec(rows)
  specs = (heads, jax.tree.map(lambda _: heads, held), whole, by_row, Visits(by_row, by_row))
  split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=Partial(heads, heads, heads), check_vma=False)
  return split(q, held, ages, lengths, read)
