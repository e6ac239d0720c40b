"""Keys and values kept for decoding: prompts once for all of their samples, responses column by column, and attention to both."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.devices.mesh import BATCH_AXES, num_row_shards
from jaxrl_llm.models.attention import MASKED
from jaxrl_llm.models.config import ModelConfig

CACHE_DTYPES = ("float32", "bfloat16", "int8")


class KeyValues(NamedTuple):
  """Keys and values of one layer for the same S tokens of each of B rows.

  Keys lie with the tokens innermost and values with the head's width innermost: either product of decoding then reads memory in order.

  Attributes:
    k: rotated keys.
    v: values.
    k_scale: of each key where they are held in 8 bits; None otherwise.
    v_scale: as `k_scale`.
  """

  k: Float[Array, "B K C S"] | Int[Array, "B K C S"]
  v: Float[Array, "B K S C"] | Int[Array, "B K S C"]
  k_scale: Float[Array, "B K S"] | None = None
  v_scale: Float[Array, "B K S"] | None = None


class Cache(NamedTuple):
  """All that decoding reads besides the weights; one entry a layer, so that nothing is sliced out of a larger array at each step.

  Attributes:
    prompts: of the prompts, one row a prompt whatever the number of its samples; None where there is nothing to keep.
    blocks: of the responses, a tuple of blocks of columns a layer; attention reads the blocks that there are, and no others.
  """

  prompts: tuple[KeyValues | None, ...]
  blocks: tuple[tuple[KeyValues, ...], ...]


class View(NamedTuple):
  """What the rows of one decoding step see of the cache; the same for all layers.

  Attributes:
    column: where the new tokens' keys and values go, counted through all blocks.
    blocks: for each block, True where a row may attend to a column, the new one included.
    prompts: True where a column of a prompt holds a token; None where the prompts have no cached tokens.
    rows: of each sequence the row that decodes it, for sequences in pieces as the devices hold them; anything where no row does. None
      where row i decodes sequence i.
    sequences: of each row its sequence within the piece, anything where it has none; None as `rows`.
  """

  column: Int[Array, ""]
  blocks: tuple[Bool[Array, "B S"], ...]
  prompts: Bool[Array, "n P"] | None
  rows: Int[Array, "d N"] | None = None
  sequences: Int[Array, "d b"] | None = None


class Partial(NamedTuple):
  """A softmax over a part of the keys, not yet divided: max of the scores, Σ exp(score − max), and Σ exp(score − max)·v."""

  top: Float[Array, "B K G"]
  total: Float[Array, "B K G"]
  mix: Float[Array, "B K G C"]


def _quantized(x: Float[Array, "..."], axis: int) -> tuple[Int[Array, "..."], Float[Array, "..."]]:
  """8 bits and a scale for each head of each token."""
  scale = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axis, keepdims=True) / 127
  held = jnp.round(x / jnp.maximum(scale, 1e-30)).astype(jnp.int8)
  return held, jnp.squeeze(scale, axis)


def key_values(k: Float[Array, "B S K C"], v: Float[Array, "B S K C"], dtype: str) -> KeyValues:
  """Keys and values as a layer computes them, as the cache holds them.

  Args:
    k: rotated keys.
    v: values.
    dtype: of `CACHE_DTYPES`; "int8" is an integer and a float32 scale for each head of each token.
  """
  k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
  if dtype != "int8":
    return KeyValues(k.astype(dtype), v.astype(dtype))
  (k, k_scale), (v, v_scale) = _quantized(k, 2), _quantized(v, 3)
  return KeyValues(k, v, k_scale, v_scale)


def empty(batch: int, columns: int, *, num_kv_heads: int, head_dim: int, dtype: str) -> KeyValues:
  """Room for `columns` tokens of each of `batch` rows."""
  return jax.tree.map(jnp.zeros_like, key_values(*[jnp.zeros((batch, columns, num_kv_heads, head_dim))] * 2, dtype))


def num_bytes(config: ModelConfig, *, num_prompts: int, prompt_tokens: int, num_rows: int, new_tokens: int, dtype: str) -> int:
  """Memory of a cache, in bytes, over all devices.

  Args:
    config: of the model.
    num_prompts: kept once each.
    prompt_tokens: of each, padding included.
    num_rows: responses that are decoded at once.
    new_tokens: room for each of them.
    dtype: of `CACHE_DTYPES`.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> num_bytes(preset("qwen3-0.6b"), num_prompts=64, prompt_tokens=512, num_rows=512, new_tokens=1024, dtype="bfloat16") / 1e9
    63.887638528
  """
  held = jax.eval_shape(lambda: empty(1, 1, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype))
  of_token = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held)) * config.num_layers
  return of_token * (num_prompts * prompt_tokens + num_rows * new_tokens)


def columns_of_blocks(seen: Bool[Array, "B S"], blocks: Sequence[KeyValues]) -> tuple[Bool[Array, "B _"], ...]:
  """A mask over the columns of all blocks, cut into that of each block."""
  ends = list(accumulate(block.v.shape[2] for block in blocks))
  return tuple(seen[:, end - block.v.shape[2] : end] for end, block in zip(ends, blocks, strict=True))


def split_rows(held: KeyValues, mesh: Mesh | None) -> KeyValues:
  """Rows over the axes that split a batch, heads over `tensor`, wherever the mesh divides them."""
  if mesh is None or mesh.size == 1:
    return held
  rows = BATCH_AXES if held.v.shape[0] % num_row_shards(mesh) == 0 else None
  heads = "tensor" if held.v.shape[1] % mesh.shape["tensor"] == 0 else None
  return jax.lax.with_sharding_constraint(held, NamedSharding(mesh, PartitionSpec(rows, heads)))


def filled(blocks: Sequence[KeyValues], found: KeyValues) -> tuple[KeyValues, ...]:
  """Blocks with the last columns of what was prefilled.

  Args:
    blocks: side by side; not more columns in all than were prefilled.
    found: one row a row of the blocks.
  """
  width, axes = found.v.shape[2], KeyValues(3, 2, 2, 2)
  start, parts = width - sum(block.v.shape[2] for block in blocks), []
  for block in blocks:
    size = block.v.shape[2]
    cut = lambda x, axis, start=start, size=size: None if x is None else jax.lax.slice_in_dim(x, start, start + size, axis=axis)
    parts.append(KeyValues(*map(cut, found, axes)))
    start += size
  return tuple(parts)


def write(blocks: Sequence[KeyValues], new: KeyValues, column: Int[Array, ""]) -> tuple[KeyValues, ...]:
  """The blocks with one more token a row.

  Args:
    blocks: side by side.
    new: of one token (S = 1).
    column: counted through all blocks.
  """
  axes, written, start = KeyValues(3, 2, 2, 2), [], 0
  for block in blocks:
    size = block.v.shape[2]
    inside = (column >= start) & (column < start + size)
    index = jnp.clip(column - start, 0, size - 1)

    def put(x, value, axis, index=index, inside=inside):
      if len(blocks) > 1:  # A block that the token is not for gets back what it had: a column of traffic, and no branch.
        value = jnp.where(inside, value, jax.lax.dynamic_slice_in_dim(x, index, 1, axis))
      return jax.lax.dynamic_update_slice_in_dim(x, value, index, axis)

    present = [name for name in KeyValues._fields if getattr(block, name) is not None]
    written.append(block._replace(**{name: put(getattr(block, name), getattr(new, name), getattr(axes, name)) for name in present}))
    start += size
  return tuple(written)


def attend(q: Float[Array, "B K G C"], held: KeyValues, mask: Bool[Array, "B S"]) -> Partial:
  """One part of the attention of queries to cached tokens, scores and sums in float32.

  Args:
    q: queries, grouped by the key-value head that they read.
    held: keys and values.
    mask: True where a row's queries may attend to a token.
  """
  in_full = lambda x: x.astype(q.dtype) if x.dtype == jnp.int8 else x
  scores = jnp.einsum("bkgc,bkcs->bkgs", q.astype(in_full(held.k).dtype), in_full(held.k), preferred_element_type=jnp.float32)
  scores = scores * q.shape[-1] ** -0.5
  if held.k_scale is not None:
    scores = scores * held.k_scale[:, :, None]
  scores = jnp.where(mask[:, None, None], scores, MASKED)
  top = jnp.max(scores, axis=-1)
  weights = jnp.exp(scores - top[..., None])
  total = jnp.sum(weights, axis=-1)
  if held.v_scale is not None:
    weights = weights * held.v_scale[:, :, None]
  v = in_full(held.v)
  mix = jnp.einsum("bkgs,bksc->bkgc", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
  return Partial(top, total, mix)


def merge(parts: Sequence[Partial]) -> Float[Array, "B K G C"]:
  """softmax(scores)·v over the keys of all parts together: Σ_i e^(m_i − m) mix_i / Σ_i e^(m_i − m) total_i, with m = max m_i.

  Args:
    parts: at least one key of them all is not masked.

  References:
    FlashAttention, arXiv:2205.14135, 2022; Hydragen (shared prefixes), arXiv:2402.05099, 2024.
  """
  top = parts[0].top
  for part in parts[1:]:
    top = jnp.maximum(top, part.top)
  shares = [jnp.exp(part.top - top) for part in parts]
  total = sum(share * part.total for share, part in zip(shares, parts, strict=True))
  return sum(share[..., None] * part.mix for share, part in zip(shares, parts, strict=True)) / total[..., None]


def attend_prompts(q: Float[Array, "B K G C"], held: KeyValues, view: View) -> Partial:
  """The part of attention that all samples of a prompt share: one product a prompt, for all of its rows together.

  Only the queries and the results travel between rows and prompts; the prompts' keys and values are neither copied nor repeated.

  Args:
    q: queries of the rows.
    held: keys and values of the prompts.
    view: says which row decodes which prompt.
  """
  num_prompts = view.prompts.shape[0]
  by_sequence = q if view.rows is None else _along(q, view.rows)
  group = by_sequence.shape[0] // num_prompts
  fold = lambda x: x.reshape(num_prompts, group, *x.shape[1:]).swapaxes(1, 2)  # [n, K, group, G, ...]
  flat = lambda x: x.reshape(num_prompts, x.shape[1], -1, *x.shape[4:])
  part = attend(flat(fold(by_sequence)), held, view.prompts)

  def unfold(x):
    x = x.reshape(num_prompts, x.shape[1], group, q.shape[2], *x.shape[3:]).swapaxes(1, 2)
    x = x.reshape(num_prompts * group, *x.shape[2:])
    return x if view.sequences is None else _along(x, view.sequences)

  return Partial(*map(unfold, part))


def _along(x: Float[Array, "..."], index: Int[Array, "d M"]) -> Float[Array, "..."]:
  """x[index], piece by piece: pieces lie on different devices, and nothing of one is ever wanted by another."""
  pieces = x.reshape(index.shape[0], -1, *x.shape[1:])
  taken = jax.vmap(lambda piece, i: jnp.take(piece, i, axis=0, mode="clip"))(pieces, index)
  return taken.reshape(-1, *x.shape[1:])
