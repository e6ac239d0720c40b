"""Decoding with a model: prefill, growth of the cache, layout of the weights, and a step."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxrl_llm.devices.mesh import BATCH_AXES, RULES, Serving, choose_layout, num_row_shards, param_shardings, platform_of
from jaxrl_llm.kernels.types import Visits
from jaxrl_llm.models import ragged
from jaxrl_llm.models.cache import (
  NOWHERE,
  Cache,
  Spans,
  View,
  columns_of_blocks,
  empty,
  filled,
  layout_of,
  map_prompts,
  num_columns,
  split_rows,
)
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoding_weights import DecodingWeights, outside_of_blocks, to_8_bits, to_matrices, unstacked_shardings
from jaxrl_llm.types import Images, Params

Bind = Callable[[Params], nnx.Module]


def serving_of(config: ModelConfig, mesh: Mesh, *, layout: str | None) -> Serving | None:
  """Returns the layout of a model's weights while a sampler decodes; see `choose_layout`."""
  if config.exact:  # A vocabulary over more devices would be summed in more parts.
    return None
  num_experts = config.experts and config.experts.num_experts
  return choose_layout(mesh, layout, num_experts=num_experts, vocab_size=config.vocab_size)


def make_steps(
  config: ModelConfig, bind: Bind, bind_decoder: Bind, *, logical_axes: PyTree, mesh: Mesh | None, serving: Serving | None
) -> dict[str, Callable]:
  """Wraps the decoding methods of a `Transformer` as pure functions: fields of `Model` by name.

  Args:
    config: Sizes and options.
    bind: Function from params to the module that prefills.
    bind_decoder: Function from params outside of blocks to the module that decodes.
    logical_axes: Params tree with logical axes in place of arrays.
    mesh: Device mesh; None is one device.
    serving: Layout of the weights for `decode`; None keeps that of the params.
  """

  def prefill(params: Params, tokens: Int[Array, "n P"], mask: Bool[Array, "n P"], *, dtype: str, **images):
    return bind(params).prefill(tokens, mask, dtype=dtype, **images)

  def grow(cache: Cache | None, rows: int, columns: int, *, dtype: str, most: int | None = None) -> Cache:
    cache = cache or Cache((None,) * config.num_layers, ((),) * config.num_layers)
    sizes = dict(num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, dtype=dtype, layout=layout_of(mesh))
    block = lambda columns: split_rows(empty(rows, columns, **sizes), mesh)

    def more(layer: int, blocks: tuple) -> tuple:
      if most is None or config.exact or config.window_of(layer) is None:
        return *blocks, block(columns)
      return blocks or (block(min(config.window_of(layer), most)),)

    return cache._replace(blocks=tuple(more(layer, blocks) for layer, blocks in enumerate(cache.blocks)))

  def resume(params: Params, tokens: Int[Array, "B W"], mask: Bool[Array, "B W"], cache: Cache) -> Cache:
    prefilled, _ = bind(params).prefill(tokens, mask, dtype=cache.blocks[0][0].k.dtype.name)
    return cache._replace(blocks=tuple(map(filled, cache.blocks, prefilled.prompts)))

  def decoding_weights(params: Params) -> DecodingWeights:
    weights = to_matrices(DecodingWeights(outside_of_blocks(params), bind(params).unstacked()))
    if config.decode_weights is not None:
      weights = to_8_bits(weights, config)
    if serving is not None:
      rules, on = serving.rules, serving.mesh
    elif config.exact and mesh is not None and mesh.size > 1:  # Parts of inputs give partial sums.
      rules, on = RULES | {"embed": None}, mesh
    else:
      return weights
    shardings = param_shardings(on, logical_axes, params, rules=rules)
    return jax.lax.with_sharding_constraint(weights, unstacked_shardings(config, weights, shardings))

  def whole_rows(x: Float[Array, "B ..."]) -> Float[Array, "B ..."]:
    if mesh is None or mesh.size == 1:
      return x
    if config.exact:  # As many rows on each device as in a product of the learner.
      return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(None, PartitionSpec.UNCONSTRAINED)))
    if serving is None:  # XLA chooses whether rows or weights move to the head.
      return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(PartitionSpec.UNCONSTRAINED)))
    axes = tuple(axis for axis in BATCH_AXES if axis not in (serving.rules["vocab"] or ()))
    rows = axes if len(x) % math.prod(serving.mesh.shape[axis] for axis in axes) == 0 else None
    return jax.lax.with_sharding_constraint(x, NamedSharding(serving.mesh, PartitionSpec(rows)))

  def logits_of(model: nnx.Module, x: Float[Array, "B D"]) -> Float[Array, "B V"]:
    # One gather. Without the barrier XLA may pass rows from device to device, a product for each.
    x = x if serving is None and not config.exact else jax.lax.optimization_barrier(whole_rows(x))
    return whole_rows(model.unembed(x)) if config.exact else model.unembed(x)

  def reads(ages: Sequence[Int[Array, " _"]], lengths: Int[Array, " B"]) -> tuple[Visits | None, ...]:
    shards = 1 if mesh is None else num_row_shards(mesh)
    local_rows = len(lengths) // shards if len(lengths) % shards == 0 else len(lengths)
    platform = platform_of(mesh)
    rows = ragged.rows_per_group(local_rows, platform)

    def of_block(x: Int[Array, " _"]) -> Visits | None:
      if not ragged.is_used(config.decode_attention, platform, config.head_dim, len(x)):
        return None
      return ragged.visits(x, lengths, rows=rows, columns=ragged.block_columns(len(x), platform))

    return tuple(map(of_block, ages))

  def prompt_reads(seen: Bool[Array, "n P"] | None, num_sequences: int) -> Visits | None:
    """Lists the blocks of the prompts, padded on the left, for a kernel that reads them."""
    platform = platform_of(mesh)
    kernel = ragged.kernel_of(platform)
    if seen is None or num_sequences // len(seen) * config.num_heads // config.num_kv_heads > kernel.queries:
      return None
    width = seen.shape[1]
    if config.decode_attention == "xla" or not ragged.is_used("auto", platform, config.head_dim, width):
      return None
    return ragged.last_visits(jnp.sum(seen, axis=1), width, columns=ragged.block_columns(width, platform))

  def decode(
    weights: DecodingWeights,
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
    cache: Cache,
    *,
    column: Int[Array, ""],
    ages: Int[Array, " S"],
    lengths: Int[Array, " B"],
    prompts_seen: Bool[Array, "n P"] | None,
    rows: Int[Array, "d N"] | None = None,
    sequences: Int[Array, "d b"] | None = None,
    step: Int[Array, ""] | None = None,
  ):
    model = bind_decoder(weights.rest)
    num_sequences = len(tokens) if rows is None else rows.size

    def view_of(window: int | None) -> View | None:
      layer = next((i for i in range(config.num_layers) if config.window_of(i) == window), None)
      here, age, seen = column, ages, prompts_seen
      if layer is None:  # No layer is of this kind.
        return None
      if window is not None and not config.exact:
        # A ring: each step takes the place of the oldest one.
        size = num_columns(cache.blocks[layer])
        here, age = step % size, (step - jnp.arange(size)) % size
        seen = None if seen is None else seen[:, seen.shape[1] - cache.prompts[layer].v.shape[2] :]
      of_blocks = columns_of_blocks(age, cache.blocks[layer])
      most = lengths if window is None else jnp.minimum(lengths, window)
      # The kernel would show all rows of a prompt the same part of it.
      of_prompts = prompt_reads(seen, num_sequences) if window is None else None
      return View(here, of_blocks, lengths, reads(of_blocks, most), seen, rows, sequences, of_prompts, window)

    views = view_of(None), view_of(config.window and config.window.size)
    end = 1 + len(ages) + (0 if prompts_seen is None else prompts_seen.shape[1])
    x, cache, routes = model.step(weights.blocks, tokens, positions, cache, views, end)
    return logits_of(model, x), cache, routes

  def extend(
    weights: DecodingWeights,
    tokens: Int[Array, "N T"],
    cache: Cache,
    starts: Int[Array, " N"],
    counts: Int[Array, " N"],
    rows: Int[Array, " N"] | None = None,
    *,
    positions: Int[Array, "N T *axes"] | None = None,
    images: Images | None = None,
    scores_all: bool = False,
  ) -> tuple[Float[Array, "N *tokens V"], Cache, Int[Array, "N T L K"] | None]:
    model = bind_decoder(weights.rest)
    offsets = jnp.arange(tokens.shape[1])
    here = starts[:, None] + offsets
    columns = jnp.where(offsets < counts[:, None], here, NOWHERE)
    if tokens.shape[1] == 1 and rows is None:
      size = num_columns(cache.blocks[0])
      of_blocks = columns_of_blocks(jnp.arange(size), cache.blocks[0])
      lengths = jnp.where(counts > 0, starts, 0) + 1
      view = View(columns[:, 0], of_blocks, lengths, reads_of_rows(of_blocks, lengths), None, by_column=True)
      # The kernel has no first column of a row.
      by_program = tuple(None if isinstance(read, Visits) else read for read in view.reads)
      views = view, view._replace(window=config.window and config.window.size, reads=by_program)
      x, cache, routes = model.step(weights.blocks, tokens[:, 0], starts if positions is None else positions[:, 0], cache, views, size)
      return logits_of(model, x), cache, None if routes is None else routes[:, None]
    spans = Spans(rows, columns)
    x, cache, routes = model.extend(weights.blocks, tokens, here if positions is None else positions, cache, spans, images)
    if scores_all:
      return model.unembed(x), cache, routes
    last = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    return logits_of(model, last), cache, routes

  def reads_of_rows(columns: Sequence[Int[Array, " _"]], lengths: Int[Array, " B"]) -> tuple[Visits | Bool[Array, ""] | None, ...]:
    by_kernel = reads(columns, lengths)
    if platform_of(mesh) != "cpu":
      return by_kernel
    # A branch costs nothing on a CPU, and elsewhere more than it saves. All rows see column 0.
    longest = jnp.max(lengths)
    return tuple(longest > x[0] if read is None and i else read for i, (x, read) in enumerate(zip(columns, by_kernel, strict=True)))

  return dict(
    prefill=prefill, grow=grow, resume=resume, map_prompts=map_prompts, decoding_weights=decoding_weights, decode=decode, extend=extend,
    whole_rows=whole_rows,
  )  # fmt: skip
