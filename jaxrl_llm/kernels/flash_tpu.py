"""Pallas kernels for TPUs: attention over packed rows, and its gradients.

Both walk a list of the pairs of blocks in which a query sees a key, and nothing else. Scores never
leave the chip; the softmax and all sums are in float32.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels.precision import dot
from jaxrl_llm.kernels.visibility import MASKED

_LANES = 128
# Exponentials are powers of 2, which is what the hardware computes.
_LOG2_E = math.log2(math.e)
# Largest number of query heads that the backward pass takes at once. It holds their gradients.
_HEADS = 8
# Bytes of fast memory, of which a core has 64 MB or more. By default a kernel may use only 16 MB.
_FAST_MEMORY = 56 * 2**20

# Queries per part of a block in the forward pass, and keys per part in the backward pass. Parts are
# independent, so that the exponentials of one overlap the products of another.
_QUERIES, _KEYS = 128, 256

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
    queries: The segments that each query sees, -1 for none, and its slot in the row; with a window
      also the first position that it sees.
    keys: The segment of each key, and its slot in the row; with a window also its position.
  """

  queries: Int[Array, "B n T"]
  keys: Int[Array, "B m S"]


def is_seen(queries: list[Array], keys: list[Array]) -> Array:
  """Returns which keys are seen. The arguments are `Ids`, with queries and keys on two axes."""
  segment, key_slot, *positions = keys
  *segments, slot = queries[: len(queries) - len(positions)]
  seen = segments[0] == segment
  for other in segments[1:]:
    seen |= other == segment
  seen &= slot >= key_slot
  return seen & (positions[0] >= queries[-1]) if positions else seen


def _parts(size: int, part: int) -> list[slice]:
  """Returns the parts of a block of `size` tokens, with `part` tokens each, or fewer."""
  return [slice(i, min(i + part, size)) for i in range(0, size, part)]


def _visit(flags: Array, visit: Callable) -> None:
  """Calls `visit(is_whole)` for an active pair. A whole one needs no mask."""
  from jax.experimental import pallas as pl

  is_whole = flags & WHOLE != 0
  pl.when((flags & ACTIVE != 0) & is_whole)(partial(visit, True))
  pl.when((flags & ACTIVE != 0) & ~is_whole)(partial(visit, False))


