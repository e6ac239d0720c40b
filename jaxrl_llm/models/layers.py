"""The parts of a decoder block as Flax NNX modules. Every parameter names its logical axes; `mesh` maps these to mesh axes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.config import ModelConfig

# Finite, so that a fully masked row (padding) gives a uniform softmax and not a NaN that would poison the gradient.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


class KVCache(NamedTuple):
  """Keys and values of all layers, written in place slot by slot.

  Attributes:
    k: rotated keys.
    v: values.
    valid: True where a slot holds a token that may be attended to.
  """

  k: Float[Array, "L B S K C"]
  v: Float[Array, "L B S K C"]
  valid: Bool[Array, "B S"]


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], *, fan_in: int) -> nnx.Param:
  """A weight drawn from N(0, 1/fan_in), cut at two deviations, with its logical axes."""
  init = jax.nn.initializers.truncated_normal(stddev=fan_in**-0.5)
  return nnx.Param(init(rngs.params(), shape, jnp.float32), axes=axes)


def rope(x: Float[Array, "B T h C"], positions: Int[Array, "B T"], theta: float) -> Float[Array, "B T h C"]:
  """Rotary position embedding, half-split layout, angles in float32.

  References:
    RoFormer, arXiv:2104.09864, 2021.
  """
  half = x.shape[-1] // 2
  frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angles = positions[..., None, None].astype(jnp.float32) * frequencies
  sin, cos = jnp.sin(angles), jnp.cos(angles)
  a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class RMSNorm(nnx.Module):
  """x / rms(x) · scale, in float32.

  References:
    Root mean square layer normalization, arXiv:1910.07467, 2019.
  """

  def __init__(self, width: int, *, axis: str, eps: float):
    self.scale = nnx.Param(jnp.ones((width,), jnp.float32), axes=(axis,))
    self.eps = eps

  def __call__(self, x: Float[Array, "*batch w"]) -> Float[Array, "*batch w"]:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    return (y * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
  """Grouped-query self-attention, over packed rows or through a cache.

  References:
    GQA, arXiv:2305.13245, 2023.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    d, h, k, c = config.d_model, config.num_heads, config.num_kv_heads, config.head_dim
    self.q = param(rngs, (d, h, c), ("embed", "heads", "head_dim"), fan_in=d)
    self.k = param(rngs, (d, k, c), ("embed", "kv_heads", "head_dim"), fan_in=d)
    self.v = param(rngs, (d, k, c), ("embed", "kv_heads", "head_dim"), fan_in=d)
    # Residual branches start small (GPT-2): the stream's variance does not grow with depth.
    self.o = param(rngs, (h, c, d), ("heads", "head_dim", "embed"), fan_in=h * c * 2 * config.num_layers)
    if config.qkv_bias:
      self.q_bias = nnx.Param(jnp.zeros((h, c), jnp.float32), axes=("heads", "head_dim"))
      self.k_bias = nnx.Param(jnp.zeros((k, c), jnp.float32), axes=("kv_heads", "head_dim"))
      self.v_bias = nnx.Param(jnp.zeros((k, c), jnp.float32), axes=("kv_heads", "head_dim"))
    if config.qk_norm:
      self.q_norm = RMSNorm(c, axis="head_dim", eps=config.norm_eps)
      self.k_norm = RMSNorm(c, axis="head_dim", eps=config.norm_eps)
    self.config = config

  def project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]):
    """Queries, keys (both normalised and rotated) and values of `x`."""
    config, dtype = self.config, x.dtype
    q, k, v = (jnp.einsum("btd,dhc->bthc", x, w[...].astype(dtype)) for w in (self.q, self.k, self.v))
    if config.qkv_bias:
      q, k, v = (a + b[...].astype(dtype) for a, b in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias)))
    if config.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    return rope(q, positions, config.rope_theta), rope(k, positions, config.rope_theta), v

  def attend(self, q, k, v, mask: Bool[Array, "B T S"]) -> Float[Array, "B T D"]:
    """softmax(q·k / √C) v and the output projection; the softmax in float32."""
    config = self.config
    batch, length = q.shape[:2]
    # Query heads are grouped by the key-value head they read, so keys and values are never repeated in memory.
    q = q.reshape(batch, length, config.num_kv_heads, -1, config.head_dim)
    scores = jnp.einsum("btkgc,bskc->bkgts", q, k, preferred_element_type=jnp.float32) * config.head_dim**-0.5
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskc->btkgc", weights, v).reshape(batch, length, config.num_heads, config.head_dim)
    return jnp.einsum("bthc,hcd->btd", out, self.o[...].astype(out.dtype))


class MLP(nnx.Module):
  """SwiGLU: (silu(x·gate) ⊙ x·up)·down.

  References:
    GLU variants improve transformer, arXiv:2002.05202, 2020.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    d, f = config.d_model, config.d_ff
    self.gate = param(rngs, (d, f), ("embed", "mlp"), fan_in=d)
    self.up = param(rngs, (d, f), ("embed", "mlp"), fan_in=d)
    self.down = param(rngs, (f, d), ("mlp", "embed"), fan_in=f * 2 * config.num_layers)

  def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    gate, up, down = (w[...].astype(x.dtype) for w in (self.gate, self.up, self.down))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


class Block(nnx.Module):
  """Pre-norm attention and feed-forward, each on the residual stream."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(config.d_model, axis="embed", eps=config.norm_eps)
    self.attention = Attention(config, rngs=rngs)
    self.mlp_norm = RMSNorm(config.d_model, axis="embed", eps=config.norm_eps)
    self.mlp = MLP(config, rngs=rngs)

  def __call__(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], mask: Bool[Array, "B T T"]):
    """The block over whole rows."""
    q, k, v = self.attention.project(self.attention_norm(x), positions)
    x = x + self.attention.attend(q, k, v, mask)
    return x + self.mlp(self.mlp_norm(x))

  def step(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], cache: KVCache, layer, slot):
    """The block on new tokens that go to `slot` and after of layer `layer` of the cache."""
    q, k, v = self.attention.project(self.attention_norm(x), positions)
    start = (layer, 0, slot, 0, 0)
    cache = cache._replace(
      k=jax.lax.dynamic_update_slice(cache.k, k[None].astype(cache.k.dtype), start),
      v=jax.lax.dynamic_update_slice(cache.v, v[None].astype(cache.v.dtype), start),
    )
    slots = jnp.arange(cache.valid.shape[1])
    causal = slots[None, :] <= slot + jnp.arange(x.shape[1])[:, None]
    mask = cache.valid[:, None, :] & causal
    k_all, v_all = (jax.lax.dynamic_index_in_dim(c, layer, keepdims=False).astype(x.dtype) for c in (cache.k, cache.v))
    x = x + self.attention.attend(q, k_all, v_all, mask)
    return x + self.mlp(self.mlp_norm(x)), cache
