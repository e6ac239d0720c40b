"""Pallas kernels for TPUs: attention over packed rows, and its gradients.

Both walk a list of the pairs of blocks in which a query sees a key, and nothing else. Scores never
leave the chip; the softmax and all sums are in float32.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.visibility import MASKED

_LANES = 128
# Exponentials are powers of 2, which is what the hardware computes.
_LOG2_E = math.log2(math.e)
# Largest number of query heads that the backward pass takes at once. It holds their gradients.
_HEADS = 8
# Bytes of fast memory, of which a core has 64 MB or more. By default a kernel may use only 16 MB.
_FAST_MEMORY = 56 * 2**20

# Bits of `Pairs.flags`.
ACTIVE, WHOLE, FIRST_OF_QUERIES, LAST_OF_QUERIES, FIRST_OF_KEYS, LAST_OF_KEYS = (1 << i for i in range(6))


class Pairs(NamedTuple):
  """The pairs of a block of queries and a block of keys to visit, by row and block of queries.

  Every block of either kind is part of a pair, so that its results are written.

  Attributes:
    rows: Row of the batch of each pair.
    queries: Block of queries of each pair.
    keys: Block of keys of each pair.
    leaving: Block of keys of the first pair, from each on, that is the last one of its keys.
    flags: Sum of the bits `ACTIVE` (a query sees a key), `WHOLE` (each sees all), and those that
      say whether the pair is the first or last one of its queries or keys.
    count: Number of pairs; entries from there on have no meaning.
  """

  rows: Int[Array, " P"]
  queries: Int[Array, " P"]
  keys: Int[Array, " P"]
  leaving: Int[Array, " P"]
  flags: Int[Array, " P"]
  count: Int[Array, ""]


class Ids(NamedTuple):
  """What decides whether a query sees a key.

  Attributes:
    queries: The segments that each query sees, -1 for none, and its slot in the row.
    keys: The segment of each key, and its slot in the row.
  """

  queries: Int[Array, "B n T"]
  keys: Int[Array, "B 2 S"]


def _is_seen(queries: list[Array], keys: list[Array]) -> Array:
  """Returns which keys are seen. The arguments are `Ids`, with queries and keys on two axes."""
  *segments, slot = queries
  segment, key_slot = keys
  seen = segments[0] == segment
  for other in segments[1:]:
    seen |= other == segment
  return seen & (slot >= key_slot)


def _dot(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
  return jax.lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((), ())), preferred_element_type=jnp.float32)


def _when(flags: Array, *bits: int):
  """Runs a function if any of the bits is set, for each of `bits`."""
  from jax.experimental import pallas as pl

  is_set = flags & bits[0] != 0
  for bit in bits[1:]:
    is_set &= flags & bit != 0
  return pl.when(is_set)


def forward(
  q: Float[Array, "B H T C"], k: Float[Array, "B K S C"], v: Float[Array, "B K S C"], ids: Ids, pairs: Pairs,
  *, sizes: tuple[int, int], interpret: bool,
) -> tuple[Float[Array, "B H T C"], Float[Array, "B H 1 T"]]:  # fmt: skip
  """Computes attention and the base-2 log-sum-exp of its scores.

  Args:
    q: Queries. Head h reads key-value head h·K // H.
    k: Keys.
    v: Values.
    ids: Segments and slots of queries and keys.
    pairs: Pairs of blocks to visit.
    sizes: Tokens in a block of queries and of keys.
    interpret: Whether to emulate the kernel, slowly, on devices other than TPUs.

  Returns:
    The attention, and the log-sum-exp. Both are 0 for a query that sees nothing.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  (_, num_heads, _, width), (block_q, block_k) = q.shape, sizes
  group = num_heads // k.shape[1]
  by_queries = lambda h, p, rows, queries, *_: (rows[p], h, queries[p], 0)
  by_keys = lambda h, p, rows, _, keys, *__: (rows[p], jax.lax.div(h, group), keys[p], 0)
  queries, keys = pl.BlockSpec((None, None, block_q, width), by_queries), pl.BlockSpec((None, None, block_k, width), by_keys)
  num_ids = ids.queries.shape[1]
  return pl.pallas_call(
    partial(_forward, scale=width**-0.5),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=5,
      grid=(num_heads, pairs.count),
      in_specs=[
        queries, keys, keys,
        pl.BlockSpec((None, block_q, num_ids), lambda h, p, rows, queries, *_: (rows[p], queries[p], 0)),
        pl.BlockSpec((None, 2, block_k), lambda h, p, rows, _, keys, *__: (rows[p], 0, keys[p])),
      ],
      out_specs=[queries, pl.BlockSpec((None, None, 1, block_q), lambda h, p, rows, queries, *_: (rows[p], h, 0, queries[p]))],
      scratch_shapes=[pltpu.VMEM((block_q, lanes), jnp.float32) for lanes in (_LANES, _LANES, width)],
    ),
    out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((*q.shape[:2], 1, q.shape[2]), jnp.float32)],
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_FAST_MEMORY),
    interpret=interpret,
    name="flash_forward",
  )(*pairs[:-1], q, k, v, ids.queries.swapaxes(1, 2), ids.keys)  # fmt: skip


def _forward(
  rows, queries, keys, leaving, flags_ref, q_ref, k_ref, v_ref, ids_ref, key_ids_ref, out_ref, log_sum_ref, top_ref, total_ref, mix_ref,
  *, scale: float,
):  # fmt: skip
  from jax.experimental import pallas as pl

  flags = flags_ref[pl.program_id(1)]

  @_when(flags, FIRST_OF_QUERIES)
  def _():
    top_ref[...] = jnp.full(top_ref.shape, MASKED, jnp.float32)
    total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
    mix_ref[...] = jnp.zeros(mix_ref.shape, jnp.float32)

  def visit(is_whole):
    v = v_ref[...]
    scores = _dot(q_ref[...], k_ref[...], 1, 1) * (scale * _LOG2_E)
    if not is_whole:
      ids, key_ids = ids_ref[...], key_ids_ref[...]
      ids = [ids[:, i : i + 1] for i in range(ids.shape[1])]
      scores = jnp.where(_is_seen(ids, [key_ids[:1], key_ids[1:]]), scores, MASKED)
    before = top_ref[...]
    top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    shrink, weights = jnp.exp2(before - top), jnp.exp2(scores - top[:, :1])
    top_ref[...] = top
    # A query that has seen nothing so far sums up weights of 1, which the first true score shrinks
    # to 0.
    total_ref[...] = shrink * total_ref[...] + jnp.sum(weights, axis=1, keepdims=True)
    mix_ref[...] = shrink[:, :1] * mix_ref[...] + _dot(weights.astype(v.dtype), v, 1, 0)

  _visit(flags, visit)

  @_when(flags, LAST_OF_QUERIES)
  def _():
    top = top_ref[...]
    sees = top > MASKED
    total = jnp.where(sees, total_ref[...], 1)
    out_ref[...] = jnp.where(sees[:, :1], mix_ref[...] / total[:, :1], 0).astype(out_ref.dtype)
    log_sum_ref[...] = jnp.where(sees, top + jnp.log2(total), 0).T[:1]


def _visit(flags, visit):
  """Calls `visit(is_whole)` for an active pair. A whole one needs no mask."""
  from jax.experimental import pallas as pl

  is_whole = flags & WHOLE != 0
  pl.when((flags & ACTIVE != 0) & is_whole)(partial(visit, True))
  pl.when((flags & ACTIVE != 0) & ~is_whole)(partial(visit, False))