def forward(
  q: Float[Array, "B H T C"], k: Float[Array, "B K S C"], v: Float[Array, "B K S C"], ids: Ids, pairs: Pairs,
  *, sizes: tuple[int, int], interpret: Any,
) -> tuple[Float[Array, "B H T C"], Float[Array, "B H 1 T"]]:  # fmt: skip
  """Computes attention and the base-2 log-sum-exp of its scores.

  Args:
    q: Queries. Head h reads key-value head h·K // H.
    k: Keys.
    v: Values.
    ids: Segments and slots of queries and keys.
    pairs: Pairs of blocks to visit.
    sizes: Tokens in a block of queries and of keys.
    interpret: Whether to emulate the kernel, or parameters of Pallas' TPU interpreter.

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
        pl.BlockSpec((None, ids.keys.shape[1], block_k), lambda h, p, rows, _, keys, *__: (rows[p], 0, keys[p])),
      ],
      out_specs=[queries, pl.BlockSpec((None, None, 1, block_q), lambda h, p, rows, queries, *_: (rows[p], h, 0, queries[p]))],
      scratch_shapes=[
        *[pltpu.VMEM((block_q, lanes), jnp.float32) for lanes in (_LANES, _LANES, width)],
        *[pltpu.VMEM((block_q, _LANES), jnp.int32)] * num_ids,
      ],
    ),
    out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((*q.shape[:2], 1, q.shape[2]), jnp.float32)],
    compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_FAST_MEMORY),
    interpret=interpret,
    name="flash_forward",
  )(*pairs[:-1], q, k, v, ids.queries.swapaxes(1, 2), ids.keys)  # fmt: skip


def _forward(
  rows, queries, keys, leaving, flags_ref, q_ref, k_ref, v_ref, ids_ref, key_ids_ref, out_ref, log_sum_ref, top_ref, total_ref, mix_ref,
  *wide_ids_ref, scale: float,
):  # fmt: skip
  from jax.experimental import pallas as pl

  flags = flags_ref[pl.program_id(1)]

  @pl.when(flags & FIRST_OF_QUERIES != 0)
  def _():
    top_ref[...] = jnp.full(top_ref.shape, MASKED, jnp.float32)
    total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
    mix_ref[...] = jnp.zeros(mix_ref.shape, jnp.float32)
    for i, ref in enumerate(wide_ids_ref):
      ref[...] = jnp.broadcast_to(ids_ref[:, i : i + 1], ref.shape)

  def visit(is_whole):
    k, v = k_ref[...], v_ref[...]
    parts = _parts(q_ref.shape[0], _QUERIES)
    # A step ahead, since the compiler keeps to the order of the program.
    ahead = dot(q_ref[parts[0]], k, 1, 1)
    for i, part in enumerate(parts):
      scores = ahead * (scale * _LOG2_E)
      if i + 1 < len(parts):
        ahead = dot(q_ref[parts[i + 1]], k, 1, 1)
      if not is_whole:
        ids = [jnp.tile(x[part], (1, k.shape[0] // _LANES)) for x in wide_ids_ref]
        key_ids = [key_ids_ref[i : i + 1] for i in range(key_ids_ref.shape[0])]
        scores = jnp.where(is_seen(ids, key_ids), scores, MASKED)
      before = top_ref[part]
      top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
      shrink, weights = jnp.exp2(before - top), jnp.exp2(scores - jnp.tile(top, (1, k.shape[0] // _LANES)))
      top_ref[part] = top
      # A query that has seen nothing so far sums up weights of 1, which the first true score
      # shrinks to 0.
      total_ref[part] = shrink * total_ref[part] + jnp.sum(weights, axis=1, keepdims=True)
      mix_ref[part] = shrink[:, :1] * mix_ref[part] + dot(weights.astype(v.dtype), v, 1, 0)

  _visit(flags, visit)

  @pl.when(flags & LAST_OF_QUERIES != 0)
  def _():
    top = top_ref[...]
    sees = top > MASKED
    total = jnp.where(sees, total_ref[...], 1)
    out_ref[...] = jnp.where(sees[:, :1], mix_ref[...] / total[:, :1], 0).astype(out_ref.dtype)
    log_sum_ref[...] = jnp.where(sees, top + jnp.log2(total), 0).T[:1]


def backward(
  q: Float[Array, "B H T C"], k: Float[Array, "B K S C"], v: Float[Array, "B K S C"], d_out: Float[Array, "B H T C"],
  log_sum: Float[Array, "B H 1 T"], mean: Float[Array, "B H 1 T"], ids: Ids, pairs: Pairs,
  *, sizes: tuple[int, int], d_q_type: DTypeLike, interpret: Any,
) -> tuple[Float[Array, "B H T C"], Float[Array, "B K S C"], Float[Array, "B K S C"]]:  # fmt: skip
  """Computes the gradients of queries, keys and values.

  Each pair of blocks is computed once, in five products. The sums of a block of queries and those
  of all keys of a row stay in fast memory until they are complete.

  Besides the arguments of `forward`, it takes some of its own.

  Args:
    d_out: Gradient of the attention.
    log_sum: Base-2 log-sum-exp, from `forward`.
    mean: Mean of the weights' gradients, weighted by the weights.
    d_q_type: Dtype of the gradient of the queries.

  Returns:
    The gradients. They are 0 for a query that sees nothing, and for a key that nothing sees.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  (batch, num_heads, _, width), num_kv_heads, (block_q, block_k) = q.shape, k.shape[1], sizes
  parts = num_parts(num_heads // num_kv_heads, num_kv_heads)
  group = num_heads // num_kv_heads // parts
  head = lambda h, g: h * group + g
  queries = pl.BlockSpec((None, None, block_q, width), lambda h, p, g, rows, queries, *_: (rows[p], head(h, g), queries[p], 0))
  lines = pl.BlockSpec((None, None, 1, block_q), lambda h, p, g, rows, queries, *_: (rows[p], head(h, g), 0, queries[p]))
  keys = pl.BlockSpec((None, None, block_k, width), lambda h, p, g, rows, _, keys, *__: (rows[p], jax.lax.div(h, parts), keys[p], 0))
  complete = pl.BlockSpec((None, None, block_k, width), lambda h, p, g, rows, _, __, leaving, ___: (rows[p], h, leaving[p], 0))
  num_ids, num_blocks = ids.queries.shape[1], k.shape[2] // block_k
  d_kv = jax.ShapeDtypeStruct((batch, num_kv_heads * parts, *k.shape[2:]), k.dtype if parts == 1 else jnp.float32)
  d_q, d_k, d_v = pl.pallas_call(
    partial(_backward, scale=width**-0.5),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=5,
      grid=(num_kv_heads * parts, pairs.count, group),
      in_specs=[
        queries, keys, keys, queries, lines, lines,
        pl.BlockSpec((None, num_ids, block_q), lambda h, p, g, rows, queries, *_: (rows[p], 0, queries[p])),
        pl.BlockSpec((None, block_k, ids.keys.shape[1]), lambda h, p, g, rows, _, keys, *__: (rows[p], keys[p], 0)),
      ],
      out_specs=[
        pl.BlockSpec((None, group, block_q, width), lambda h, p, g, rows, queries, *_: (rows[p], h, queries[p], 0)), complete, complete
      ],
      scratch_shapes=[
        pltpu.VMEM((group, block_q, width), jnp.float32), *[pltpu.VMEM((num_blocks, block_k, width), jnp.float32)] * 2
      ],
    ),
    out_shape=[jax.ShapeDtypeStruct(q.shape, d_q_type), d_kv, d_kv],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=_FAST_MEMORY
    ),
    interpret=interpret,
    name="flash_backward",
  )(*pairs[:-1], q, k, v, d_out, log_sum, mean, ids.queries, ids.keys.swapaxes(1, 2))  # fmt: skip
  if parts > 1:
    d_k, d_v = (x.reshape(batch, num_kv_heads, parts, *k.shape[2:]).sum(2).astype(k.dtype) for x in (d_k, d_v))
  return d_q, d_k, d_v


