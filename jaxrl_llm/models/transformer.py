"""The decoder: embedding, stacked and scanned blocks, head; and `Model`, the pure functions that the rest of the framework sees."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers import Block, KVCache, RMSNorm, param
from jaxrl_llm.types import Params


class Transformer(nnx.Module):
  """A decoder-only transformer. Blocks are stacked and scanned: compile time does not grow with depth."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs):
      return Block(config, rngs=rngs)

    self.embedding = param(rngs, (config.vocab_size, config.d_model), ("vocab", "embed"), fan_in=config.d_model)
    self.layers = stack(rngs)
    self.final_norm = RMSNorm(config.d_model, axis="embed", eps=config.norm_eps)
    if not config.tie_embeddings:
      self.head = param(rngs, (config.d_model, config.vocab_size), ("embed", "vocab"), fan_in=config.d_model)
    self.config = config

  def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of the embedding, in the compute dtype."""
    return self.embedding[...].astype(self.config.dtype)[tokens]

  def hidden(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segments: Int[Array, "B T"]):
    """Final hidden states of packed rows: a token sees the earlier tokens of its own segment."""
    causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    mask = causal & (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, :, None]
    graph, stacked = nnx.split(self.layers)

    def body(x, block):
      return nnx.merge(graph, block)(x, positions, mask), None

    if self.config.remat:
      body = jax.checkpoint(body, prevent_cse=False)
    x, _ = jax.lax.scan(body, self.embed(tokens), stacked)
    return self.final_norm(x)

  def step(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: KVCache, slot: Int[Array, ""]):
    """Final hidden states of tokens written to the cache at `slot` and after."""
    graph, stacked = nnx.split(self.layers)

    # The cache is carried, not scanned over: XLA then updates it in place instead of copying every layer's slice each step.
    def body(carry, scanned):
      x, cache = carry
      layer, block = scanned
      return nnx.merge(graph, block).step(x, positions, cache, layer, slot), None

    layers = jnp.arange(self.config.num_layers)
    (x, cache), _ = jax.lax.scan(body, (self.embed(tokens), cache), (layers, stacked))
    return self.final_norm(x), cache

  def unembed(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """Logits in float32."""
    head = self.embedding[...].T if self.config.tie_embeddings else self.head[...]
    return jnp.einsum("...d,dv->...v", x, head.astype(x.dtype), preferred_element_type=jnp.float32)


class Model(NamedTuple):
  """A decoder as pure functions of its params (a nested dict of arrays).

  Attributes:
    config: sizes and options.
    init: `(key) -> params`.
    logits: `(params, tokens, positions, segments) -> float32 [B T V]`; logits at t score token t + 1.
    init_cache: `(batch, slots) -> KVCache`, empty.
    decode: `(params, tokens, positions, cache, slot) -> (float32 [B V] logits after the last token, cache)`; marks nothing valid by
      itself: the caller owns `cache.valid`.
    logical_axes: the params tree with a tuple of logical axis names in the place of each array; stacked blocks lead with `layers`.
    num_params: number of weights.
  """

  config: ModelConfig
  init: Callable[[Array], Params]
  logits: Callable[..., Float[Array, "B T V"]]
  init_cache: Callable[[int, int], KVCache]
  decode: Callable[..., tuple[Float[Array, "B V"], KVCache]]
  logical_axes: PyTree
  num_params: int


def pure(make: Callable[[nnx.Rngs], nnx.Module]) -> tuple[Callable[[Params], nnx.Module], Callable[[Array], Params], PyTree, int]:
  """Splits a module once into a static graph and params.

  Args:
    make: builds the module.

  Returns:
    `bind`, params to module; `init`, key to params; the params tree with logical axes in the place of arrays; the number of weights.
  """
  graph, abstract = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

  def bind(params: Params) -> nnx.Module:
    state = jax.tree.map(lambda x: x, abstract)  # A copy of the structure: filling it must not leak tracers into `abstract`.
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)

  def init(key: Array) -> Params:
    return nnx.to_pure_dict(nnx.split(make(nnx.Rngs(key)))[1])

  def axes(path, variable: nnx.Variable) -> tuple[str, ...]:
    names = variable.get_metadata()["axes"]
    return ("layers", *names) if any(getattr(part, "key", None) == "layers" for part in path) else names

  is_variable = lambda x: isinstance(x, nnx.Variable)
  logical_axes = nnx.to_pure_dict(jax.tree_util.tree_map_with_path(axes, abstract, is_leaf=is_variable))
  return bind, init, logical_axes, sum(x.size for x in jax.tree.leaves(abstract))


def make_model(config: ModelConfig) -> Model:
  """Splits a `Transformer` once into a static graph and params, and wraps its methods as pure functions.

  Args:
    config: sizes and options.

  Returns:
    The model. Nothing is allocated until `init` runs.

  Raises:
    ValueError: query heads that key-value heads do not divide.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> model = make_model(preset("nano", vocab_size=264))
    >>> params = model.init(jax.random.key(0))
    >>> tokens = jnp.zeros((1, 4), jnp.int32)
    >>> model.logits(params, tokens, jnp.arange(4)[None], jnp.ones((1, 4), jnp.int32)).shape
    (1, 4, 264)
  """
  if config.num_heads % config.num_kv_heads:
    raise ValueError(f"model: num_heads={config.num_heads} must be a multiple of num_kv_heads={config.num_kv_heads}")
  bind, init, logical_axes, num_params = pure(lambda rngs: Transformer(config, rngs=rngs))

  def logits(
    params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segments: Int[Array, "B T"]
  ) -> Float[Array, "B T V"]:
    model = bind(params)
    return model.unembed(model.hidden(tokens, positions, segments))

  def init_cache(batch: int, slots: int) -> KVCache:
    shape = (config.num_layers, batch, slots, config.num_kv_heads, config.head_dim)
    zeros = jnp.zeros(shape, config.dtype)
    return KVCache(k=zeros, v=zeros, valid=jnp.zeros((batch, slots), bool))

  def decode(
    params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: KVCache, slot: Int[Array, ""]
  ) -> tuple[Float[Array, "B V"], KVCache]:
    model = bind(params)
    x, cache = model.step(tokens, positions, cache, slot)
    return model.unembed(x[:, -1]), cache

  return Model(config, init, logits, init_cache, decode, logical_axes, num_params)
