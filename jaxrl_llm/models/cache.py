"""The key-value cache of decoding, and attention to it.

Prompts are kept once for all of their samples, and responses column by column.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from jaxrl_llm.devices.mesh import BATCH_AXES, num_row_shards, platform_of
from jaxrl_llm.kernels import columns_tpu
from jaxrl_llm.kernels.partial import CPU_BLOCK, joined, mean_of, mixed, nothing_of
from jaxrl_llm.kernels.precision import precision_of
from jaxrl_llm.kernels.types import KeyValues, KeyValuesByToken, Partial, Visits
from jaxrl_llm.kernels.visibility import MASKED
from jaxrl_llm.models.config import ModelConfig

NOWHERE = jnp.iinfo(jnp.int32).max
"""Column of a token that is not written."""

_PIECE = 256
"""Largest number of columns that a span reads at a time on an accelerator."""

CACHE_DTYPES = ("float32", "bfloat16", "int8")


class Cache(NamedTuple):
  """All that decoding reads besides the weights.

  It has one entry per layer, so that no step has to slice a larger array.

  Attributes:
    prompts: Keys and values of the prompts, one row per prompt whatever the number of its samples;
      None if there is nothing to keep.
    blocks: Keys and values of the responses, a tuple of blocks of columns for each layer. Attention
      reads only the blocks that exist.
  """

  prompts: tuple[KeyValues | None, ...]
  blocks: tuple[tuple[KeyValues, ...], ...]


class View(NamedTuple):
  """The part of the cache that the rows of a decoding step see, the same for all layers.

  Attributes:
    column: Column of the new tokens' keys and values, counted through all blocks: one for all rows,
      or one for each. A row whose column is `NOWHERE` writes nothing.
    ages: Number of steps since each column of each block was written; 0 for the new one. Or, if
      `by_column`, the columns themselves.
    lengths: Number of tokens that each row sees, the new one included. A row sees the columns that
      are younger than that, or before that one.
    reads: Parts of each block that a kernel reads, or whether any row sees a token of it; None if
      all of it is read. See `ragged`.
    prompts: Boolean mask, True if a column of a prompt holds a token; None if no prompt has cached
      tokens.
    rows: Row that decodes each sequence, with sequences in pieces as the devices hold them;
      arbitrary if no row does. None if row i decodes sequence i.
    sequences: Index of each row's sequence within its piece; arbitrary if the row has none. None if
      row i decodes sequence i.
    prompt_reads: Parts of each prompt that a kernel reads; None if all of it is read.
    window: Number of last tokens of its sequence that each row sees in this layer, the new one
      included; None if it sees all.
    by_column: Whether each row has its own columns, from the first to the one of its new token.
  """

  column: Int[Array, ""] | Int[Array, " B"]
  ages: tuple[Int[Array, " S"], ...]
  lengths: Int[Array, " B"]
  reads: tuple[Visits | Bool[Array, ""] | None, ...]
  prompts: Bool[Array, "n P"] | None
  rows: Int[Array, "d N"] | None = None
  sequences: Int[Array, "d b"] | None = None
  prompt_reads: Visits | None = None
  window: int | None = None
  by_column: bool = False

  @property
  def own_lengths(self) -> Int[Array, " B"]:
    """The number of tokens of its response that each row sees, the new one included."""
    return self.lengths if self.window is None else jnp.minimum(self.lengths, self.window)

  def sees(self, block: int) -> Bool[Array, "B S"]:
    """Returns which columns of a block each row sees."""
    ages = self.ages[block]
    if self.window is None or not self.by_column:
      return ages < self.own_lengths[:, None]
    return (ages < self.lengths[:, None]) & (ages >= self.lengths[:, None] - self.window)


class Spans(NamedTuple):
  """Consecutive tokens that are new to a cache in which each row has its own columns.

  Several spans may be of one row. If a mesh splits the rows, it splits the spans into as many
  pieces, each with the spans of the rows of its own devices.

  Attributes:
    rows: Row of each span, counted within its piece; None if span i is of row i.
    columns: Column of each token, counted through all blocks; `NOWHERE` for none. A token sees the
      columns of its row up to its own.
  """

  rows: Int[Array, " N"] | None
  columns: Int[Array, "N T"]


def _quantized(x: Float[Array, "..."], axis: int) -> tuple[Int[Array, "..."], Float[Array, "..."]]:
  """Quantizes to 8 bits, with a scale for each head of each token."""
  scale = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=axis, keepdims=True) / 127
  held = jnp.round(x / jnp.maximum(scale, 1e-30)).astype(jnp.int8)
  return held, jnp.squeeze(scale, axis)


def layout_of(mesh: Mesh | None) -> type[KeyValues]:
  """Returns how the devices of a mesh hold keys and values; None is the default device."""
  return KeyValuesByToken if platform_of(mesh) == "gpu" else KeyValues


def key_values(k: Float[Array, "B S K C"], v: Float[Array, "B S K C"], dtype: str, layout: type[KeyValues] = KeyValues) -> KeyValues:
  """Lays out the rotated keys and the values of a layer as the cache holds them.

  `dtype` is one of `CACHE_DTYPES`; "int8" adds a float32 scale for each head of each token.
  """
  by_token = layout is KeyValuesByToken
  k, v = k.transpose((0, 2, 1, 3) if by_token else (0, 2, 3, 1)), v.transpose(0, 2, 1, 3)
  if dtype != "int8":
    return layout(k.astype(dtype), v.astype(dtype))
  (k, k_scale), (v, v_scale) = _quantized(k, 3 if by_token else 2), _quantized(v, 3)
  return layout(k, v, k_scale, v_scale)


def empty(
  batch: int, columns: int, *, num_kv_heads: int, head_dim: int, dtype: str, layout: type[KeyValues] = KeyValues
) -> KeyValues:
  """Allocates room for `columns` tokens in each of `batch` rows."""
  zeros = jnp.zeros((batch, columns, num_kv_heads, head_dim))
  return jax.tree.map(jnp.zeros_like, key_values(zeros, zeros, dtype, layout))


def num_bytes(
  config: ModelConfig, *, num_prompts: int, prompt_tokens: int, num_rows: int, new_tokens: int, dtype: str, keeps_all: bool = False
) -> int:
  """Returns the memory of a cache in bytes, over all devices.

  Args:
    config: Sizes of the model.
    num_prompts: Number of prompts, each of which is kept once.
    prompt_tokens: Number of tokens of a prompt, padding included.
    num_rows: Number of responses that are decoded at once.
    new_tokens: Number of columns for the tokens of each response.
    dtype: Dtype of the cache, one of `CACHE_DTYPES`.
    keeps_all: Whether layers with a sliding window keep all tokens, not the last ones.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> num_bytes(preset("qwen3-0.6b"), num_prompts=64, prompt_tokens=512, num_rows=512, new_tokens=1024, dtype="bfloat16") / 1e9
    63.887638528
  """
  held = jax.eval_shape(lambda: empty(1, 1, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype))
  of_token = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))
  windows = [None if keeps_all else config.window_of(layer) for layer in range(config.num_layers)]
  tokens = lambda window, count: count if window is None else min(window, count)
  columns = sum(num_prompts * tokens(window, prompt_tokens) + num_rows * tokens(window, new_tokens) for window in windows)
  return of_token * columns


def num_columns(blocks: Sequence[KeyValues]) -> int:
  """Returns the number of columns of all blocks of a layer."""
  return sum(size for _, size in _columns(blocks))


def last_columns(held: KeyValues, size: int | None) -> KeyValues:
  """Returns the last `size` columns, or all if there are fewer or the size is None."""
  first = 0 if size is None else max(held.v.shape[2] - size, 0)
  return _map(lambda x, axis: jax.lax.slice_in_dim(x, first, x.shape[axis], axis=axis), held) if first else held


def _columns(blocks: Sequence[KeyValues]) -> list[tuple[int, int]]:
  """Returns the first column of each block, counted through all blocks, and its size."""
  sizes = [block.v.shape[2] for block in blocks]
  return list(zip(accumulate(sizes, initial=0), sizes))


def _map(function: Callable, *held: KeyValues) -> KeyValues:
  """Applies `function(*arrays, axis)` to each field, with its token axis; None stays None."""
  fields = zip(*held, held[0].token_axes, strict=True)
  return type(held[0])(*(None if arrays[0] is None else function(*arrays, axis) for *arrays, axis in fields))


def columns_of_blocks(ages: Int[Array, " S"], blocks: Sequence[KeyValues]) -> tuple[Int[Array, " _"], ...]:
  """Splits the ages of the columns of all blocks into those of each block."""
  return tuple(ages[start : start + size] for start, size in _columns(blocks))


def split_rows(held: KeyValues, mesh: Mesh | None) -> KeyValues:
  """Shards rows over the batch axes and heads over `tensor`, if the mesh divides them."""
  if mesh is None or mesh.size == 1:
    return held
  return jax.lax.with_sharding_constraint(held, NamedSharding(mesh, _spec(held, mesh)))


def _spec(held: KeyValues, mesh: Mesh) -> PartitionSpec:
  rows = BATCH_AXES if held.v.shape[0] % num_row_shards(mesh) == 0 else None
  return PartitionSpec(rows, "tensor" if held.v.shape[1] % mesh.shape["tensor"] == 0 else None)


def filled(blocks: Sequence[KeyValues], prefilled: KeyValues) -> tuple[KeyValues, ...]:
  """Fills the blocks, row by row, with the last columns of prefilled keys and values.

  The prefilled rows have at least as many columns as all blocks together.
  """
  first = prefilled.v.shape[2] - sum(size for _, size in _columns(blocks))
  cut = lambda start, size: _map(lambda x, axis: jax.lax.slice_in_dim(x, start, start + size, axis=axis), prefilled)
  return tuple(cut(first + start, size) for start, size in _columns(blocks))


def write(
  blocks: Sequence[KeyValues], new: KeyValues, column: Int[Array, ""] | Int[Array, " B"], *, mesh: Mesh | None = None
) -> tuple[KeyValues, ...]:
  """Writes one token per row (S = 1) to a column, counted through all blocks; see `View`."""
  if column.ndim:
    return write_spans(blocks, new, Spans(None, column[:, None]), mesh=mesh)

  def written(block: KeyValues, start: int, size: int) -> KeyValues:
    inside = (column >= start) & (column < start + size)
    index = jnp.clip(column - start, 0, size - 1)

    def put(x, value, axis):
      # The other blocks write their old values again: a column of traffic, but no branch.
      if len(blocks) > 1:
        value = jnp.where(inside, value, jax.lax.dynamic_slice_in_dim(x, index, 1, axis))
      return jax.lax.dynamic_update_slice_in_dim(x, value, index, axis)

    return _map(put, block, new)

  return tuple(written(block, *columns) for block, columns in zip(blocks, _columns(blocks), strict=True))


def _rows(spans: Spans) -> Int[Array, " N"]:
  return jnp.arange(len(spans.columns)) if spans.rows is None else spans.rows


def write_spans(
  blocks: Sequence[KeyValues], new: KeyValues, spans: Spans, *, mesh: Mesh | None = None
) -> tuple[KeyValues, ...]:
  """Writes the tokens of spans to their columns.

  Numbers that are not finite become 0. Masked columns have a weight of exactly 0, and what a row
  has left in its columns must not turn that into NaN for the next sequence there.
  """
  written = partial(_write_local, platform=platform_of(mesh))
  if mesh is not None and mesh.size > 1:
    held = _spec(blocks[0], mesh)
    specs = held, held, PartitionSpec(held[0])
    written = jax.shard_map(written, mesh=mesh, in_specs=specs, out_specs=held, check_vma=False)
  is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  new = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0) if is_float(x) else x, new)
  return written(tuple(blocks), new, spans)


def _write_local(blocks: Sequence[KeyValues], new: KeyValues, spans: Spans, *, platform: str) -> tuple[KeyValues, ...]:
  """Writes the tokens of spans on one device."""

  def written(block: KeyValues, start: int, size: int) -> KeyValues:
    inside = (spans.columns >= start) & (spans.columns < start + size)
    columns = jnp.where(inside, spans.columns - start, size)  # Out-of-bounds writes are dropped.
    if platform == "tpu" and spans.rows is None and columns.shape[1] == 1 and columns_tpu.fits(block):
      return columns_tpu.put(block, new, columns[:, 0])
    return (put_windows if platform == "tpu" else put_tokens)(block, new, _rows(spans), columns)

  return tuple(written(block, *columns) for block, columns in zip(blocks, _columns(blocks), strict=True))


def put_tokens(block: KeyValues, new: KeyValues, rows: Int[Array, " N"], columns: Int[Array, "N T"]) -> KeyValues:
  """Writes each token of a span to its column of a block, by a scatter."""

  def put(x, value, axis):
    where = (rows[:, None], *[slice(None)] * (axis - 1), columns)
    return x.at[where].set(jnp.moveaxis(value, axis, 1), mode="drop", unique_indices=True)

  return _map(put, block, new)


def put_windows(block: KeyValues, new: KeyValues, rows: Int[Array, " N"], columns: Int[Array, "N T"]) -> KeyValues:
  """Does what `put_tokens` does, one span after the other, by slices of consecutive columns.

  For a scatter, XLA for TPUs would lay the whole block out anew, before and after it.
  """
  size, length = block.v.shape[2], columns.shape[1]
  width = min(length, size)
  starts = jnp.clip(jnp.min(columns, axis=1), 0, size - width)

  def write_span(i: Int[Array, ""], block: KeyValues) -> KeyValues:
    is_here = columns[i] == (starts[i] + jnp.arange(width))[:, None]

    def put(x, value, axis):
      where = [rows[i], *[0] * (x.ndim - 1)]
      where[axis] = starts[i]
      sizes = (1, *x.shape[1:axis], width, *x.shape[axis + 1 :])
      value = jnp.take(jax.lax.dynamic_index_in_dim(value, i), jnp.argmax(is_here, axis=1), axis)
      along = [1] * x.ndim
      along[axis] = width
      value = jnp.where(jnp.any(is_here, axis=1).reshape(along), value, jax.lax.dynamic_slice(x, where, sizes))
      return jax.lax.dynamic_update_slice(x, value, where)

    return _map(put, block, new)

  return jax.lax.fori_loop(0, len(rows), write_span, block)


def copy_rows(cache: Cache, sources: Int[Array, " N"], targets: Int[Array, " N"], *, mesh: Mesh | None = None) -> Cache:
  """Copies whole rows of a cache without prompts.

  A target beyond the last row is left out. No source may be a target. Rows are counted and copied
  within pieces, as in `Spans`.
  """
  copy = lambda blocks, sources, targets: jax.tree.map(lambda x: x.at[targets].set(x[sources], mode="drop"), blocks)
  if mesh is not None and mesh.size > 1:
    held = _spec(cache.blocks[0][0], mesh)
    specs = held, PartitionSpec(held[0]), PartitionSpec(held[0])
    copy = jax.shard_map(copy, mesh=mesh, in_specs=specs, out_specs=held, check_vma=False)
  return cache._replace(blocks=copy(cache.blocks, sources, targets))


def take_rows(cache: Cache, rows: Int[Array, " N"]) -> Cache:
  """Returns the given rows of a cache without prompts."""
  return cache._replace(blocks=jax.tree.map(lambda x: x[rows], cache.blocks))


def put_rows(cache: Cache, rows: Int[Array, " N"], own: Cache) -> Cache:
  """Replaces the given rows of a cache without prompts; one beyond the last row is left out."""
  return cache._replace(blocks=jax.tree.map(lambda x, new: x.at[rows].set(new, mode="drop"), cache.blocks, own.blocks))


def map_prompts(function: Callable[[PyTree], PyTree], cache: Cache) -> Cache:
  """Applies a function to the tree of arrays [n ...] with the prompts' keys and values."""
  return cache._replace(prompts=function(cache.prompts))


