"""Pallas kernels for GPUs, lowered to Triton: attention over packed rows, and its gradients.

Each program has a block of queries, or of keys, and the list of the blocks of the other kind with
which it shares a visible pair. No two programs write the same memory, so that results are the same
bits in every run. The softmax and all sums are in float32.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.kernels.flash_gpu import Lists, Sizes, Tiles, Visits
from jaxrl_llm.kernels.flash_tpu import Ids, is_seen
from jaxrl_llm.kernels.precision import dot
from jaxrl_llm.kernels.visibility import MASKED

# Exponentials are powers of 2, which is what the hardware computes.
_LOG2_E = math.log2(math.e)


def _specs(q: Array, k: Array, ids: Ids, tiles: Tiles) -> tuple:
  """Returns the blocks of the programs `(head, block, row)` that have a block of queries.

  They are those of the lists, the queries, their sums, the keys, and the ids. The last blocks come
  first, since they see the most keys: what starts last should be short.
  """
  from jax.experimental import pallas as pl

  group, last = q.shape[2] // k.shape[2], q.shape[1] // tiles.queries - 1
  num_ids, (_, length, _, width) = ids.queries.shape[1], k.shape
  listed = lambda size: pl.BlockSpec((None, None, size), lambda h, i, b: (b, last - i, 0))
  queries = pl.BlockSpec((None, tiles.queries, None, width), lambda h, i, b: (b, last - i, h, 0))
  sums = pl.BlockSpec((None, None, tiles.queries), lambda h, i, b: (b, h, last - i))
  keys = pl.BlockSpec((None, length, None, width), lambda h, i, b: (b, 0, jax.lax.div(h, group), 0))
  of_queries = pl.BlockSpec((None, num_ids, tiles.queries), lambda h, i, b: (b, 0, last - i))
  of_keys = pl.BlockSpec((None, ids.keys.shape[1], length), lambda h, i, b: (b, 0, 0))
  return [listed(length // tiles.keys), listed(2)], queries, sums, keys, [of_queries, of_keys]


def forward(
  q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], v: Float[Array, "B S K C"], ids: Ids, lists: Lists,
  *, sizes: Sizes, interpret: bool,
) -> tuple[Float[Array, "B T H C"], Float[Array, "B H T"]]:  # fmt: skip
  """Computes attention and the base-2 log-sum-exp of its scores.

  Args:
    q: Queries. Head h reads key-value head h·K // H.
    k: Keys.
    v: Values.
    ids: Segments and slots of queries and keys.
    lists: Blocks that the kernels visit.
    sizes: Tiles of the kernels, which divide the rows.
    interpret: Whether to emulate the kernels.

  Returns:
    The attention, and the log-sum-exp. Both are 0 for a query that sees nothing.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton as pltriton

  (batch, length, num_heads, width), tiles = q.shape, sizes.forward
  listed, queries, sums, keys, of_ids = _specs(q, k, ids, tiles)
  return pl.pallas_call(
    partial(_forward, scale=width**-0.5, block=tiles.keys),
    grid=(num_heads, length // tiles.queries, batch),
    in_specs=[*listed, queries, keys, keys, *of_ids],
    out_specs=[queries, sums],
    out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, num_heads, length), jnp.float32)],
    interpret=interpret,
    name="flash_forward",
    compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
  )(*lists.forward, q, k, v, *ids)


def _visit_all(counts_ref, blocks_ref, block: int, visit, carry, *, repeats: int = 1):
  """Folds `visit(is_whole, slice of a block, repeat, carry)` over the listed blocks."""
  from jax.experimental import pallas as pl

  def step(is_whole, i, carry):
    index, repeat = (i, 0) if repeats == 1 else (jax.lax.div(i, repeats), jax.lax.rem(i, repeats))
    here = pl.ds(pl.multiple_of(blocks_ref[index] * block, block), block)
    return visit(is_whole, here, repeat, carry)

  whole, seen = counts_ref[0] * repeats, counts_ref[1] * repeats
  carry = jax.lax.fori_loop(0, whole, partial(step, True), carry)
  return jax.lax.fori_loop(whole, seen, partial(step, False), carry)


