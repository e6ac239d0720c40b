"""The parts of a decoder block as Flax NNX modules, for whole rows and for one token at a time."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.devices.mesh import platform_of
from jaxrl_llm.kernels.visibility import within
from jaxrl_llm.models import cache, ragged
from jaxrl_llm.models.attention import Rows, row_attention
from jaxrl_llm.models.config import ModelConfig, Yarn
from jaxrl_llm.models.linear import GATED, adapter, linear, param, rounded
from jaxrl_llm.models.moe import MoE
from jaxrl_llm.models.residual import gathered, scattered, whole
from jaxrl_llm.models.rope import Rotation, frequencies, rope, rotation

_NO_WINDOW = 2**30
"""Size of a window that is longer than any sequence."""


class RMSNorm(nnx.Module):
  """RMS normalisation x / rms(x) · scale over the last axes, in float32.

  The scale is the weight, or 1 plus the weight if the model has centred norms.

  References:
    Root mean square layer normalization, arXiv:1910.07467, 2019.
  """

  def __init__(self, config: ModelConfig, shape: tuple[int, ...], axes: tuple[str, ...]):
    self.scale = nnx.Param(jnp.full(shape, 0.0 if config.centred_norms else 1.0, jnp.float32), axes=axes)
    self.config = config

  def __call__(self, x: Float[Array, "*batch w"]) -> Float[Array, "*batch w"]:
    scale, y = self.scale[...], x.astype(jnp.float32)
    scale = 1 + scale if self.config.centred_norms else scale
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=tuple(range(-scale.ndim, 0)), keepdims=True) + self.config.norm_eps)
    return (y * scale).astype(x.dtype)


def norm_of_stream(config: ModelConfig) -> RMSNorm:
  """Makes a norm over the width of the residual stream."""
  return RMSNorm(config, (config.d_model,), ("embed",))


def rotation_of(config: ModelConfig, positions: Int[Array, "B T *axes"], in_window: bool | Bool[Array, ""] | None = None) -> Rotation:
  """Computes the rotation of each position in a layer with or without a sliding window."""
  sections = None if config.vision is None else config.vision.rope_sections
  of_all = frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
  factor = config.rope_scaling.attention_factor if isinstance(config.rope_scaling, Yarn) else 1.0
  if config.window is not None and config.window.rope_theta is not None:
    of_all = jnp.where(in_window, frequencies(config.head_dim, config.window.rope_theta), of_all)
    factor = jnp.where(in_window, 1.0, factor)
  rotated = rotation(positions, of_all, sections)
  return rotated if isinstance(factor, float) and factor == 1 else jax.tree.map(lambda x: x * factor, rotated)


class Attention(nnx.Module):
  """Grouped-query self-attention, over packed rows or through a cache.

  References:
    GQA, arXiv:2305.13245, 2023.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, mesh: Mesh | None = None):
    d, h, k, c = config.d_model, config.num_heads, config.num_kv_heads, config.head_dim
    dtype = config.param_dtype
    self.q = param(rngs, (d, h, c), ("embed", "heads", "head_dim"), fan_in=d, dtype=dtype)
    self.k = param(rngs, (d, k, c), ("embed", "kv_heads", "head_dim"), fan_in=d, dtype=dtype)
    self.v = param(rngs, (d, k, c), ("embed", "kv_heads", "head_dim"), fan_in=d, dtype=dtype)
    # Residual branches start small (GPT-2), so the variance of the stream does not grow with depth.
    self.o = param(rngs, (h, c, d), ("heads", "head_dim", "embed"), fan_in=h * c * 2 * config.num_layers, dtype=dtype)
    if config.qkv_bias:
      self.q_bias = nnx.Param(jnp.zeros((h, c), dtype), axes=("heads", "head_dim"))
      self.k_bias = nnx.Param(jnp.zeros((k, c), dtype), axes=("kv_heads", "head_dim"))
      self.v_bias = nnx.Param(jnp.zeros((k, c), dtype), axes=("kv_heads", "head_dim"))
    if config.qk_norm:
      normed = lambda heads, axis: ((heads, c), (axis, "head_dim")) if config.qk_norm_joint else ((c,), ("head_dim",))
      self.q_norm, self.k_norm = RMSNorm(config, *normed(h, "heads")), RMSNorm(config, *normed(k, "kv_heads"))
    for name in ("q", "k", "v", "o"):
      adapter(self, name, f"attention/{name}", config, rngs=rngs, ins=2 if name == "o" else 1)
    self.config = config
    self.mesh = mesh

  def project(self, x: Float[Array, "B T D"], rotated: Rotation):
    """Computes the queries and keys of `x`, normalised and rotated, and its values."""
    config = self.config
    q, k, v = (self.by_head(linear(self, name, x, config)) for name in ("q", "k", "v"))
    if config.qkv_bias:
      q, k, v = (a + b[...].astype(x.dtype) for a, b in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias)))
    if config.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    if config.query_width is not None and config.query_width != config.head_dim:
      q = q * (config.head_dim / config.query_width) ** 0.5
    return rope(q, rotated), rope(k, rotated), v

  def by_head(self, x: Float[Array, "B T *outputs"]) -> Float[Array, "B T _ C"]:
    """Splits the outputs of a matrix by head; those of the learner's weights are split already."""
    if x.ndim == 4:
      return x
    # Without the barrier, XLA moves the split to the weight, and on TPUs transposes all of it. GPUs
    # compute queries, keys and values by one product; the barrier would keep others from its parts.
    x = x if platform_of(self.mesh) == "gpu" else jax.lax.optimization_barrier(x)
    return x.reshape(*x.shape[:2], -1, self.config.head_dim)

  @jax.named_scope("attention")
  def over_rows(self, x: Float[Array, "B T D"], positions: Int[Array, "B T *axes"], rows: Rows, in_window: Bool[Array, ""] | None):
    """Attends from every token to the earlier ones of its segment; also returns keys and values."""
    if self.config.window is not None:
      rows = within(rows, positions, jnp.where(in_window, self.config.window.size, _NO_WINDOW))
    # Computed in each layer: for whole rows, recomputing the angles is cheaper than storing them.
    q, k, v = self.project(x, rotation_of(self.config, positions, in_window))
    mixed = row_attention(q, k, v, rows, backend=self.config.attention, mesh=self.mesh, exact=self.config.exact)
    return linear(self, "o", mixed, self.config, ins=2), (k, v)

  @jax.named_scope("attention")
  def step(
    self, x: Float[Array, "B D"], rotated: Rotation, prompts: cache.KeyValues | None, blocks: tuple[cache.KeyValues, ...], view: cache.View
  ) -> tuple[Float[Array, "B D"], tuple[cache.KeyValues, ...]]:
    """Attends from one token per row to its prompt and to its response so far, itself included.

    Also returns the blocks with the token written to them.
    """
    q, k, v = self.project(x[:, None], rotated)
    blocks = cache.write(blocks, cache.key_values(k, v, blocks[0].k.dtype.name, type(blocks[0])), view.column, mesh=self.mesh)
    q = q[:, 0].reshape(x.shape[0], k.shape[2], -1, q.shape[-1])
    if self.config.exact:
      mixed = cache.attend_in_order(q, prompts, blocks, view, mesh=self.mesh)
    else:
      parts = [ragged.attend_block(q, block, view, i, mesh=self.mesh) for i, block in enumerate(blocks)]
      if view.prompts is not None:
        parts.append(ragged.attend_prompts(q, prompts, view, mesh=self.mesh))
      mixed = cache.merge(parts)
    mixed = mixed.astype(x.dtype).reshape(x.shape[0], -1, q.shape[-1])
    return linear(self, "o", mixed, self.config, ins=2), blocks

  @jax.named_scope("attention")
  def extend(
    self, x: Float[Array, "N T D"], rotated: Rotation, blocks: tuple[cache.KeyValues, ...], spans: cache.Spans, window: int | None
  ) -> tuple[Float[Array, "N T D"], tuple[cache.KeyValues, ...]]:
    """Attends from the tokens of spans to their rows so far, and writes them to the blocks."""
    q, k, v = self.project(x, rotated)
    blocks = cache.write_spans(blocks, cache.key_values(k, v, blocks[0].k.dtype.name, type(blocks[0])), spans, mesh=self.mesh)
    mixed = cache.attend_spans(q, blocks, spans, window=window, mesh=self.mesh, exact=self.config.exact).astype(x.dtype)
    return linear(self, "o", mixed.reshape(*x.shape[:2], -1, q.shape[-1]), self.config, ins=2), blocks


