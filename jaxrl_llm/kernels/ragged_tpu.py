"""The attention kernel of `ragged` for TPUs.

Each program has a group of rows. It copies the next block of keys and values into fast memory while
it computes with the one before.
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.precision import in_parts, precision_of
from jaxrl_llm.kernels.types import KeyValues, Partial, Visits
from jaxrl_llm.kernels.visibility import MASKED

COLUMNS = (256, 128)
"""Columns per block, the first that divides the cache.

Larger blocks read more columns without tokens, smaller ones take more turns.
"""

ROWS = 16
"""Largest number of rows in a group, whose queries and results stay in fast memory."""

WIDTHS = "a multiple of 128"
"""Widths of heads that the kernel reads, in words; see `reads`."""

_LANES = 128


def reads(head_dim: int) -> bool:
  """Returns whether the kernel reads heads of this width."""
  return head_dim % _LANES == 0


def attend(
  q: Float[Array, "B K G C"],
  held: KeyValues,
  ages: Int[Array, " S"],
  lengths: Int[Array, " B"],
  read: Visits,
  *,
  interpret: bool = False,
) -> Partial:
  """Attends from queries to the cached tokens of their rows, on one device; see `ragged.attend`."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  batch, num_heads, group, width = q.shape
  arrays = [x for x in held if x is not None]
  num_groups = len(read.counts)
  rows = batch // num_groups
  blocks = read.blocks.shape[1] // rows
  columns = len(ages) // blocks
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
    product = lambda a, b, axes: jax.lax.dot_general(
      a, b, (axes, ((0,), (0,))), precision=precision_of(a, b), preferred_element_type=jnp.float32
    )
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
    parts = in_parts(weights, v.dtype)
    mix = product(jnp.concatenate(parts, axis=1), v, ((2,), (1,)))
    mix_ref[row] = shrink[..., :1] * mix_ref[row] + reduce(jnp.add, jnp.split(mix, len(parts), axis=1))
    return carry

  jax.lax.fori_loop(0, count, visit, 0)
