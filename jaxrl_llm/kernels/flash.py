"""Flash attention over packed rows, for the kernels of TPUs and of GPUs."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.kernels import flash_gpu, flash_gpu_kernels, flash_tpu, permutations
from jaxrl_llm.kernels.flash_gpu import Tiles, visits
from jaxrl_llm.kernels.flash_tpu import ACTIVE, FIRST_OF_KEYS, FIRST_OF_QUERIES, LAST_OF_KEYS, LAST_OF_QUERIES, WHOLE, Ids, Pairs
from jaxrl_llm.kernels.precision import precision_of
from jaxrl_llm.kernels.visibility import Window, blocks_seen, padded

_BLOCKS = (1024, 512, 256, 128)
"""Tokens per block on TPUs, multiples of the 128 lanes of a TPU's vector registers.

Larger blocks read keys and values less often and take fewer steps.
"""

_SUMS = 24 * 2**20
"""Bytes of fast memory for the gradients of keys and values: 24,576 tokens of heads of 128.

The backward pass takes the keys of a longer row in several parts, one after the other.
"""

_PAIRS = 50_000
"""Most pairs of blocks. Their five lists lie in a core's scalar memory of 1 MB."""


class Kernels(NamedTuple):
  """The kernels of a platform, and what they read.

  Attributes:
    layout: Axes of the queries, keys and values that the kernels take: "bhtc" or "bthc".
    reads: Function from the width of a head to whether the kernels read it.
    sizes: Function `(q, k, stripe) -> sizes`, which has a block of `queries` and of `keys` that
      divide what the kernels take.
    lists: Function `(segments, prefixes, keys, slots, sizes, window) -> lists` of the blocks to
      visit.
    forward: Function `(q, k, v, ids, lists, *, sizes, interpret) -> (out, log_sum)`, which has the
      elements of B·H·T in this order.
    backward: Function `(q, k, v, d_out, log_sum, mean, ids, lists, *, sizes, interpret) -> (d_q,
      d_k, d_v)`.
  """

  layout: str
  reads: Callable[[int], bool]
  sizes: Callable
  lists: Callable
  forward: Callable
  backward: Callable


class _Sizes(NamedTuple):
  """Sizes of a TPU's kernels, in tokens.

  Attributes:
    queries: Block of queries.
    keys: Block of keys.
    part: Part of the keys at a time in the backward pass, a multiple of their block.
  """

  queries: int
  keys: int
  part: int

  def parts(self, length: int) -> list[slice]:
    """Returns the parts of a row of keys."""
    return [slice(i, i + self.part) for i in range(0, length, self.part)]


def flash_attention(
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
  platform: str = "tpu",
  interpret: Any = False,
) -> Float[Array, "B T H C"]:
  """Computes causal attention within each sequence and to its prefix.

  The kernels visit only pairs of blocks in which a query sees a key, found from the segments at run
  time. Scores never leave the chip; softmax and sums are in float32.

  Arguments and result are those of `chunked_attention`. `platform` is a key of `KERNELS`.
  `interpret` is true to emulate its kernels, slowly, on other devices; parameters of Pallas' TPU
  interpreter simulate memory, too.

  Raises:
    ValueError: If the kernels do not read heads of this width, or if the rows have too many pairs
      of blocks for a device.

  References:
    FlashAttention-2, arXiv:2307.08691, 2023.
  """
  kernels, length = KERNELS[platform], q.shape[1]
  if not kernels.reads(width := q.shape[3]):
    raise ValueError(
      f"model.attention: found 'flash' with heads of width {width}, expected 64, 128 or 256 on a {platform}; set "
      "model.attention='auto'"
    )
  keys, sizes = segments if keys is None else keys, kernels.sizes(q, k, stripe)
  slots = (jnp.arange(length, dtype=jnp.int32) if slots is None else slots)[None]
  q, segments, prefixes, slots = (None if x is None else padded(x, sizes.queries) for x in (q, segments, prefixes, slots))
  k, v, keys = (padded(x, sizes.keys) for x in (k, v, keys))
  window = window and Window(padded(window.firsts, sizes.queries), padded(window.positions, sizes.keys))
  lists = kernels.lists(segments, prefixes, keys, slots[0], sizes, window)
  ids = _ids(segments, prefixes, keys, slots, window)
  # A remat policy that keeps them by name spares the backward pass of each layer their lists.
  lists, ids = jax.tree.map(lambda x: checkpoint_name(x, "visits"), (lists, ids))
  in_layout = lambda x: x.transpose(0, 2, 1, 3) if kernels.layout == "bhtc" else x
  out = _attend(platform, sizes, interpret, *map(in_layout, (q, k, v)), ids, lists)
  return in_layout(out)[:, :length]


