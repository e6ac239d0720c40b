"""Attention of a decoding step that reads the tokens of each row, not all allocated columns.

A kernel for TPUs. The cache has as many columns as the longest row needs, and a mask would read all
of them for every row. Here, each group of rows has a list of the blocks of columns in which any of
its rows sees a token, made once per step for all layers, and the kernel fetches only these.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.devices.mesh import BATCH_AXES, num_row_shards, platform_of
from jaxrl_llm.models.cache import KeyValues, Partial, View, Visits
from jaxrl_llm.models.cache import attend as attend_all
from jaxrl_llm.models.visibility import MASKED

_LANES = 128
_COLUMNS = (256, 128)
"""Columns per block, the first that divides the cache.

Larger blocks read more columns without tokens, smaller ones take more turns.
"""

_ROWS = 16
"""Largest number of rows in a group, whose queries and results stay in fast memory."""


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
    >>> is_used("auto", "tpu", 128, 4096), is_used("auto", "cpu", 128, 4096), is_used("auto", "tpu", 128, 100)
    (True, False, False)
  """
  fits = head_dim % _LANES == 0 and block_columns(columns) is not None
  if backend != "ragged":
    return backend == "auto" and platform == "tpu" and fits
  if platform == "gpu" or not fits:
    raise ValueError(
      f"config.serving.attention: found 'ragged' for heads of width {head_dim} and a block of {columns} columns on a {platform}, "
      f"expected multiples of {_LANES} on a TPU; choose 'xla', or other rollout.cache_blocks"
    )
  return True


def block_columns(size: int) -> int | None:
  """Returns the number of columns of a block; None if the kernel cannot divide the cache.

  Example:
    >>> block_columns(16384), block_columns(384), block_columns(100)
    (256, 128, None)
  """
  return next((columns for columns in _COLUMNS if size % columns == 0), None)