def _forward(blocks_ref, counts_ref, q_ref, k_ref, v_ref, ids_ref, key_ids_ref, out_ref, log_sum_ref, *, scale: float, block: int):
  q = q_ref[...]
  ids = [ids_ref[i, :][:, None] for i in range(ids_ref.shape[0])]

  def visit(is_whole, here, _, carry):
    before, total, mix = carry
    k, v = k_ref[here, :], v_ref[here, :]
    scores = dot(q, k, 1, 1) * (scale * _LOG2_E)
    if not is_whole:
      scores = jnp.where(is_seen(ids, [key_ids_ref[i, here][None] for i in range(key_ids_ref.shape[0])]), scores, MASKED)
    top = jnp.maximum(before, jnp.max(scores, axis=1))
    shrink, weights = jnp.exp2(before - top), jnp.exp2(scores - top[:, None])
    # A query that has seen nothing so far sums up weights of 1, which the first true score shrinks
    # to 0.
    total = shrink * total + jnp.sum(weights, axis=1)
    return top, total, shrink[:, None] * mix + dot(weights.astype(v.dtype), v, 1, 0)

  size = q.shape[0]
  nothing = jnp.full(size, MASKED, jnp.float32), jnp.zeros(size, jnp.float32), jnp.zeros(q.shape, jnp.float32)
  top, total, mix = _visit_all(counts_ref, blocks_ref, block, visit, nothing)
  sees = top > MASKED
  total = jnp.where(sees, total, 1)
  out_ref[...] = jnp.where(sees[:, None], mix / total[:, None], 0).astype(out_ref.dtype)
  log_sum_ref[...] = jnp.where(sees, top + jnp.log2(total), 0)


def backward(
  q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], v: Float[Array, "B S K C"], d_out: Float[Array, "B T H C"],
  log_sum: Float[Array, "B H T"], mean: Float[Array, "B H T"], ids: Ids, lists: Lists, *, sizes: Sizes, interpret: bool,
) -> tuple[Float[Array, "B T H C"], Float[Array, "B S K C"], Float[Array, "B S K C"]]:  # fmt: skip
  """Computes the gradients of queries, keys and values.

  They are 0 for a query that sees nothing, and for a key that nothing sees. Besides the arguments
  of `forward`, it takes some of its own.

  Args:
    d_out: Gradient of the attention.
    log_sum: Base-2 log-sum-exp, from `forward`.
    mean: Mean of the weights' gradients, weighted by the weights.
  """
  arguments = (q, k, v, d_out, log_sum, mean, *ids)
  d_q = _gradient_of_queries(arguments, ids, lists.of_queries, sizes.of_queries, interpret)
  return d_q, *_gradients_of_keys(arguments, ids, lists.of_keys, sizes.of_keys, interpret)