def attend(
  q: Float[Array, "B K G C"], held: KeyValues, mask: Bool[Array, "B S"] | Bool[Array, "B G S"], before: Partial | None = None
) -> Partial:
  """Attends from queries to a part of the cached tokens, with scores and sums in float32.

  Queries are grouped by the key-value head that they read. The mask is True if the queries of a row
  may attend to a token, all of them or each by itself. The tokens join those of `before`, if given.
  """
  in_full = lambda x: x.astype(q.dtype) if x.dtype == jnp.int8 else x
  k, v = in_full(held.k), in_full(held.v)
  q = q.astype(k.dtype)
  of_keys = "bksc" if isinstance(held, KeyValuesByToken) else "bkcs"
  scores = jnp.einsum(f"bkgc,{of_keys}->bkgs", q, k, precision=precision_of(q, k), preferred_element_type=jnp.float32)
  scores = scores * q.shape[-1] ** -0.5
  if held.k_scale is not None:
    scores = scores * held.k_scale[:, :, None]
  scores = jnp.where(mask[:, None, None] if mask.ndim == 2 else mask[:, None], scores, MASKED)

  def mix(weights: Float[Array, "B K G S"]) -> Float[Array, "B K G C"]:
    return mixed(weights if held.v_scale is None else weights * held.v_scale[:, :, None], v)

  return joined(before, scores, mix)


