"""Flash attention for TPUs over packed rows.

It uses JAX's splash kernels with block tables that are made at run time.
"""

import operator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.precision import default_precision_of, precision_of
from jaxrl_llm.models.visibility import MASKED, blocks_seen, padded

# Tokens per block, multiples of the 128 lanes of a TPU's vector registers. Larger blocks read keys
# and values less often; 1024 leaves too little fast memory for the backward pass.
_BLOCKS = (128, 256, 512)


class _Part(NamedTuple):
  """The kernels' tables for a part of the keys: those of a query's own segment, or of its prefix.

  Attributes:
    ids: Segment that each query looks for; -1 is none.
    visits: Blocks of keys to fetch for each block of queries, and whether any key in them is seen.
    visitors: Blocks of queries to fetch for each block of keys, and whether any of them sees it.
  """

  ids: Int[Array, " N"]
  visits: tuple[Int[Array, "1 I j"], Int[Array, "1 I j"]]
  visitors: tuple[Int[Array, "1 i J"], Int[Array, "1 i J"]]


def splash_attention(
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

  Scores never leave the chip; softmax and sums are in float32. Blocks in which no query sees a key
  are neither fetched nor computed, as found from the segments at run time. The kernels know one id
  per token, so a segment and its prefix are two passes, merged by their log-sum-exps into a softmax
  over both. Their gradients need only the log-sum-exp of the whole, and add.

  Arguments and result are those of `chunked_attention`. `interpret` emulates the kernels, slowly,
  on devices other than TPUs.

  Note:
    The rows of the batch are concatenated into one long row, so that each has its own table. The
    tables keep them apart.
  """
  batch, length, _, width = q.shape
  q = (q.astype(jnp.float32) * width**-0.5).astype(q.dtype)  # The kernels do not scale.
  keys = segments if keys is None else keys
  sizes = block_q, block_k = _block(length), _block(k.shape[1])
  q, *ids = (padded(x, block_q) for x in (q, segments, prefixes) if x is not None)
  k, v, keys = (padded(x, block_k) for x in (k, v, keys))
  parts = [_part(x, keys, start, *sizes) for x in ids]
  slots = jnp.arange(batch)[:, None] * k.shape[1] + start + jnp.arange(q.shape[1])
  fold = lambda x: x.transpose(2, 0, 1, 3).reshape(x.shape[2], -1, width)
  out = _attend(sizes, interpret, *map(fold, (q, k, v)), keys.ravel(), slots.ravel(), parts)
  return out.reshape(-1, batch, q.shape[1], width).transpose(1, 2, 0, 3)[:, :length]


def _block(length: int) -> int:
  return next((size for size in _BLOCKS if size >= length), _BLOCKS[-1])


def _part(ids: Int[Array, "B T"], keys: Int[Array, "B S"], start: Array | int, block_q: int, block_k: int) -> _Part:
  batch, length = ids.shape
  blocks = lambda x, size: x.reshape(batch, -1, size)
  last = start + jnp.arange(block_q, length + 1, block_q) - 1
  seen = blocks_seen(blocks(ids, block_q), None, blocks(keys, block_k), last)
  rows, queries, others = (jnp.arange(size) for size in seen.shape)
  column = jnp.broadcast_to(rows[:, None, None] * others.size + others, seen.shape)
  line = jnp.broadcast_to(rows[:, None, None] * queries.size + queries[:, None], seen.shape)
  return _Part(
    # Padding among the keys has id 0, which no query looks for.
    jnp.where(ids > 0, ids, -1).ravel(),
    _table(*(x.reshape(1, -1, others.size) for x in (column, seen)), axis=2),
    _table(*(x.swapaxes(0, 1).reshape(1, queries.size, -1) for x in (line, seen)), axis=1),
  )


def _table(blocks: Int[Array, "1 i j"], seen: Bool[Array, "1 i j"], *, axis: int) -> tuple[Array, Array]:
  """Returns the block to fetch at each step of the grid, and whether to compute with it.

  A step without work keeps the block that is loaded, so that it causes no traffic.
  """
  before = jax.lax.cummax(jnp.where(seen, blocks, -1), axis=axis)
  first = jnp.take_along_axis(blocks, jnp.argmax(seen, axis, keepdims=True), axis)
  return jnp.where(before >= 0, before, first), seen.astype(jnp.int32)


def _kernels(sizes: tuple[int, int], interpret: bool) -> tuple[Any, Any, dict[str, Any]]:
  """Returns the kernels' module, `MaskInfo`, and the options of forward and backward kernels."""
  # Imported here because only TPUs need them and they take a while to import.
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask_info

  (block_q, block_k), layout = sizes, splash_attention_kernel.QKVLayout.HEAD_DIM_MINOR
  shared = dict(
    mask_value=MASKED, is_mqa=False, mask_function=operator.ge, attn_logits_soft_cap=None, interpret=interpret
  )
  forward = dict(
    **shared,
    block_sizes=splash_attention_kernel.BlockSizes(block_q=block_q, block_kv=block_k, block_kv_compute=block_k),
    residual_checkpoint_name=None,
    save_residuals=True,
  )
  backward = dict(**shared, bq=block_q, bkv=block_k, q_layout=layout, k_layout=layout, v_layout=layout)
  return splash_attention_kernel, splash_attention_mask_info.MaskInfo, dict(forward=forward, backward=backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
  sizes: tuple[int, int], interpret: bool, q: Float[Array, "H N C"], k: Float[Array, "K M C"], v: Float[Array, "K M C"],
  keys: Int[Array, " M"], slots: Int[Array, " N"], parts: list[_Part],
) -> Float[Array, "H N C"]:  # fmt: skip
  return _forward(sizes, interpret, q, k, v, keys, slots, parts)[0]


def _forward(sizes, interpret, q, k, v, keys, slots, parts):
  kernel, info, options = _kernels(sizes, interpret)
  outs, log_sums = [], []
  for part in parts:
    fetch, seen = part.visits
    table, ids = info(fetch, None, seen, None, slots), kernel.SegmentIds(part.ids, keys)
    with default_precision_of(q, k, v):
      out, (log_sum,) = kernel._splash_attention_forward(table, q, k, v, ids, None, **options["forward"])
    sees = log_sum > MASKED / 2  # Otherwise `out` is a mean of values that are not seen, or 0/0.
    outs.append(jnp.where(sees[..., None], out, 0))
    log_sums.append(jnp.where(sees, log_sum, MASKED))
  log_sum = jnp.stack(log_sums)
  if len(parts) == 1:
    out, log_sum = outs[0], log_sum[0]
  else:
    weights = jax.nn.softmax(log_sum, axis=0)[..., None]
    out = sum(x.astype(jnp.float32) * weight for x, weight in zip(outs, weights, strict=True)).astype(q.dtype)
    log_sum = jax.nn.logsumexp(log_sum, axis=0)
  # A remat policy that saves both by name spares the backward pass these kernels. The log-sum-exp
  # is 0 if nothing is seen, since exp(MASKED - 0) is 0.
  out = checkpoint_name(out, "attention")
  log_sum = checkpoint_name(jnp.where(log_sum > MASKED / 2, log_sum, 0), "attention")
  return out, (q, k, v, keys, slots, parts, out, log_sum)


def _backward(sizes, interpret, saved, d_out):
  q, k, v, keys, slots, parts, out, log_sum = saved
  kernel, info, options = _kernels(sizes, interpret)
  # The mean of the weights' gradients, weighted by the weights.
  mean = jnp.einsum("hnc,hnc->hn", out, d_out, precision=precision_of(out, d_out), preferred_element_type=jnp.float32)
  gradients = []
  for part in parts:
    arrays = (q, k, v, kernel.SegmentIds(part.ids, keys), None, log_sum, d_out, mean)
    by_queries, by_keys = (info(fetch, None, seen, None, slots) for fetch, seen in (part.visits, part.visitors))
    with default_precision_of(q, k, v):
      dq = kernel._splash_attention_bwd_dq(*arrays, mask_info=by_queries, **options["backward"])
      _, dk, dv = kernel._splash_attention_bwd_dkv(
        *arrays, mask_info=by_keys, bkv_compute=sizes[1], use_fused_bwd_kernel=False, **options["backward"]
      )
    gradients.append((dq, dk, dv))
  return (*(sum(terms[1:], start=terms[0]) for terms in zip(*gradients, strict=True)), None, None, None)


_attend.defvjp(_forward, _backward)
