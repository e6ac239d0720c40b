"""Flash attention for TPUs over packed rows, in one kernel for each direction."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import flash_kernels, permutations
from jaxrl_llm.models.flash_kernels import ACTIVE, FIRST_OF_KEYS, FIRST_OF_QUERIES, LAST_OF_KEYS, LAST_OF_QUERIES, WHOLE, Ids, Pairs
from jaxrl_llm.models.visibility import blocks_seen, padded

_BLOCKS = (1024, 512, 256, 128)
"""Tokens per block, multiples of the 128 lanes of a TPU's vector registers.

Larger blocks read keys and values less often and take fewer steps.
"""


def flash_attention(
  q: Float[Array, "B T H C"],
  k: Float[Array, "B S K C"],
  v: Float[Array, "B S K C"],
  segments: Int[Array, "B T"],
  prefixes: Int[Array, "B T"] | None = None,
  *,
  keys: Int[Array, "B S"] | None = None,
  start: Int[Array, ""] | int = 0,
  interpret: bool = False,
) -> Float[Array, "B T H C"]:
  """Computes causal attention within each sequence and to its prefix.

  The kernels visit only pairs of blocks in which a query sees a key, found from the segments at run
  time. Scores never leave the chip; softmax and sums are in float32.

  Arguments and result are those of `chunked_attention`. `interpret` emulates the kernels, slowly,
  on devices other than TPUs.

  References:
    FlashAttention-2, arXiv:2307.08691, 2023.
  """
  length = q.shape[1]
  keys = segments if keys is None else keys
  sizes = block_q, block_k = block(length), block(k.shape[1])
  q, segments, prefixes = (None if x is None else padded(x, block_q) for x in (q, segments, prefixes))
  k, v, keys = (padded(x, block_k) for x in (k, v, keys))
  pairs = _pairs(segments, prefixes, keys, start, sizes)
  ids = _ids(segments, prefixes, keys, start)
  heads_first = lambda x: x.transpose(0, 2, 1, 3)
  out = _attend(sizes, interpret, *map(heads_first, (q, k, v)), ids, pairs)
  return heads_first(out)[:, :length]


def block(length: int) -> int:
  """Returns the number of tokens per block: the most that pad a row by no more than a quarter.

  Example:
    >>> [block(length) for length in (18432, 5000, 1536, 1100, 100)]
    [1024, 1024, 512, 256, 128]
  """
  return next((size for size in _BLOCKS if 4 * (-length % size) <= length), _BLOCKS[-1])


def _ids(segments: Array, prefixes: Array | None, keys: Array, start: Array | int) -> Ids:
  # Padding among the keys has id 0, which no query looks for.
  own = [jnp.where(x > 0, x, -1) for x in (segments, prefixes) if x is not None]
  slots = lambda x, first: jnp.broadcast_to(first + jnp.arange(x.shape[1], dtype=jnp.int32), x.shape)
  return Ids(jnp.stack([*own, slots(segments, start)], axis=1), jnp.stack([keys, slots(keys, 0)], axis=1))


def _pairs(segments: Array, prefixes: Array | None, keys: Array, start: Array | int, sizes: tuple[int, int]) -> Pairs:
  """Lists the pairs of blocks to visit."""
  (block_q, block_k), batch = sizes, segments.shape[0]
  split = lambda x, size: None if x is None else x.reshape(batch, -1, size)
  segments, prefixes, keys = split(segments, block_q), split(prefixes, block_q), split(keys, block_k)
  first = start + jnp.arange(segments.shape[1]) * block_q
  seen = blocks_seen(segments, prefixes, keys, first + block_q - 1)
  shape, (rows, queries, others) = seen.shape, (jnp.arange(size) for size in seen.shape)
  # A block that nothing sees, or that sees nothing, is visited once, to write zeros.
  visited = seen | (~seen.any(2, keepdims=True) & (others == 0))
  visited |= ~visited.any(1, keepdims=True) & (queries[:, None] == shape[1] - 1)
  last_slot = (others + 1) * block_k - 1
  one = lambda x: jnp.where(x.min(-1) == x.max(-1), x.max(-1), 0)
  whole = one(segments)[:, :, None] == one(keys)[:, None]
  if prefixes is not None:
    whole |= one(prefixes)[:, :, None] == one(keys)[:, None]
  whole &= (one(keys)[:, None] > 0) & (first[:, None] >= last_slot)
  turn = lambda axis: jnp.cumsum(visited, axis) * visited
  ends = [x for axis in (2, 1) for x in (turn(axis) == 1, turn(axis) == jnp.sum(visited, axis, keepdims=True))]
  bits = (ACTIVE, WHOLE, FIRST_OF_QUERIES, LAST_OF_QUERIES, FIRST_OF_KEYS, LAST_OF_KEYS)
  flags = sum(bit * x.astype(jnp.int32) for bit, x in zip(bits, (seen, whole, *ends), strict=True))
  order, _ = permutations.true_first(visited.ravel())
  flags, count = flags.ravel()[order], visited.sum(dtype=jnp.int32)
  rows, queries, others = (x.astype(jnp.int32) for x in jnp.unravel_index(order, shape))
  steps = jnp.arange(order.size)
  leaves = jnp.where((flags & LAST_OF_KEYS != 0) & (steps < count), steps, order.size - 1)
  leaving = others[jax.lax.cummin(leaves, reverse=True)]
  return Pairs(rows, queries, others, leaving, flags, count)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
  sizes: tuple[int, int], interpret: bool, q: Float[Array, "B H T C"], k: Float[Array, "B K S C"], v: Float[Array, "B K S C"],
  ids: Ids, pairs: Pairs,
) -> Float[Array, "B H T C"]:  # fmt: skip
  return _forward(sizes, interpret, q, k, v, ids, pairs)[0]


def _forward(sizes, interpret, q, k, v, ids, pairs):
  out, log_sum = flash_kernels.forward(q, k, v, ids, pairs, sizes=sizes, interpret=interpret)
  # A remat policy that saves both by name spares the backward pass this kernel.
  out, log_sum = checkpoint_name(out, "attention"), checkpoint_name(log_sum, "attention")
  return out, (q, k, v, ids, pairs, out, log_sum)


def _backward(sizes, interpret, saved, d_out):
  q, k, v, ids, pairs, out, log_sum = saved
  mean = jnp.einsum("bhtc,bhtc->bht", out, d_out, preferred_element_type=jnp.float32)[:, :, None]
  d_q, d_k, d_v = flash_kernels.backward(
    q, k, v, d_out, log_sum, mean, ids, pairs, sizes=sizes, d_q_type=q.dtype, interpret=interpret
  )
  return d_q, d_k, d_v, None, None


_attend.defvjp(_forward, _backward)
