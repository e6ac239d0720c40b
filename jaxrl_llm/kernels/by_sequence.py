"""Attention over packed rows in the order of each sequence: the learner's half of exact numerics.

The keys of a sequence, its prefix included, are read in blocks that begin with its first token,
wherever its row holds them. A decoding step reads them in the same blocks, so that both get the
same bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl_llm.kernels import chunked, permutations
from jaxrl_llm.kernels.partial import CPU_BLOCK, joined, mean_of, mixed, nothing_of, scored
from jaxrl_llm.kernels.visibility import MASKED, Window


class _Places(NamedTuple):
  """Where the sequence of each token lies, counted through all rows; arbitrary at padding.

  Attributes:
    first: Slot of the first token of its segment.
    size: Number of tokens of its segment.
    prefix: Slot of the first token of its prefix.
    prefix_size: Number of tokens of its prefix.
  """

  first: Int[Array, " N"]
  size: Int[Array, " N"]
  prefix: Int[Array, " N"]
  prefix_size: Int[Array, " N"]


@jax.custom_vjp
def attention_by_sequence(
  q: Float[Array, "B T H C"],
  k: Float[Array, "B T K C"],
  v: Float[Array, "B T K C"],
  segments: Int[Array, "B T"],
  prefixes: Int[Array, "B T"] | None,
  window: Window | None = None,
) -> Float[Array, "B T H C"]:
  """Computes `chunked.chunked_attention` with sums in the order of each sequence.

  The tokens of a segment lie next to each other. The backward pass is that of `chunked_attention`.
  """
  return _forward(q, k, v, segments, prefixes, window)[0]


def _places(segments: Int[Array, "B T"], prefixes: Int[Array, "B T"] | None) -> _Places:
  batch, length = segments.shape
  rows, slots = jnp.arange(batch)[:, None], jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), segments.shape)
  first = jnp.full((batch, length + 1), length, jnp.int32).at[rows, segments].min(slots) + rows * length
  size = jnp.zeros((batch, length + 1), jnp.int32).at[rows, segments].add(1).at[:, 0].set(0)
  before = jnp.zeros_like(segments) if prefixes is None else prefixes
  return _Places(*(table[rows, ids].reshape(-1) for ids in (segments, before) for table in (first, size)))


def _forward(q, k, v, segments, prefixes, window):
  batch, length, heads, width = q.shape
  groups, block, tokens = k.shape[2], CPU_BLOCK, batch * length
  # Bfloat16 products of few rows add in an order of their own.
  flat_q, flat_k, flat_v = (x.astype(jnp.float32).reshape(tokens, *x.shape[2:]) for x in (q, k, v))
  flat_q = jnp.pad(flat_q, ((0, block), (0, 0), (0, 0)))
  places, offsets = _places(segments, prefixes), jnp.arange(block)
  behind = jnp.arange(tokens) - places.first
  is_first = (segments.reshape(-1) > 0) & (behind % block == 0)
  begins, _ = permutations.true_first(is_first)
  firsts = None if window is None else jnp.pad(window.firsts.reshape(-1), (0, block))

  def attend(i, outputs):
    start = begins[i]
    of_start = jax.tree.map(lambda x: x[start], places)
    count = jnp.minimum(of_start.size - behind[start], block)
    here = of_start.prefix_size + behind[start] + offsets
    # [q H C] -> [K H/K·q C], as the blocks of queries in `chunked_attention`.
    queries = jax.lax.dynamic_slice_in_dim(flat_q, start, block).reshape(block, groups, -1, width).transpose(1, 2, 0, 3)
    queries = queries.reshape(groups, -1, width)
    earliest = None if firsts is None else jax.lax.dynamic_slice_in_dim(firsts, start, block)[:, None]

    def visit(j, part):
      keys = j * block + offsets
      after = keys - of_start.prefix_size
      slots = jnp.where(after < 0, of_start.prefix + keys, of_start.first + after)
      slots = jnp.clip(slots, 0, tokens - 1)
      seen = keys <= here[:, None]
      seen = jnp.tile(seen if earliest is None else seen & (keys >= earliest), (queries.shape[1] // block, 1))
      scores = jnp.where(seen, scored(queries, flat_k[slots].transpose(1, 0, 2)), MASKED)
      return joined(part, scores, lambda weights: mixed(weights, flat_v[slots].transpose(1, 0, 2)))

    num_blocks = -(-(of_start.prefix_size + behind[start] + count) // block)
    part = jax.lax.fori_loop(0, num_blocks, visit, nothing_of(queries))
    own = offsets < count

    def put(x, new):
      # [K H/K·q ...] -> [q H ...]; the slots behind the segment's end keep what they hold.
      new = jnp.moveaxis(new.reshape(groups, heads // groups, block, *new.shape[2:]), 2, 0).reshape(block, *x.shape[1:])
      old = jax.lax.dynamic_slice_in_dim(x, start, block)
      new = jnp.where(own.reshape(-1, *[1] * (x.ndim - 1)), new, old)
      return jax.lax.dynamic_update_slice_in_dim(x, new, start, 0)

    return put(outputs[0], mean_of(part).astype(q.dtype)), put(outputs[1], part.top + jnp.log(part.total))

  outputs = jnp.zeros((tokens + block, heads, width), q.dtype), jnp.zeros((tokens + block, heads), jnp.float32)
  outputs = jax.lax.fori_loop(0, jnp.sum(is_first), attend, outputs)
  out, log_sum = (x[:tokens].reshape(batch, length, *x.shape[1:]) for x in outputs)
  # A remat policy that saves both by name spares the backward pass this loop.
  out, log_sum = checkpoint_name(out, "attention"), checkpoint_name(log_sum, "attention")
  return out, (q, k, v, segments, prefixes, window, out, log_sum)


def _backward(saved, d_out):
  *tokens, window, out, log_sum = saved
  return *chunked.gradients(*tokens, out, log_sum, d_out, window=window, block=CPU_BLOCK), None, None, None


attention_by_sequence.defvjp(_forward, _backward)
