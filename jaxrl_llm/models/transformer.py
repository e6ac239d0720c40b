"""The decoder: embedding, stacked and scanned blocks, and output head."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxrl_llm.devices.mesh import platform_of
from jaxrl_llm.kernels.stripes import Stripes
from jaxrl_llm.models.attention import Rows, packed
from jaxrl_llm.models.cache import Cache, Spans, View, key_values, last_columns, layout_of, num_columns
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import Block, norm_of_stream, rotation_of
from jaxrl_llm.models.linear import adapter, in_one_order, linear, matmul_in_float32, param, rounded
from jaxrl_llm.models.moe import Routed, balance_loss, z_loss
from jaxrl_llm.models.quantized import Quantized
from jaxrl_llm.models.remat import rematerialised
from jaxrl_llm.models.residual import gathered, whole
from jaxrl_llm.models.rope import Rotation
from jaxrl_llm.models.striping import striped, stripes_of
from jaxrl_llm.models.taps import tap
from jaxrl_llm.models.tower import Tower
from jaxrl_llm.types import Forward, Images, Patches

STACKS = ("layers", "sparse_layers")
"""Names of the attributes that hold stacked blocks: dense ones, and those with experts."""


class LayerSpan(NamedTuple):
  """Consecutive layers of one kind, which one scan visits.

  Attributes:
    stack: Attribute that holds their stack.
    first: Index of the first layer in the model.
    start: Index of the first layer in the stack.
    count: Number of layers.
  """

  stack: str
  first: int
  start: int
  count: int


def layer_spans(config: ModelConfig) -> list[LayerSpan]:
  """Groups the layers of a model, in order, into spans of one kind.

  A uniform model has one span, whatever its depth.

  Example:
    >>> from jaxrl_llm.models import Experts, preset
    >>> config = preset("nano", vocab_size=264)._replace(num_layers=4, experts=Experts(8, 2, 32, layers=(1, 2)))
    >>> [(span.stack, span.first, span.count) for span in layer_spans(config)]
    [('layers', 0, 1), ('sparse_layers', 1, 2), ('layers', 3, 1)]
  """
  sparse, spans, used = set(config.sparse_layers), [], dict.fromkeys(STACKS, 0)
  for is_sparse, group in groupby(range(config.num_layers), key=lambda layer: layer in sparse):
    layers, stack = list(group), STACKS[is_sparse]
    spans.append(LayerSpan(stack, layers[0], used[stack], len(layers)))
    used[stack] += len(layers)
  return spans


def features_at(images: Images, index: int | Int[Array, ""]) -> Float[Array, "B T D"]:
  """Returns one of the features of each image token, and arbitrary ones for text."""
  of_rows = images.features[:, :, :, index]
  of_rows = of_rows.reshape(of_rows.shape[0], -1, of_rows.shape[-1])
  return jnp.take_along_axis(of_rows, jnp.maximum(images.slots, 0)[..., None], axis=1)


class Transformer(nnx.Module):
  """A decoder-only transformer.

  Blocks are stacked and scanned, so that compile time does not grow with depth.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, mesh: Mesh | None = None, expert_axes: tuple[str, ...] = ("expert",)):
    def stack(count: int, *, sparse: bool):
      @nnx.split_rngs(splits=count)
      @nnx.vmap(in_axes=(0,), out_axes=0)
      def blocks(rngs):
        return Block(config, rngs=rngs, sparse=sparse, mesh=mesh, expert_axes=expert_axes)

      return blocks(rngs)

    shape, dtype = (config.vocab_size, config.d_model), config.param_dtype
    self.embedding = param(rngs, shape, ("vocab", "embed"), fan_in=config.d_model, dtype=dtype)
    if config.dense_layers:
      self.layers = stack(len(config.dense_layers), sparse=False)
    if config.sparse_layers:
      self.sparse_layers = stack(len(config.sparse_layers), sparse=True)
    self.final_norm = norm_of_stream(config)
    if not config.tie_embeddings:
      self.head = param(rngs, shape[::-1], ("embed", "vocab"), fan_in=config.d_model, dtype=dtype)
      adapter(self, "head", "head", config, rngs=rngs)
    if config.vision is not None:
      self.tower = Tower(config, rngs=rngs, mesh=mesh)
    self.config = config
    self.mesh = mesh

  @jax.named_scope("embed")
  def embed(self, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
    """Looks up the embeddings of tokens, in the compute dtype."""
    table, dtype = self.embedding.get_value(), self.config.dtype
    if isinstance(table, Quantized):
      x = (table.values[tokens].astype(jnp.float32) * table.scale[tokens][..., None]).astype(dtype)
    else:
      x = table[tokens].astype(dtype)
    if not self.config.scale_embeddings:
      return x
    x = x * jnp.asarray(self.config.d_model**0.5, dtype)
    return rounded(x) if self.config.exact else x

  def embed_rows(self, tokens: Int[Array, "B T"], images: Images | None) -> Float[Array, "B T D"]:
    """Looks up the embeddings of tokens; a feature takes the place of an image token's."""
    x = self.embed(tokens)
    return x if images is None else jnp.where((images.slots < 0)[..., None], x, features_at(images, 0).astype(x.dtype))

  def add_deep(self, x: Float[Array, "B T D"], images: Images | None, layer: int | Int[Array, ""]) -> Float[Array, "B T D"]:
    """Adds the deep features behind one of the first layers."""
    num_deep = 0 if images is None else images.features.shape[3] - 1
    if not num_deep:
      return x
    deep = lambda: jnp.where((images.slots < 0)[..., None], 0, features_at(images, jnp.minimum(layer + 1, num_deep))).astype(x.dtype)
    # A branch, so that the other layers gather nothing.
    return jax.lax.cond(layer < num_deep, lambda x: x + deep(), lambda x: x, x)

  def features(self, patches: Patches) -> Float[Array, "*I S F D"]:
    """Computes the features of pictures."""
    lead = patches.mask.shape[:-1]
    features = self.tower(jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(lead) :]), patches))
    return features.reshape(*lead, *features.shape[1:])

  def with_features(self, images: Images | None) -> Images | None:
    """Returns images with features, computed from the patches unless they are given."""
    if images is None or images.features is not None:
      return images
    return images._replace(features=self.features(images.patches), patches=None)

  def scan(self, body: Callable, carry, *arrays):
    """Scans `body` through all layers in order.

    `body` is `(block, carry, layer, *layer's slices of the arrays) -> (carry, outputs)`. The arrays
    have the layers as their first axis; None stays None. Returns the last carry, and for each span
    its stacked outputs.
    """
    outputs = []
    for span in layer_spans(self.config):
      graph, stacked = nnx.split(getattr(self, span.stack))
      if span.count < len(jax.tree.leaves(stacked)[0]):
        stacked = jax.tree.map(lambda x, span=span: x[span.start : span.start + span.count], stacked)
      parts = [None if x is None else x[span.first : span.first + span.count] for x in arrays]

      def step(carry, scanned, graph=graph):
        layer, block, *parts = scanned
        return body(nnx.merge(graph, block), carry, layer, *parts)

      layers = span.first + jnp.arange(span.count)
      carry, out = jax.lax.scan(rematerialised(step, self.config.remat), carry, (layers, stacked, *parts))
      outputs.append((span, out))
    return carry, outputs

  def in_window(self, layer: Int[Array, ""]) -> Bool[Array, ""] | None:
    """Returns whether a layer of a scan has a sliding window; None if no layer has one."""
    if self.config.window is None:
      return None
    return jnp.asarray([self.config.window_of(i) is not None for i in range(self.config.num_layers)])[layer]

  def hidden(
    self,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T *axes"],
    segments: Int[Array, "B T"],
    routing: Int[Array, "B T L K"] | None = None,
    *,
    prefixes: Int[Array, "B T"] | None = None,
    router_losses: bool = False,
    images: Images | None = None,
    stripes: Stripes | None = None,
  ) -> Forward:
    """Computes the final hidden states of packed rows, and what the routers did.

    A token sees its prefix and the earlier tokens of its own segment. Tokens of rows with images
    have three positions. All arrays have the order of the stripes, or that of the rows if `stripes`
    is None.
    """
    rows, images = packed(segments, prefixes, stripes), self.with_features(images)
    replay = None if routing is None else jnp.moveaxis(routing, 2, 0)

    def body(block, x, layer, replay):
      x, routed, _ = block(x, positions, rows, self.in_window(layer), replay)
      x = self.add_deep(x, images, layer)
      return x, None if routed is None else self.routers(routed, rows, router_losses)

    x, outputs = self.scan(body, self.embed_rows(tokens, images), replay)
    x = whole(x, self.mesh) if self.config.exact else x
    return self.gather(outputs, tokens.shape)._replace(hidden=gathered(self.final_norm(x), self.mesh))

  def hidden_in_stripes(
    self,
    *rows: Int[Array, "B T ..."] | None,
    prefixes: Int[Array, "B T"] | None = None,
    router_losses: bool = False,
    images: Images | None = None,
  ) -> Forward:
    """Computes `hidden` with attention shared evenly by the devices of the axis `context`.

    Arguments are those of `hidden`, in the order of the rows. Results are in the order of the
    stripes, which `striping.in_row_order` inverts.
    """
    slots = None if images is None else images.slots
    rows, prefixes, slots = jax.tree.map(partial(striped, mesh=self.mesh), (rows, prefixes, slots))
    images = None if images is None else images._replace(slots=slots)
    stripes = stripes_of(rows[0].shape[1], self.mesh)
    return self.hidden(*rows, prefixes=prefixes, router_losses=router_losses, images=images, stripes=stripes)

  def routers(self, routed: Routed, rows: Rows, losses: bool) -> Forward:
    """Returns what the router of one layer did."""
    out = Forward(routing=routed.experts, live_routing=routed.live)
    if not losses:
      return out
    balance = balance_loss(routed.logits, routed.experts, rows.segments, rows.prefixes)
    return out._replace(balance_loss=balance, z_loss=z_loss(routed.logits))

  def gather(self, outputs: list[tuple[LayerSpan, Forward | None]], shape: tuple[int, int]) -> Forward:
    """Gathers the outputs of the layers' routers.

    Routes have the layers as their third axis, with -1 for dense ones. Losses are the mean over the
    layers with experts.
    """
    if self.config.experts is None:
      return Forward()

    def routes(field):
      dense = lambda span: jnp.full((span.count, *shape, self.config.experts.top_k), -1, jnp.int32)
      by_span = [dense(span) if out is None else getattr(out, field) for span, out in outputs]
      return jnp.moveaxis(jnp.concatenate(by_span), 0, 2)

    def mean(field):
      losses = [getattr(out, field) for _, out in outputs if out is not None]
      return None if losses[0] is None else jnp.mean(jnp.concatenate(losses), axis=0)

    routing, live_routing = routes("routing"), routes("live_routing")
    return Forward(routing=routing, live_routing=live_routing, balance_loss=mean("balance_loss"), z_loss=mean("z_loss"))

  def prefill(
    self,
    tokens: Int[Array, "n P"],
    mask: Bool[Array, "n P"],
    *,
    dtype: str,
    positions: Int[Array, "n P 3"] | None = None,
    images: Images | None = None,
  ) -> tuple[Cache, Int[Array, "n P L K"] | None]:
    """Computes a cache of whole prompts, and the experts that their tokens visited.

    The cache has no blocks for responses yet, and of a prompt no more tokens than the layer's
    window has. Positions of prompts without images are counted.
    """
    segments = mask.astype(jnp.int32)
    rows, images = packed(segments), self.with_features(images)
    if positions is None:
      positions = jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)

    def body(block, x, layer):
      x, routed, (k, v) = block(x, positions, rows, self.in_window(layer))
      x = self.add_deep(x, images, layer)
      return x, (key_values(k, v, dtype, layout_of(self.mesh)), None if routed is None else self.routers(routed, rows, losses=False))

    _, outputs = self.scan(body, self.embed_rows(tokens, images))
    held = [jax.tree.map(lambda x, i=i: x[i], kv) for span, (kv, _) in outputs for i in range(span.count)]
    if not self.config.exact:
      held = [last_columns(kv, self.config.window_of(layer)) for layer, kv in enumerate(held)]
    cache = Cache(tuple(held), blocks=((),) * self.config.num_layers)
    return cache, self.gather([(span, out) for span, (_, out) in outputs], tokens.shape).routing

  def step(
    self,
    blocks: tuple[PyTree, ...],
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
    cache: Cache,
    views: tuple[View | None, View | None],
    end: int,
  ) -> tuple[Float[Array, "B D"], Cache, Int[Array, "B L K"] | None]:
    """Computes the final hidden states of one new token per row, all at positions below `end`.

    The views are that of layers without a sliding window, and that of layers with one; None for
    none. Also returns the cache with the tokens written to it, and the experts that they visited.
    """
    x, held, routes = self.embed(tokens), [], []
    rotated = self.rotated(positions[:, None], end)
    for layer, block in enumerate(self.merged(blocks)):
      kind = self.config.window_of(layer) is not None
      x, written, experts = block.step(x, rotated[kind], cache.prompts[layer], cache.blocks[layer], views[kind])
      held.append(written)
      routes.append(experts)
    return self.final_norm(x), cache._replace(blocks=tuple(held)), self.stacked(routes, tokens.shape)

  def extend(
    self,
    blocks: tuple[PyTree, ...],
    tokens: Int[Array, "N T"],
    positions: Int[Array, "N T *axes"],
    cache: Cache,
    spans: Spans,
    images: Images | None = None,
  ) -> tuple[Float[Array, "N T D"], Cache, Int[Array, "N T L K"] | None]:
    """Computes the final hidden states of spans of new tokens.

    Also returns the cache with the tokens written to it, and the experts that they visited.
    """
    x, held, routes = self.embed_rows(tokens, images), [], []
    rotated = self.rotated(positions, num_columns(cache.blocks[0]))
    for layer, (block, kept) in enumerate(zip(self.merged(blocks), cache.blocks, strict=True)):
      window = self.config.window_of(layer)
      x, written, experts = block.extend(x, rotated[window is not None], kept, spans, window)
      x = self.add_deep(x, images, layer)
      held.append(written)
      routes.append(experts)
    return self.final_norm(x), cache._replace(blocks=tuple(held)), self.stacked(routes, tokens.shape)

  def rotated(self, positions: Int[Array, "N T *axes"], end: int) -> tuple[Rotation, Rotation]:
    """Computes the rotations of positions below `end`, once for all heads and layers.

    The first is that of layers without a sliding window, and the second that of layers with one.
    """

    def of_layers(in_window: bool) -> Rotation:
      # Without the barrier, XLA recomputes the sines for every head of every layer.
      if platform_of(self.mesh) != "cpu" or positions.ndim == 3:
        return jax.lax.optimization_barrier(rotation_of(self.config, positions, in_window))
      # On CPUs it does so despite the barrier, but it does not recompute a table for its entries.
      table = jax.lax.optimization_barrier(rotation_of(self.config, jnp.arange(end)[:, None], in_window))
      return jax.tree.map(lambda x: x[positions, 0], table)

    of_all = of_layers(False)
    return of_all, of_all if self.config.window is None else of_layers(True)

  def stacked(self, routes: Sequence[Int[Array, "*batch K"] | None], shape: tuple[int, ...]) -> Int[Array, "*batch L K"] | None:
    """Stacks the routes of all layers, -1 at those without experts; None for a dense model."""
    experts = self.config.experts
    if experts is None:
      return None
    nowhere = jnp.full((*shape, experts.top_k), -1, jnp.int32)
    return jnp.stack([nowhere if layer is None else layer for layer in routes], axis=-2)

  def merged(self, blocks: tuple[PyTree, ...]) -> Iterator[Block]:
    """Yields the blocks with weights that are not stacked, in order.

    Steps visit them unrolled, not scanned: a slice of stacked weights or of a stacked cache is a
    copy at every step unless XLA can fuse it.
    """
    graphs = {stack: nnx.split(getattr(self, stack))[0] for stack in STACKS if hasattr(self, stack)}
    sparse = set(self.config.sparse_layers)
    return (nnx.merge(graphs[STACKS[layer in sparse]], state) for layer, state in enumerate(blocks))

  def unstacked(self) -> tuple[PyTree, ...]:
    """Returns the weights of each layer by itself, in order."""
    stacks = {span.stack: nnx.split(getattr(self, span.stack))[1] for span in layer_spans(self.config)}
    part = lambda span, i: jax.tree.map(lambda x: x[span.start + i], stacks[span.stack])
    return tuple(part(span, i) for span in layer_spans(self.config) for i in range(span.count))

  @jax.named_scope("head")
  def unembed(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """Computes the logits in float32."""
    if hasattr(self, "head_lora_a"):
      return linear(self, "head", x, self.config).astype(jnp.float32)
    x = tap("head in", x)
    head = (self.embedding if self.config.tie_embeddings else self.head).get_value()
    values, scale = head if isinstance(head, Quantized) else (head, None)
    values = values.T if self.config.tie_embeddings else values
    logits = in_one_order(matmul_in_float32, x, values, None) if self.config.exact else matmul_in_float32(x, values)
    return tap("head", logits if scale is None else logits * scale)