class MLP(nnx.Module):
  """A gated feed-forward layer: (activation(x·gate) ⊙ x·up)·down.

  References:
    GLU variants improve transformer, arXiv:2002.05202, 2020.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, mesh: Mesh | None = None):
    d, f = config.d_model, config.d_ff
    self.gate = param(rngs, (d, f), ("embed", "mlp"), fan_in=d, dtype=config.param_dtype)
    self.up = param(rngs, (d, f), ("embed", "mlp"), fan_in=d, dtype=config.param_dtype)
    self.down = param(rngs, (f, d), ("mlp", "embed"), fan_in=f * 2 * config.num_layers, dtype=config.param_dtype)
    for name in ("gate", "up", "down"):
      adapter(self, name, f"mlp/{name}", config, rngs=rngs)
    self.config = config
    self.mesh = mesh

  @jax.named_scope("mlp")
  def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    hidden = GATED[self.config.activation](linear(self, "gate", x, self.config), linear(self, "up", x, self.config))
    return linear(self, "down", hidden, self.config)


class Block(nnx.Module):
  """Attention and a dense or expert feed-forward layer, each with norms and on the residual stream.

  Norms are before each of them, after each of them, or both; see `ModelConfig.norms`.
  """

  def __init__(
    self, config: ModelConfig, *, rngs: nnx.Rngs, sparse: bool = False, mesh: Mesh | None = None, expert_axes: tuple[str, ...] = ("expert",)
  ):
    if config.norms != "after":
      self.attention_norm, self.mlp_norm = norm_of_stream(config), norm_of_stream(config)
    if config.norms != "before":
      self.attention_end_norm, self.mlp_end_norm = norm_of_stream(config), norm_of_stream(config)
    self.attention = Attention(config, rngs=rngs, mesh=mesh)
    self.mlp = MoE(config, rngs=rngs, mesh=mesh, expert_axes=expert_axes) if sparse else MLP(config, rngs=rngs, mesh=mesh)
    self.sparse = sparse
    self.mesh = mesh

  def normed(self, name: str, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Applies a norm to its input, which it is without that norm."""
    if not hasattr(self, name):
      return x
    y = getattr(self, name)(x)
    return rounded(y) if self.attention.config.exact and name.endswith("end_norm") else y

  def feed_forward(self, x: Float[Array, "B T D"], replay: Int[Array, "B T K"] | None = None):
    """Applies the feed-forward layer to normalised tokens.

    Also returns what its router did, None without one.
    """
    return self.mlp(x, replay) if self.sparse else (self.mlp(x), None)

  def __call__(
    self,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T *axes"],
    rows: Rows,
    in_window: Bool[Array, ""] | None,
    replay: Int[Array, "B T K"] | None = None,
  ):
    """Applies the block to whole rows; also returns what its router did, and keys and values.

    `in_window` says whether its attention has a sliding window; None if that of no layer has one.
    """
    # A norm adds up the whole width on one device if its sums are to have one order.
    part, added = (whole, whole) if self.attention.config.exact else (scattered, lambda x, mesh: x)
    x = part(x, self.mesh)
    mixed, kv = self.attention.over_rows(gathered(self.normed("attention_norm", x), self.mesh), positions, rows, in_window)
    x = added(x + self.normed("attention_end_norm", part(mixed, self.mesh)), self.mesh)
    y, routed = self.feed_forward(gathered(self.normed("mlp_norm", x), self.mesh), replay)
    return added(x + self.normed("mlp_end_norm", part(y, self.mesh)), self.mesh), routed, kv

  def step(self, x: Float[Array, "B D"], rotated: Rotation, prompts, blocks, view: cache.View):
    """Applies the block to one new token per row.

    Also returns the cache blocks with the token and the experts that it visited, None without any.
    """
    mixed, blocks = self.attention.step(self.normed("attention_norm", x), rotated, prompts, blocks, view)
    # The residual stream keeps its shape. If it is reshaped between two layers, XLA fuses its sum
    # into every reader, which then adds up the outputs of all earlier layers again.
    x = x + self.normed("attention_end_norm", mixed)
    y, routed = self.feed_forward(self.normed("mlp_norm", x)[:, None])
    return x + self.normed("mlp_end_norm", y[:, 0]), blocks, None if routed is None else routed.experts[:, 0]

  def extend(self, x: Float[Array, "N T D"], rotated: Rotation, blocks, spans: cache.Spans, window: int | None):
    """Applies the block to the tokens of spans.

    Also returns the cache blocks with them and the experts that they visited, None without any.
    """
    mixed, blocks = self.attention.extend(self.normed("attention_norm", x), rotated, blocks, spans, window)
    x = x + self.normed("attention_end_norm", mixed)
    y, routed = self.feed_forward(self.normed("mlp_norm", x))
    return x + self.normed("mlp_end_norm", y), blocks, None if routed is None else routed.experts