def attend_spans(
  q: Float[Array, "N T H C"],
  blocks: Sequence[KeyValues],
  spans: Spans,
  *,
  window: int | None = None,
  mesh: Mesh | None = None,
  exact: bool = False,
) -> Float[Array, "N T H C"]:
  """Attends from the tokens of spans to their rows, piece by piece up to the last column seen.

  A token sees the last `window` columns up to its own; None is all. If `exact`, the products are in
  float32 in any dtype; see `ModelConfig.exact`.
  """
  if mesh is not None and mesh.size > 1:
    held = _spec(blocks[0], mesh)
    of_spans = PartitionSpec(held[0], None, held[1])
    specs = of_spans, held, PartitionSpec(held[0])
    attend_local = partial(attend_spans, window=window, exact=exact)
    return jax.shard_map(attend_local, mesh=mesh, in_specs=specs, out_specs=of_spans, check_vma=False)(q, tuple(blocks), spans)
  num_spans, length, _, width = q.shape
  q = q.astype(jnp.float32) if exact else q
  # [N T H C] -> [N K T·G C]: a product per row and head of keys.
  num_kv = blocks[0].v.shape[1]
  q = q.reshape(num_spans, length, num_kv, -1, width).transpose(0, 2, 1, 3, 4).reshape(num_spans, num_kv, -1, width)
  columns = jnp.where(spans.columns == NOWHERE, -1, spans.columns)
  ends = jnp.repeat(columns, q.shape[2] // length, axis=1)
  part, longest = nothing_of(q), CPU_BLOCK if platform_of(mesh) == "cpu" else _PIECE
  for block, (start, size) in zip(blocks, _columns(blocks), strict=True):
    piece = next(piece for piece in range(min(size, longest), 0, -1) if size % piece == 0)

    def add(i, part, block=block, start=start, piece=piece):
      of_row = lambda x, axis: jax.vmap(
        lambda row: jax.lax.dynamic_slice_in_dim(jax.lax.dynamic_index_in_dim(x, row, keepdims=False), i * piece, piece, axis - 1)
      )(_rows(spans))
      here = start + i * piece + jnp.arange(piece)
      mask = here <= ends[:, :, None]
      mask = mask if window is None else mask & (here > ends[:, :, None] - window)
      held = _map(of_row, block)
      return attend(q, jax.tree.map(lambda x: x.astype(q.dtype), held) if exact else held, mask, part)

    count = jnp.clip(-(-(jnp.max(columns) + 1 - start) // piece), 0, size // piece)
    part = jax.lax.fori_loop(0, count, add, part)
  out = mean_of(part, jnp.maximum(part.total, 1))
  return out.reshape(num_spans, num_kv, length, -1, width).transpose(0, 2, 1, 3, 4).reshape(num_spans, length, -1, width)


def attend_in_order(
  q: Float[Array, "B K G C"], prompts: KeyValues | None, blocks: Sequence[KeyValues], view: View, *, mesh: Mesh | None = None
) -> Float[Array, "B K G C"]:
  """Attends from one token per row to its sequence, in the order of `kernels.by_sequence`.

  Each row has its own column, the next one of its response, or without prompts of its sequence.
  """
  if view.prompts is None:
    by_head = q.reshape(len(q), 1, -1, q.shape[-1])
    spans = Spans(None, view.column[:, None])
    return attend_spans(by_head, blocks, spans, window=view.window, mesh=mesh, exact=True).reshape(q.shape)
  held = PartitionSpec() if mesh is None else _spec(blocks[0], mesh)
  # Rows, and the prompts that they read, are counted on each device.
  local = len(q) if mesh is None or held[0] is None else len(q) // num_row_shards(mesh)
  sequences = jnp.arange(len(q)) % local if view.sequences is None else view.sequences.reshape(-1)
  group = (len(q) if view.rows is None else view.rows.size) // len(view.prompts)
  attend_local = partial(_attend_in_order, window=view.window)
  arguments = (q, prompts, tuple(blocks), view.prompts, view.lengths, sequences // group)
  if mesh is not None and mesh.size > 1:
    rows = PartitionSpec(held[0])
    attend_local = jax.shard_map(attend_local, mesh=mesh, in_specs=(held, held, held, rows, rows, rows), out_specs=held, check_vma=False)
  return attend_local(*arguments)


def _attend_in_order(
  q: Float[Array, "B K G C"],
  prompts: KeyValues,
  blocks: Sequence[KeyValues],
  seen: Bool[Array, "n P"],
  lengths: Int[Array, " B"],
  which: Int[Array, " B"],
  *,
  window: int | None,
) -> Float[Array, "B K G C"]:
  """Attends from rows to their prompts, padded on the left, and then to their responses."""
  size, rows = seen.shape[1], jnp.arange(len(q))
  before = jnp.sum(seen, axis=1)[which]
  ends = before + lengths

  def add(i: Int[Array, ""], part: Partial) -> Partial:
    places = i * CPU_BLOCK + jnp.arange(CPU_BLOCK)
    after = places - before[:, None]

    def gathered(*fields):
      (of_prompt, *of_blocks), axis = fields[:-1], fields[-1]
      take = lambda x, rows, columns: jnp.moveaxis(x[(rows[:, None], *[slice(None)] * (axis - 1), columns)], 1, axis)
      held = take(of_prompt, which, jnp.clip(size + after, 0, size - 1))
      for x, (start, columns) in zip(of_blocks, _columns(blocks), strict=True):
        own = take(x, rows, jnp.clip(after - start, 0, columns - 1))
        held = jnp.where((after >= start).reshape(len(q), *[1] * (axis - 1), -1, *[1] * (x.ndim - axis - 1)), own, held)
      return held.astype(jnp.float32)

    mask = places < ends[:, None]
    mask = mask if window is None else mask & (places >= ends[:, None] - window)
    return attend(q.astype(jnp.float32), _map(gathered, prompts, *blocks), mask, part)

  part = jax.lax.fori_loop(0, -(-jnp.max(ends) // CPU_BLOCK), add, nothing_of(q))
  return mean_of(part)


def _sum(parts: Sequence[Partial]) -> Partial:
  """Joins the sums of parts, relative to their common maximum."""
  top = reduce(jnp.maximum, (part.top for part in parts))
  shares = [jnp.exp(part.top - top) for part in parts]
  total = sum(share * part.total for share, part in zip(shares, parts, strict=True))
  return Partial(top, total, sum(share[..., None] * part.mix for share, part in zip(shares, parts, strict=True)))


def merge(parts: Sequence[Partial]) -> Float[Array, "B K G C"]:
  """Merges parts into softmax(scores)·v over the keys of all parts together.

  The result is Σ_i e^(m_i − m) mix_i / Σ_i e^(m_i − m) total_i, with m_i = top_i and m = max m_i.
  At least one key of all parts must be unmasked.

  References:
    FlashAttention, arXiv:2205.14135, 2022; Hydragen (shared prefixes), arXiv:2402.05099, 2024.
  """
  return mean_of(_sum(parts))


def attend_prompts(
  q: Float[Array, "B K G C"], held: KeyValues, view: View, attend_each: Callable[[Array, KeyValues], Partial] | None = None
) -> Partial:
  """Attends to the prompts, with one product per prompt for all rows that share it.

  Only queries and results move between rows and prompts. The keys and values of the prompts are
  neither copied nor repeated.

  Args:
    q: Queries of the rows, grouped by the key-value head that they read.
    held: Keys and values of the prompts.
    view: What the rows see.
    attend_each: Function from the queries of all rows of each prompt, [n K G C], and `held` to
      their part of the softmax; None for `attend`.
  """
  num_prompts, size = view.prompts.shape
  of_sequences = lambda x: x if view.rows is None else _along(x, view.rows)
  by_sequence = of_sequences(q)
  group = by_sequence.shape[0] // num_prompts
  mask = view.prompts
  if view.window is not None:  # Prompts end with their last column, and responses follow.
    last = view.window - of_sequences(view.lengths).reshape(num_prompts, group, 1)
    mask = jnp.repeat(mask[:, None] & (jnp.arange(size)[::-1] < last), q.shape[2], axis=1)
  attend_each = attend_each or (lambda q, held: attend(q, held, mask))
  # [n·group, K, G, ...] -> [n, K, group, G, ...]
  fold = lambda x: x.reshape(num_prompts, group, *x.shape[1:]).swapaxes(1, 2)
  flat = lambda x: x.reshape(num_prompts, x.shape[1], -1, *x.shape[4:])
  part = attend_each(flat(fold(by_sequence)), held)

  def unfold(x):
    x = x.reshape(num_prompts, x.shape[1], group, q.shape[2], *x.shape[3:]).swapaxes(1, 2)
    x = x.reshape(num_prompts * group, *x.shape[2:])
    return x if view.sequences is None else _along(x, view.sequences)

  return Partial(*map(unfold, part))


def _along(x: Shaped[Array, "..."], index: Int[Array, "d M"]) -> Shaped[Array, "..."]:
  """Returns x[index] within each piece: pieces are on different devices and never share rows."""
  pieces = x.reshape(index.shape[0], -1, *x.shape[1:])
  taken = jax.vmap(lambda piece, i: jnp.take(piece, i, axis=0, mode="clip"))(pieces, index)
  return taken.reshape(-1, *x.shape[1:])