def _tpu_sizes(q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], stripe: int | None) -> _Sizes:
  """Returns the sizes of a TPU's kernels; see `flash_attention` for the refusal.

  A block of queries lies within one stripe.
  """
  (batch, length, _, width), size = q.shape, block(k.shape[1])
  most = _SUMS // (2 * 4 * max(width, 128))  # Fast memory has 128 lanes, used or not.
  sizes = _Sizes(max(min(block(length), stripe or length), _BLOCKS[-1]), size, max(most // size, 1) * size)
  if (count := batch * -(-length // sizes.queries) * -(-k.shape[1] // size)) > _PAIRS:
    raise ValueError(
      f"model.attention: found 'flash' with {count} pairs of blocks on a device ({batch} x {length} queries, {k.shape[1]} keys "
      f"per row), expected at most {_PAIRS}; set a larger mesh.context, shorter learner.row_tokens, or model.attention='chunked'"
    )
  return sizes


def block(length: int) -> int:
  """Returns a TPU's tokens per block: the most that pad a row by no more than a quarter.

  Example:
    >>> [block(length) for length in (18432, 5000, 1536, 1100, 100)]
    [1024, 1024, 512, 256, 128]
  """
  return next((size for size in _BLOCKS if 4 * (-length % size) <= length), _BLOCKS[-1])


def _ids(segments: Array, prefixes: Array | None, keys: Array, slots: Array, window: Window | None) -> Ids:
  # Padding among the keys has id 0, which no query looks for.
  own = [jnp.where(x > 0, x, -1) for x in (segments, prefixes) if x is not None]
  key_slots = jnp.broadcast_to(jnp.arange(keys.shape[1], dtype=jnp.int32), keys.shape)
  firsts, positions = ([], []) if window is None else ([window.firsts], [window.positions])
  queries = jnp.stack([*own, jnp.broadcast_to(slots, segments.shape), *firsts], axis=1)
  return Ids(queries, jnp.stack([keys, key_slots, *positions], axis=1))


def _visible(
  segments: Array, prefixes: Array | None, keys: Array, slots: Array, block_q: int, block_k: int, window: Window | None = None
) -> tuple[Bool[Array, "B I J"], Bool[Array, "B I J"]]:
  """Returns in which pairs of blocks a query sees a key, and in which each sees all."""
  batch = segments.shape[0]
  split = lambda x, size: None if x is None else x.reshape(batch, -1, size)
  segments, prefixes, keys = split(segments, block_q), split(prefixes, block_q), split(keys, block_k)
  slots, window = slots.reshape(-1, block_q), window and Window(split(window.firsts, block_q), split(window.positions, block_k))
  first, seen = slots.min(-1), blocks_seen(segments, prefixes, keys, slots.max(-1), window)
  # The only segment of a block, or 0.
  one = lambda x: jnp.where(x.min(-1) == x.max(-1), x.max(-1), 0)
  of_keys = one(keys)[:, None]
  whole = one(segments)[:, :, None] == of_keys
  if prefixes is not None:
    whole |= one(prefixes)[:, :, None] == of_keys
  whole &= (of_keys > 0) & (first[:, None] + 1 >= (jnp.arange(keys.shape[1]) + 1) * block_k)
  if window is not None:
    whole &= window.positions.min(-1)[:, None] >= window.firsts.max(-1)[:, :, None]
  return seen, whole & seen


def _pairs(
  segments: Array, prefixes: Array | None, keys: Array, slots: Array, sizes: _Sizes, window: Window | None = None
) -> tuple[Pairs, list[Pairs]]:
  """Lists the pairs of blocks to visit, for all keys and for each part of keys."""
  seen, whole = _visible(segments, prefixes, keys, slots, sizes.queries, sizes.keys, window)
  every, parts = _listed(seen, whole), sizes.parts(keys.shape[1])
  if len(parts) == 1:
    return every, [every]
  blocks = [slice(part.start // sizes.keys, part.stop // sizes.keys) for part in parts]
  return every, [_listed(seen[..., part], whole[..., part]) for part in blocks]


def _listed(seen: Bool[Array, "B I J"], whole: Bool[Array, "B I J"]) -> Pairs:
  """Lists the pairs of blocks in which a query sees a key, or each sees all in those of `whole`."""
  others = jnp.arange(seen.shape[2])
  # A block that sees nothing, or that nothing sees, is visited once, to write zeros.
  visited = seen | (~seen.any(2, keepdims=True) & (others == 0))
  visited |= ~visited.any(1, keepdims=True) & (jnp.arange(seen.shape[1])[:, None] == seen.shape[1] - 1)
  turns = [jnp.cumsum(visited, axis) * visited for axis in (2, 1)]
  ends = [x for turn, axis in zip(turns, (2, 1), strict=True) for x in (turn == 1, turn == turn.max(axis, keepdims=True))]
  bits = (ACTIVE, WHOLE, FIRST_OF_QUERIES, LAST_OF_QUERIES, FIRST_OF_KEYS, LAST_OF_KEYS)
  flags = sum(bit * x.astype(jnp.int32) for bit, x in zip(bits, (seen, whole & seen, *ends), strict=True))
  order, _ = permutations.true_first(visited.ravel())
  flags, count, steps = flags.ravel()[order], visited.sum(dtype=jnp.int32), jnp.arange(order.size)
  rows, queries, keys = (x.astype(jnp.int32) for x in jnp.unravel_index(order, seen.shape))
  leaves = jnp.where((flags & LAST_OF_KEYS != 0) & (steps < count), steps, order.size - 1)
  return Pairs(rows, queries, keys, keys[jax.lax.cummin(leaves, reverse=True)], flags, count)


def _tpu_forward(q, k, v, ids: Ids, lists, *, sizes: _Sizes, interpret: Any):
  return flash_tpu.forward(q, k, v, ids, lists[0], sizes=sizes[:2], interpret=interpret)


def _tpu_backward(q, k, v, d_out, log_sum, mean, ids: Ids, lists, *, sizes: _Sizes, interpret: Any):
  of_parts = lists[1]
  d_q, d_k, d_v = zip(*(
    flash_tpu.backward(
      q, k[:, :, part], v[:, :, part], d_out, log_sum, mean, Ids(ids.queries, ids.keys[:, :, part]), pairs,
      sizes=sizes[:2], d_q_type=q.dtype if len(of_parts) == 1 else jnp.float32, interpret=interpret,
    )
    for part, pairs in zip(sizes.parts(k.shape[2]), of_parts, strict=True)
  ))  # fmt: skip
  d_k, d_v = (jnp.concatenate(x, axis=2) for x in (d_k, d_v))
  return sum(d_q[1:], start=d_q[0]).astype(q.dtype), d_k, d_v


def _gpu_lists(
  segments: Array, prefixes: Array | None, keys: Array, slots: Array, sizes: flash_gpu.Sizes, window: Window | None = None
) -> flash_gpu.Lists:
  """Lists the blocks that each block of queries visits, in two kernels, and each block of keys."""

  def visible(tiles: Tiles):
    return _visible(segments, prefixes, keys, slots, tiles.queries, tiles.keys, window)

  by_keys = (x.swapaxes(1, 2) for x in visible(sizes.of_keys))
  return flash_gpu.Lists(visits(*visible(sizes.forward)), visits(*visible(sizes.of_queries)), visits(*by_keys))


_TPU = Kernels("bhtc", lambda width: True, _tpu_sizes, _pairs, _tpu_forward, _tpu_backward)
_GPU = Kernels("bthc", flash_gpu.reads, flash_gpu.sizes_of, _gpu_lists, flash_gpu_kernels.forward, flash_gpu_kernels.backward)
KERNELS = {"tpu": _TPU, "gpu": _GPU, "cpu": _TPU}
"""Kernels by platform; CPUs emulate those of TPUs."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(platform: str, sizes: Any, interpret: Any, q: Array, k: Array, v: Array, ids: Ids, lists: Any) -> Array:
  return _forward(platform, sizes, interpret, q, k, v, ids, lists)[0]


def _forward(platform, sizes, interpret, q, k, v, ids, lists):
  out, log_sum = KERNELS[platform].forward(q, k, v, ids, lists, sizes=sizes, interpret=interpret)
  # A remat policy that saves both by name spares the backward pass this kernel.
  out, log_sum = checkpoint_name(out, "attention"), checkpoint_name(log_sum, "attention")
  return out, (q, k, v, ids, lists, out, log_sum)


def _backward(platform, sizes, interpret, saved, d_out):
  (q, k, v, ids, lists, out, log_sum), kernels = saved, KERNELS[platform]
  # The mean of the weights' gradients, weighted by the weights.
  subscripts = f"{kernels.layout},{kernels.layout}->bht"
  mean = jnp.einsum(subscripts, out, d_out, precision=precision_of(out, d_out), preferred_element_type=jnp.float32)
  mean = mean.reshape(log_sum.shape)
  return *kernels.backward(q, k, v, d_out, log_sum, mean, ids, lists, sizes=sizes, interpret=interpret), None, None


_attend.defvjp(_forward, _backward)