def _gradient_of_queries(arguments: tuple[Array, ...], ids: Ids, read: Visits, tiles: Tiles, interpret: bool) -> Array:
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton as pltriton

  q, k, *_ = arguments
  batch, length, num_heads, width = q.shape
  listed, queries, sums, keys, of_ids = _specs(q, k, ids, tiles)
  return pl.pallas_call(
    partial(_backward_of_queries, scale=width**-0.5, block=tiles.keys),
    grid=(num_heads, length // tiles.queries, batch),
    in_specs=[*listed, queries, keys, keys, queries, sums, sums, *of_ids],
    out_specs=queries,
    out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    interpret=interpret,
    name="flash_backward_of_queries",
    compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
  )(*read, *arguments)


def _backward_of_queries(
  blocks_ref, counts_ref, q_ref, k_ref, v_ref, d_out_ref, log_sum_ref, mean_ref, ids_ref, key_ids_ref, d_q_ref, *, scale: float, block: int
):
  q, d_out, log_sum, mean = q_ref[...], d_out_ref[...], log_sum_ref[...][:, None], mean_ref[...][:, None]
  ids = [ids_ref[i, :][:, None] for i in range(ids_ref.shape[0])]

  def visit(is_whole, here, _, d_q):
    k, v = k_ref[here, :], v_ref[here, :]
    scores = dot(q, k, 1, 1) * (scale * _LOG2_E) - log_sum
    if not is_whole:
      scores = jnp.where(is_seen(ids, [key_ids_ref[i, here][None] for i in range(key_ids_ref.shape[0])]), scores, MASKED)
    d_scores = jnp.exp2(scores) * (dot(d_out, v, 1, 1) - mean)
    return d_q + dot(d_scores.astype(k.dtype), k, 1, 0)

  d_q = _visit_all(counts_ref, blocks_ref, block, visit, jnp.zeros(q.shape, jnp.float32))
  d_q_ref[...] = (d_q * scale).astype(d_q_ref.dtype)


def _gradients_of_keys(arguments: tuple[Array, ...], ids: Ids, read: Visits, tiles: Tiles, interpret: bool) -> tuple[Array, Array]:
  """Computes the gradients of keys and values.

  The program of a block of keys sums over all query heads that read them.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import triton as pltriton

  q, k, v, *_ = arguments
  (batch, length, num_heads, width), num_kv_heads = q.shape, k.shape[2]
  group = num_heads // num_kv_heads
  listed = lambda size: pl.BlockSpec((None, None, size), lambda h, j, b: (b, j, 0))
  keys = pl.BlockSpec((None, tiles.keys, None, width), lambda h, j, b: (b, j, h, 0))
  queries = pl.BlockSpec((None, length, group, width), lambda h, j, b: (b, 0, h, 0))
  sums = pl.BlockSpec((None, group, length), lambda h, j, b: (b, h, 0))
  of_queries = pl.BlockSpec((None, ids.queries.shape[1], length), lambda h, j, b: (b, 0, 0))
  of_keys = pl.BlockSpec((None, ids.keys.shape[1], tiles.keys), lambda h, j, b: (b, 0, j))
  return pl.pallas_call(
    partial(_backward_of_keys, scale=width**-0.5, block=tiles.queries),
    grid=(num_kv_heads, k.shape[1] // tiles.keys, batch),
    in_specs=[listed(length // tiles.queries), listed(2), queries, keys, keys, queries, sums, sums, of_queries, of_keys],
    out_specs=[keys, keys],
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
    interpret=interpret,
    name="flash_backward_of_keys",
    compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
  )(*read, *arguments)


def _backward_of_keys(
  blocks_ref, counts_ref, q_ref, k_ref, v_ref, d_out_ref, log_sum_ref, mean_ref, ids_ref, key_ids_ref, d_k_ref, d_v_ref,
  *, scale: float, block: int,
):  # fmt: skip
  k, v = k_ref[...], v_ref[...]
  key_ids = [key_ids_ref[i, :][:, None] for i in range(key_ids_ref.shape[0])]

  def visit(is_whole, here, head, carry):
    d_k, d_v = carry
    q, d_out = q_ref[here, head, :], d_out_ref[here, head, :]
    # Keys are on the first axis here, so that only the operands of products have to be transposed.
    scores = dot(k, q, 1, 1) * (scale * _LOG2_E) - log_sum_ref[head, here][None]
    if not is_whole:
      ids = [ids_ref[i, here][None] for i in range(ids_ref.shape[0])]
      scores = jnp.where(is_seen(ids, key_ids), scores, MASKED)
    weights = jnp.exp2(scores)
    d_v = d_v + dot(weights.astype(d_out.dtype), d_out, 1, 0)
    d_scores = weights * (dot(v, d_out, 1, 1) - mean_ref[head, here][None])
    return d_k + dot(d_scores.astype(q.dtype), q, 1, 0), d_v

  nothing = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
  d_k, d_v = _visit_all(counts_ref, blocks_ref, block, visit, nothing, repeats=q_ref.shape[1])
  d_k_ref[...] = (d_k * scale).astype(d_k_ref.dtype)
  d_v_ref[...] = d_v.astype(d_v_ref.dtype)
