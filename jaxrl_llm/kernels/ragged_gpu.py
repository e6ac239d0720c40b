"""The attention kernel of `ragged` for GPUs, which Pallas lowers to Triton.

Each program has a row, a key-value head and a share of the blocks that the row reads, so that a few
long rows still fill a GPU. The shares of a row are joined afterwards, by their log-sum-exps.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.precision import in_parts
from jaxrl_llm.kernels.types import KeyValuesByToken, Partial, Visits
from jaxrl_llm.kernels.visibility import MASKED

COLUMNS = (64,)
"""Columns per block."""

ROWS = 1
"""Number of rows in a group: the rows of a program share nothing that would be read once."""

WIDTHS = "64, 128 or 256"
"""Widths of heads that the kernel reads, in words; see `reads`."""

_QUERIES = 16
"""Least number of queries in a product of matrices. Triton has no smaller ones."""

_PROGRAMS = 512
"""Number of programs that fill a GPU: about four for each multiprocessor of the largest ones."""

_VISITS = 32
"""Largest number of blocks that a program reads, so that the longest row does not end last."""


def reads(head_dim: int) -> bool:
  """Returns whether the kernel reads heads of this width.

  The sizes of Triton's arrays are powers of two, and a block of wider heads does not fit a
  multiprocessor.
  """
  return head_dim in (64, 128, 256)


def num_shares(programs: int, blocks: int) -> int:
  """Returns the number of programs that share the blocks of a row and head.

  Args:
    programs: Number of pairs of a row and a head.
    blocks: Number of blocks of a row.

  Example:
    One row with 8 heads, and 256 rows, with 16,384 columns each:

    >>> num_shares(8, 256), num_shares(2048, 256), num_shares(2048, 4)
    (64, 8, 1)
  """
  return max(-(-blocks // _VISITS), min(blocks, -(-_PROGRAMS // programs)))


def attend(
  q: Float[Array, "B K G C"],
  held: KeyValuesByToken,
  ages: Int[Array, " S"],
  lengths: Int[Array, " B"],
  read: Visits,
  *,
  interpret: bool = False,
) -> Partial:
  """Attends from queries to the cached tokens of their rows, on one device; see `ragged.attend`.

  Raises:
    ValueError: If an int8 array has so many entries that Triton would read the wrong ones.

  References:
    Flash-Decoding, https://pytorch.org/blog/flash-decoding, 2023.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton as pltriton

  batch, num_heads, group, width = q.shape
  # JAX counts offsets with 32 bits in arrays of up to 4 GiB, but Triton takes them as signed.
  if held.k.dtype == jnp.int8 and 1 << 31 < held.k.size <= 1 << 32:
    raise ValueError(
      f"config.rollout.slots: found int8 keys of {held.k.size} entries in a block on a device, expected at most {1 << 31}; set fewer "
      "slots, or more rollout.cache_blocks"
    )
  blocks = read.blocks.shape[1]
  columns = len(ages) // blocks
  shares = num_shares(batch * num_heads, blocks)
  queries = max(_QUERIES, 1 << (group - 1).bit_length())
  of_row = lambda *shape: pl.BlockSpec((None, *shape), lambda share, head, row: (row, *[0] * len(shape)))
  of_head = lambda *shape: pl.BlockSpec((None, None, *shape), lambda share, head, row: (row, head, *[0] * len(shape)))
  of_share = lambda *shape: pl.BlockSpec((None, None, None, *shape), lambda share, head, row: (row, head, share, *[0] * len(shape)))
  arrays = [x for x in held if x is not None]
  num_bytes = width * (q.dtype if held.k.dtype == jnp.int8 else held.k.dtype).itemsize
  part = Partial(
    *pl.pallas_call(
      partial(_kernel, group=group, columns=columns),
      grid=(shares, num_heads, batch),
      in_specs=[
        of_row(blocks),
        of_row(),
        of_row(),
        pl.BlockSpec((len(ages),), lambda *_: (0,)),
        of_head(queries, width),
        *(of_head(*x.shape[2:]) for x in arrays),
      ],
      out_specs=[of_share(queries), of_share(queries), of_share(queries, width)],
      out_shape=[jax.ShapeDtypeStruct((batch, num_heads, shares, group, *of_each), jnp.float32) for of_each in ((), (), (width,))],
      compiler_params=pltriton.CompilerParams(num_warps=4 if num_bytes <= 256 else 8, num_stages=3),
      interpret=interpret,
      name="ragged_decode_attention",
    )(read.blocks, read.counts, lengths, ages, q, *arrays)
  )
  return _joined(part)


def _joined(shares: Partial) -> Partial:
  """Joins the shares of each row, on axis 2, as `cache.merge` does, but without normalising."""
  # JAX's own decode_attention has this barrier against NaNs that appeared when XLA compiled it.
  top = jax.lax.optimization_barrier(jnp.max(shares.top, axis=2))
  weights = jnp.exp(shares.top - top[:, :, None])
  total = jnp.sum(weights * shares.total, axis=2)
  return Partial(top, jnp.where(top > MASKED, total, 1), jnp.sum(weights[..., None] * shares.mix, axis=2))


def _kernel(blocks_ref, count_ref, length_ref, ages_ref, q_ref, k_ref, v_ref, *refs, group: int, columns: int):
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton as pltriton

  *scale_refs, top_ref, total_ref, mix_ref = refs
  share, shares = pl.program_id(0), pl.num_programs(0)
  queries, width = q_ref.shape
  is_query = jnp.arange(queries) < group
  q = pltriton.load(q_ref, mask=is_query[:, None], other=0)
  length = length_ref[...]
  in_full = lambda x: x.astype(q.dtype) if x.dtype == jnp.int8 else x
  # Full precision, because Triton would otherwise round float32 to TF32, which has 10 bits.
  product = partial(jax.lax.dot, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

  def visit(i, carry):
    before, total, mix = carry
    # The shares of a row take turns: neighbours in time then read neighbours in memory.
    here = pl.ds(pl.multiple_of(blocks_ref[share + i * shares] * columns, columns), columns)
    k, v = in_full(k_ref[here, :]), in_full(v_ref[here, :])
    scores = product(q.astype(k.dtype), k.T) * width**-0.5
    if scale_refs:
      scores = scores * scale_refs[0][here][None]
    is_seen = (ages_ref[here] < length)[None]
    scores = jnp.where(is_seen, scores, MASKED)
    top = jnp.maximum(before, jnp.max(scores, axis=1))
    shrink = jnp.exp(before - top)
    weights = jnp.exp(scores - top[:, None])
    total = shrink * total + jnp.sum(weights, axis=1)
    if scale_refs:
      weights = weights * scale_refs[1][here][None]
    mix = sum((product(part, v) for part in in_parts(weights, v.dtype)), start=shrink[:, None] * mix)
    return top, total, mix

  nothing = jnp.full(queries, MASKED, jnp.float32), jnp.zeros(queries, jnp.float32), jnp.zeros((queries, width), jnp.float32)
  # Each block that is read has a token of the row, so that its top is a score.
  top, total, mix = jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(count_ref[...] - share, 0), shares), visit, nothing)
  pltriton.store(top_ref, top, mask=is_query)
  pltriton.store(total_ref, total, mask=is_query)
  pltriton.store(mix_ref, mix, mask=is_query[:, None])
