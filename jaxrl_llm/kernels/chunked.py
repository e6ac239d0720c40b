"""Attention over packed rows in plain array operations, block by block.

It visits only blocks in which a query sees a key and never holds all scores.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.kernels import permutations
from jaxrl_llm.kernels.partial import joined, mean_of, nothing_of, scored
from jaxrl_llm.kernels.precision import precision_of
from jaxrl_llm.kernels.visibility import MASKED, Window, blocks_seen, padded, visible


class _Blocks(NamedTuple):
  """The tokens of N blocks of queries and M blocks of keys, and the pairs of blocks to visit.

  The pairs are the first `count` entries of `of_queries` and `of_keys`.
  """

  segments: Int[Array, "N q"]
  prefixes: Int[Array, "N q"] | None
  slots: Int[Array, "N q"]
  keys: Int[Array, "M k"]
  key_slots: Int[Array, "M k"]
  window: Window | None
  count: Int[Array, ""]
  of_queries: Int[Array, " P"]
  of_keys: Int[Array, " P"]


def chunked_attention(
  q: Float[Array, "B T H C"],
  k: Float[Array, "B S K C"],
  v: Float[Array, "B S K C"],
  segments: Int[Array, "B T"],
  prefixes: Int[Array, "B T"] | None = None,
  *,
  keys: Int[Array, "B S"] | None = None,
  slots: Int[Array, " T"] | None = None,
  stripe: int | None = None,
  window: Window | None = None,
  block: int = 64,
) -> Float[Array, "B T H C"]:
  """Computes causal attention within each sequence and to its prefix, with the softmax in float32.

  One loop visits the pairs of blocks in which a query sees a key, found from the segments at run
  time. Rows of many short sequences have few such pairs. The backward pass keeps the output and the
  log-sum-exp and recomputes the scores.

  Args:
    q: Queries. Head h reads key-value head h·K // H.
    k: Keys.
    v: Values.
    segments: Segment of each query, from 1; 0 is padding.
    prefixes: Segment that precedes each query's own; 0 is none. None if no query has a prefix.
    keys: Segment of each key; None if queries and keys are the same tokens.
    slots: Slot of each query among the keys; None if they are the first ones.
    stripe: Number of consecutive slots at a time among `slots`, which no block exceeds; None if all
      are consecutive.
    window: Window of each query over its sequence; None if it sees all before it.
    block: Number of tokens of a block.

  Returns:
    The attention; 0 at padding.

  References:
    FlashAttention-2, arXiv:2307.08691, 2023.
  """
  (batch, length, heads, _), groups = q.shape, k.shape[2]
  keys = segments if keys is None else keys
  slots = jnp.arange(length, dtype=jnp.int32) if slots is None else slots
  block = min(block, stripe or block)
  q, k, v, segments, keys, slots = (padded(x, block) for x in (q, k, v, segments, keys, slots[None]))
  prefixes, window = jax.tree.map(lambda x: padded(x, block), (prefixes, window))
  out = _attend(*(_stacked(x, groups, block) for x in (q, k, v)), _blocks(segments, prefixes, keys, slots[0], window, block))
  return _unstacked(out, batch, heads, block)[:, :length]


def _stacked(x: Float[Array, "B T H C"], groups: int, block: int) -> Float[Array, "N K R C"]:
  """Stacks the query heads that read one key-value head, so that they share one matrix product."""
  # [B T H C] -> [B·I, K, H/K·q, C]
  x = x.reshape(x.shape[0], -1, block, groups, x.shape[2] // groups, x.shape[3]).transpose(0, 1, 3, 4, 2, 5)
  return x.reshape(-1, groups, x.shape[3] * block, x.shape[5])


def _unstacked(x: Float[Array, "N K R C"], batch: int, heads: int, block: int) -> Float[Array, "B T H C"]:
  groups, width = x.shape[1], x.shape[3]
  x = x.reshape(batch, -1, groups, heads // groups, block, width).transpose(0, 1, 4, 2, 3, 5)
  return x.reshape(batch, -1, heads, width)


def gradients(
  q: Float[Array, "B T H C"],
  k: Float[Array, "B T K C"],
  v: Float[Array, "B T K C"],
  segments: Int[Array, "B T"],
  prefixes: Int[Array, "B T"] | None,
  out: Float[Array, "B T H C"],
  log_sum: Float[Array, "B T H"],
  d_out: Float[Array, "B T H C"],
  *,
  window: Window | None = None,
  block: int,
) -> tuple[Float[Array, "B T H C"], Float[Array, "B T K C"], Float[Array, "B T K C"]]:
  """Computes the gradients of attention whose output and log-sum-exp are given."""
  (batch, length), groups = segments.shape, k.shape[2]
  heads = q.shape[2], groups, groups
  q, k, v, out, log_sum, d_out = (_stacked(padded(x, block), groups, block) for x in (q, k, v, out, log_sum[..., None], d_out))
  segments, prefixes, window = jax.tree.map(lambda x: padded(x, block), (segments, prefixes, window))
  blocks = _blocks(segments, prefixes, segments, jnp.arange(segments.shape[1], dtype=jnp.int32), window, block)
  *of_tokens, _ = _backward((q, k, v, blocks, out, log_sum[..., 0]), d_out)
  return tuple(_unstacked(x, batch, count, block)[:, :length] for x, count in zip(of_tokens, heads, strict=True))


def _blocks(segments: Array, prefixes: Array | None, keys: Array, slots: Array, window: Window | None, block: int) -> _Blocks:
  batch = segments.shape[0]
  segments, prefixes, keys, window = jax.tree.map(lambda x: x.reshape(batch, -1, block), (segments, prefixes, keys, window))
  slots, key_slots = slots.reshape(-1, block), jnp.arange(keys[0].size, dtype=jnp.int32).reshape(-1, block)
  seen = blocks_seen(segments, prefixes, keys, slots.max(-1), window)
  pairs, _ = permutations.true_first(seen.ravel())  # Pairs of one block of queries stay together.
  of_queries = pairs // seen.shape[2]
  of_keys = pairs // (seen.shape[1] * seen.shape[2]) * seen.shape[2] + pairs % seen.shape[2]
  segments, prefixes, keys, window = jax.tree.map(lambda x: x.reshape(-1, block), (segments, prefixes, keys, window))
  repeat = lambda x: jnp.tile(x, (batch, 1))
  return _Blocks(segments, prefixes, repeat(slots), keys, repeat(key_slots), window, seen.sum(), of_queries, of_keys)


@jax.custom_vjp
def _attend(q: Float[Array, "N K R C"], k: Float[Array, "M K s C"], v: Float[Array, "M K s C"], blocks: _Blocks) -> Float[Array, "N K R C"]:
  return _forward(q, k, v, blocks)[0]


def _scores(q: Array, k: Array, blocks: _Blocks, i: Array, j: Array) -> tuple[Float[Array, "K R s"], Bool[Array, "R s"]]:
  """Computes the scores of one pair of blocks, and which of them count."""
  prefixes = None if blocks.prefixes is None else blocks.prefixes[i]
  causal = blocks.slots[i][:, None] >= blocks.key_slots[j]
  seen = visible(blocks.segments[i], prefixes, blocks.keys[j], causal)
  if blocks.window is not None:
    seen &= blocks.window.sees(i, j)
  return scored(q[i], k[j]), jnp.tile(seen, (q.shape[2] // seen.shape[0], 1))


def _product(subscripts: str, x: Array, y: Array) -> Float[Array, "..."]:
  """Computes an einsum with sums in float32."""
  return jnp.einsum(subscripts, x, y, precision=precision_of(x, y), preferred_element_type=jnp.float32)


def _forward(q, k, v, blocks: _Blocks):
  def visit(step, part):
    i, j = blocks.of_queries[step], blocks.of_keys[step]
    scores, seen = _scores(q, k, blocks, i, j)
    mix = lambda weights: _product("krs,ksc->krc", weights.astype(v.dtype), v[j])
    more = joined(jax.tree.map(lambda x: x[i], part), jnp.where(seen, scores, MASKED), mix)
    return jax.tree.map(lambda x, own: x.at[i].set(own), part, more)

  part = jax.lax.fori_loop(0, blocks.count, visit, nothing_of(q))
  sees = part.top > MASKED  # A query that sees nothing has weights of 1 on meaningless keys.
  total = jnp.where(sees, part.total, 1.0)
  out = jnp.where(sees[..., None], mean_of(part, total), 0).astype(q.dtype)
  # A remat policy that saves both by name spares the backward pass this loop.
  out = checkpoint_name(out, "attention")
  log_sum = checkpoint_name(jnp.where(sees, part.top + jnp.log(total), 0), "attention")
  return out, (q, k, v, blocks, out, log_sum)


def _backward(saved, d_out):
  q, k, v, blocks, out, log_sum = saved
  # The mean of the weights' gradients, weighted by the weights.
  mean = _product("nkrc,nkrc->nkr", out, d_out)

  def visit(step, carry):
    dq, dk, dv = carry
    i, j = blocks.of_queries[step], blocks.of_keys[step]
    scores, seen = _scores(q, k, blocks, i, j)
    weights = jnp.exp(jnp.where(seen, scores - log_sum[i][..., None], MASKED))
    d_weights = _product("krc,ksc->krs", d_out[i], v[j])
    d_scores = (weights * (d_weights - mean[i][..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
    dq = dq.at[i].add(_product("krs,ksc->krc", d_scores, k[j]))
    dk = dk.at[j].add(_product("krs,krc->ksc", d_scores, q[i]))
    dv = dv.at[j].add(_product("krs,krc->ksc", weights.astype(q.dtype), d_out[i]))
    return dq, dk, dv

  gradients = jax.lax.fori_loop(0, blocks.count, visit, tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)))
  return (*(g.astype(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True)), None)


_attend.defvjp(_forward, _backward)