def rows_per_group(num_rows: int) -> int:
  """Returns the number of rows in a group, so that the two cores of a chip have one each.

  Example:
    >>> rows_per_group(32), rows_per_group(4), rows_per_group(1)
    (16, 2, 1)
  """
  most = min(_ROWS, max(num_rows // 2, 1))
  return max(size for size in range(1, most + 1) if num_rows % size == 0)


def visits(ages: Int[Array, " S"], lengths: Int[Array, " B"], *, rows: int) -> Visits:
  """Lists the blocks that hold a token of each row, by groups of `rows` rows.

  Args:
    ages: Number of steps since each column was written.
    lengths: Number of tokens that each row sees, which are those younger than it.
    rows: Number of rows in a group.

  Example:
    >>> ages = jnp.arange(512)[::-1]
    >>> read = visits(ages, jnp.array([3, 400]), rows=2)
    >>> read.counts.tolist(), read.blocks[0, :3].tolist()
    ([3], [1, 2, 3])
  """
  youngest = jnp.min(ages.reshape(-1, block_columns(len(ages))), axis=1)
  is_read = (youngest < lengths[:, None]).reshape(len(lengths) // rows, -1)
  order = jnp.argsort(~is_read, axis=1, stable=True)
  return Visits(order.astype(jnp.int32), jnp.sum(is_read, axis=1).astype(jnp.int32))


def attend_block(q: Float[Array, "B K G C"], held: KeyValues, view: View, block: int, *, mesh: Mesh | None) -> Partial:
  """Attends from the queries of each row to its own tokens in a block of the cache."""
  ages, reads = view.ages[block], view.reads[block]
  if reads is None:
    return attend_all(q, held, ages < view.lengths[:, None])
  return attend(q, held, ages, view.lengths, reads, mesh=mesh, interpret=platform_of(mesh) != "tpu")


def attend(
  q: Float[Array, "B K G C"],
  held: KeyValues,
  ages: Int[Array, " S"],
  lengths: Int[Array, " B"],
  read: Visits,
  *,
  mesh: Mesh | None = None,
  interpret: bool = False,
) -> Partial:
  """Attends from queries to the cached tokens of their rows, with scores and sums in float32.

  Args:
    q: Queries, grouped by the key-value head that they read.
    held: Keys and values, in float32, bfloat16 or int8.
    ages: Number of steps since each column was written.
    lengths: Number of tokens that each row sees.
    read: Blocks to read, from `visits`.
    mesh: Device mesh; None is one device. Rows are sharded over data, fsdp and expert, heads over
      tensor.
    interpret: Whether to emulate the kernel, slowly, on devices other than TPUs.

  Returns:
    The part of the softmax. A row that sees nothing has a total of 1 and a mix of 0.

  References:
    Ragged paged attention, arXiv:2604.15464, 2026.
  """
  local = partial(_attend, interpret=interpret)
  if mesh is None or mesh.size == 1:
    return local(q, held, ages, lengths, read)
  rows = BATCH_AXES if q.shape[0] % num_row_shards(mesh) == 0 else None
  heads = PartitionSpec(rows, "tensor" if q.shape[1] % mesh.shape["tensor"] == 0 else None)
  whole = PartitionSpec()
  by_row = PartitionSpec(rows)
  specs = (heads, jax.tree.map(lambda _: heads, held), whole, by_row, Visits(by_row, by_row))
  split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=Partial(heads, heads, heads), check_vma=False)
  return split(q, held, ages, lengths, read)


def _attend(q, held, ages, lengths, read, *, interpret: bool) -> Partial:
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  batch, num_heads, group, width = q.shape
  arrays = [x for x in held if x is not None]
  columns = block_columns(len(ages))
  num_groups = len(read.counts)
  rows, blocks = batch // num_groups, len(ages) // columns
  by_rows = lambda g, *_: (g, 0, 0, 0)
  spec = lambda lanes: pl.BlockSpec((rows, num_heads, group, lanes), by_rows)
  anywhere = pl.BlockSpec(memory_space=pl.ANY)
  buffer = lambda x, axis: pltpu.VMEM((2, *x.shape[1:axis], columns, *x.shape[axis + 1 :]), x.dtype)
  axes = (3, 2, 2, 2)  # Of the tokens, in keys, values and their scales.
  top, total, mix = pl.pallas_call(
    partial(_kernel, rows=rows, blocks=blocks, columns=columns, num_arrays=len(arrays)),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(num_groups,),
      in_specs=[spec(width), pl.BlockSpec((blocks, columns), lambda g, *_: (0, 0)), *[anywhere] * len(arrays)],
      out_specs=[spec(_LANES), spec(_LANES), spec(width)],
      scratch_shapes=[*map(buffer, arrays, axes[: len(arrays)]), pltpu.SemaphoreType.DMA((2, len(arrays)))],
    ),
    out_shape=[jax.ShapeDtypeStruct((batch, num_heads, group, lanes), jnp.float32) for lanes in (_LANES, _LANES, width)],
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    interpret=interpret,
    name="ragged_decode_attention",
  )(read.blocks, read.counts, lengths, q, ages.reshape(blocks, columns), *arrays)
  return Partial(top[..., 0], jnp.where(top[..., 0] > MASKED, total[..., 0], 1), mix)


def _kernel(blocks_ref, counts_ref, lengths_ref, q_ref, ages_ref, *refs, rows: int, blocks: int, columns: int, num_arrays: int):
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  held, (top_ref, total_ref, mix_ref), *_ = refs[:num_arrays], refs[num_arrays : num_arrays + 3]
  buffers, semaphores = refs[-num_arrays - 1 : -1], refs[-1]
  group = pl.program_id(0)
  count = counts_ref[group]

  def copies(visit, slot):
    position = blocks_ref[group, visit]
    row, start = group * rows + jax.lax.div(position, blocks), pl.multiple_of(jax.lax.rem(position, blocks) * columns, columns)
    ahead = pl.ds(start, columns)
    parts = [x.at[row, :, :, ahead] if i == 0 else x.at[row, :, ahead] for i, x in enumerate(held)]
    return [pltpu.make_async_copy(part, buffers[i].at[slot], semaphores.at[slot, i]) for i, part in enumerate(parts)]

  top_ref[...] = jnp.full(top_ref.shape, MASKED, jnp.float32)
  total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
  mix_ref[...] = jnp.zeros(mix_ref.shape, jnp.float32)

  @pl.when(count > 0)
  def _():
    for copy in copies(0, 0):
      copy.start()

  def visit(i, carry):
    slot = jax.lax.rem(i, 2)

    @pl.when(i + 1 < count)
    def _():
      for copy in copies(i + 1, 1 - slot):
        copy.start()

    for copy in copies(i, slot):
      copy.wait()
    position = blocks_ref[group, i]
    row, block = jax.lax.div(position, blocks), jax.lax.rem(position, blocks)
    q = q_ref[row]
    k, v, *scales = (buffer[slot] for buffer in buffers)
    in_full = lambda x: x.astype(q.dtype) if x.dtype == jnp.int8 else x
    k, v = in_full(k), in_full(v)
    product = lambda a, b, axes: jax.lax.dot_general(a, b, (axes, ((0,), (0,))), preferred_element_type=jnp.float32)
    scores = product(q.astype(k.dtype), k, ((2,), (1,))) * q.shape[-1] ** -0.5
    if scales:
      scores = scores * scales[0][:, None]
    is_seen = (ages_ref[pl.ds(block, 1)] < lengths_ref[group * rows + row])[None]
    scores = jnp.where(is_seen, scores, MASKED)
    before = top_ref[row]
    top = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
    shrink = jnp.exp(before - top)
    weights = jnp.where(is_seen, jnp.exp(scores - top[..., :1]), 0)
    top_ref[row] = top
    total_ref[row] = shrink * total_ref[row] + jnp.sum(weights, axis=-1, keepdims=True)
    if scales:
      weights = weights * scales[1][:, None]
    mix_ref[row] = shrink[..., :1] * mix_ref[row] + product(weights.astype(v.dtype), v, ((2,), (1,)))
    return carry

  jax.lax.fori_loop(0, count, visit, 0)