def num_parts(group: int, num_kv_heads: int) -> int:
  """Returns the number of parts into which the query heads of each key-value head are split.

  A part is small enough for fast memory. The number of parts over all key-value heads is even if
  possible, so that both cores of a chip have work.

  Example:
    >>> num_parts(8, 4), num_parts(16, 4), num_parts(8, 1), num_parts(1, 3)
    (1, 2, 2, 1)
  """
  options = [parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= _HEADS]
  return next((parts for parts in options if parts * num_kv_heads % 2 == 0), options[0])


def _backward(
  rows, queries, keys_ref, leaving, flags_ref, q_ref, k_ref, v_ref, d_out_ref, log_sum_ref, mean_ref, ids_ref, key_ids_ref,
  d_q_ref, d_k_ref, d_v_ref, sum_q_ref, sum_k_ref, sum_v_ref, *, scale: float,
):  # fmt: skip
  from jax.experimental import pallas as pl

  pair, head = pl.program_id(1), pl.program_id(2)
  flags, block = flags_ref[pair], keys_ref[pair]

  @pl.when(flags & FIRST_OF_QUERIES != 0)
  def _():
    sum_q_ref[head] = jnp.zeros(sum_q_ref.shape[1:], jnp.float32)

  @pl.when((flags & FIRST_OF_KEYS != 0) & (head == 0))
  def _():
    sum_k_ref[block] = jnp.zeros(sum_k_ref.shape[1:], jnp.float32)
    sum_v_ref[block] = jnp.zeros(sum_v_ref.shape[1:], jnp.float32)

  def visit(is_whole):
    q, d_out, d_q = q_ref[...], d_out_ref[...], []
    # Keys are on the first axis here, so that only one of five products has to transpose.
    for part in _parts(k_ref.shape[0], _KEYS):
      k, v, key_ids = k_ref[part], v_ref[part], key_ids_ref[part]
      scores = dot(k, q, 1, 1) * (scale * _LOG2_E) - log_sum_ref[...]
      if not is_whole:
        ids = [ids_ref[i : i + 1] for i in range(ids_ref.shape[0])]
        scores = jnp.where(is_seen(ids, [key_ids[:, i : i + 1] for i in range(key_ids.shape[1])]), scores, MASKED)
      weights = jnp.exp2(scores)
      sum_v_ref[block, part] += dot(weights.astype(d_out.dtype), d_out, 1, 0)
      d_scores = (weights * (dot(v, d_out, 1, 1) - mean_ref[...])).astype(q.dtype)
      sum_k_ref[block, part] += dot(d_scores, q, 1, 0)
      d_q.append(dot(d_scores, k, 0, 0))
    sum_q_ref[head] += sum(d_q)

  _visit(flags, visit)

  @pl.when(flags & LAST_OF_QUERIES != 0)
  def _():
    d_q_ref[head] = (sum_q_ref[head] * scale).astype(d_q_ref.dtype)

  @pl.when((flags & LAST_OF_KEYS != 0) & (head == pl.num_programs(2) - 1))
  def _():
    d_k_ref[...] = (sum_k_ref[block] * scale).astype(d_k_ref.dtype)
    d_v_ref[...] = sum_v_ref[block].astype(d_v_ref.dtype)
