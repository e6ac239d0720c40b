"""The vision tower: from patches of pictures to features at the slots of image tokens."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from jaxrl_llm.devices.mesh import BATCH_AXES, num_row_shards
from jaxrl_llm.kernels.precision import precision_of
from jaxrl_llm.kernels.visibility import MASKED
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.linear import matmul, param
from jaxrl_llm.models.remat import rematerialised
from jaxrl_llm.models.rope import Rotation, frequencies, rope
from jaxrl_llm.types import Patches

_THETA = 1e4
"""Base of the tower's rotary frequencies."""

_QUERIES = 512
"""Most patches of a picture whose scores to all of its patches exist at a time."""


class LayerNorm(nnx.Module):
  """Layer normalisation in float32, with scale and bias."""

  def __init__(self, width: int, *, axis: str, eps: float = 1e-6):
    self.scale = nnx.Param(jnp.ones((width,), jnp.float32), axes=(axis,))
    self.bias = nnx.Param(jnp.zeros((width,), jnp.float32), axes=(axis,))
    self.eps = eps

  def __call__(self, x: Float[Array, "*batch w"]) -> Float[Array, "*batch w"]:
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
    return (y * self.scale[...] + self.bias[...]).astype(x.dtype)


class Linear(nnx.Module):
  """A linear map with a bias."""

  def __init__(self, ins: int, outs: int, axes: tuple[str, str], *, rngs: nnx.Rngs, dtype: str, fan_in: int | None = None):
    self.weight = param(rngs, (ins, outs), axes, fan_in=fan_in or ins, dtype=dtype)
    self.bias = nnx.Param(jnp.zeros((outs,), dtype), axes=axes[1:])

  def __call__(self, x: Float[Array, "*batch ins"]) -> Float[Array, "*batch outs"]:
    return matmul(x, self.weight[...].astype(x.dtype)) + self.bias[...].astype(x.dtype)


class TowerAttention(nnx.Module):
  """Attention between all patches of a picture, with rotations by row and column."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    width, dtype = config.vision.d_model, config.param_dtype
    for name in ("q", "k", "v"):
      setattr(self, name, Linear(width, width, ("embed", "heads"), rngs=rngs, dtype=dtype))
    self.o = Linear(width, width, ("heads", "embed"), rngs=rngs, dtype=dtype, fan_in=width * 2 * config.vision.num_layers)
    self.num_heads = config.vision.num_heads

  def __call__(self, x: Float[Array, "I N D"], rotated: Rotation, mask: Bool[Array, "I N"]) -> Float[Array, "I N D"]:
    q, k, v = (linear(x).reshape(*x.shape[:2], self.num_heads, -1) for linear in (self.q, self.k, self.v))
    return self.o(_attend(rope(q, rotated), rope(k, rotated), v, mask).reshape(x.shape))


def queries_at_once(patches: int) -> int:
  """Returns the number of patches of a picture whose scores to all of its patches exist at a time.

  Example:
    >>> [queries_at_once(patches) for patches in (300, 513, 4096)]
    [300, 257, 512]
  """
  return -(-patches // -(-patches // _QUERIES))


def _attend(
  q: Float[Array, "I N H C"], k: Float[Array, "I N H C"], v: Float[Array, "I N H C"], mask: Bool[Array, "I N"]
) -> Float[Array, "I N H C"]:
  """Attends from a part of the queries after the other to all patches of the same picture."""

  def part(q: Float[Array, "I n H C"]) -> Float[Array, "I n H C"]:
    scores = jnp.einsum("inhc,imhc->ihnm", q, k, precision=precision_of(q, k), preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * q.shape[-1] ** -0.5, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("ihnm,imhc->inhc", weights, v, precision=precision_of(weights, v))

  size = queries_at_once(q.shape[1])
  if size == q.shape[1]:
    return part(q)
  parts = -(-q.shape[1] // size)
  padded = jnp.pad(q, [(0, 0), (0, parts * size - q.shape[1]), (0, 0), (0, 0)])
  by_part = jnp.moveaxis(padded.reshape(q.shape[0], parts, size, *q.shape[2:]), 1, 0)
  mixed = jnp.moveaxis(jax.lax.map(jax.checkpoint(part), by_part), 0, 1)
  return mixed.reshape(padded.shape)[:, : q.shape[1]]


def split(x: Float[Array, "I N W"], mesh: Mesh | None) -> Float[Array, "I N W"]:
  """Splits pictures over the mesh as rows are, if it divides their number.

  Otherwise XLA splits their widths as the weights, and adds up every product over all devices.
  """
  if mesh is None or mesh.size == 1 or x.shape[0] % num_row_shards(mesh):
    return x
  spec = PartitionSpec(BATCH_AXES, *[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1))
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


class TowerBlock(nnx.Module):
  """Pre-norm attention and a feed-forward layer with GELU, each on the residual stream."""

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
    vision, dtype = config.vision, config.param_dtype
    self.attention_norm = LayerNorm(vision.d_model, axis="embed")
    self.attention = TowerAttention(config, rngs=rngs)
    self.mlp_norm = LayerNorm(vision.d_model, axis="embed")
    self.up = Linear(vision.d_model, vision.d_ff, ("embed", "mlp"), rngs=rngs, dtype=dtype)
    self.down = Linear(vision.d_ff, vision.d_model, ("mlp", "embed"), rngs=rngs, dtype=dtype, fan_in=vision.d_ff * 2 * vision.num_layers)

  def __call__(self, x: Float[Array, "I N D"], rotated: Rotation, mask: Bool[Array, "I N"]) -> Float[Array, "I N D"]:
    x = x + self.attention(self.attention_norm(x), rotated, mask)
    return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x)), approximate=True))


class Merger(nnx.Module):
  """A map from squares of neighbouring patches to features of the decoder's width.

  The merger of the tower's last layer normalises each patch, and those of deep layers (DeepStack)
  a whole square.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, is_deep: bool):
    vision, dtype = config.vision, config.param_dtype
    width = vision.d_model * vision.merge_size**2
    self.norm = LayerNorm(width, axis="patch") if is_deep else LayerNorm(vision.d_model, axis="embed")
    self.up = Linear(width, width, ("embed", "mlp"), rngs=rngs, dtype=dtype)
    self.down = Linear(width, config.d_model, ("mlp", "embed"), rngs=rngs, dtype=dtype)
    self.width, self.is_deep = width, is_deep

  def __call__(self, x: Float[Array, "I N W"]) -> Float[Array, "I S D"]:
    squares = lambda x: x.reshape(x.shape[0], -1, self.width)
    x = self.norm(squares(x)) if self.is_deep else squares(self.norm(x))
    return self.down(jax.nn.gelu(self.up(x), approximate=False))


class Tower(nnx.Module):
  """A vision transformer over the patches of a picture.

  References:
    Qwen3-VL technical report, arXiv:2511.21631, 2025; DeepStack, arXiv:2406.04334, 2024.
  """

  def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, mesh: Mesh | None = None):
    vision, dtype = config.vision, config.param_dtype

    @nnx.split_rngs(splits=vision.num_layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def blocks(rngs):
      return TowerBlock(config, rngs=rngs)

    self.patches = Linear(vision.patch_width, vision.d_model, ("patch", "embed"), rngs=rngs, dtype=dtype)
    # As large as the features of patches, or random towers see what is drawn but not where.
    self.positions = param(rngs, (vision.grid_side**2, vision.d_model), ("patch", "embed"), fan_in=1, dtype=dtype)
    self.layers = blocks(rngs)
    self.merger = Merger(config, rngs=rngs, is_deep=False)
    for i in range(len(vision.deep_layers)):
      setattr(self, f"deep_merger_{i}", Merger(config, rngs=rngs, is_deep=True))
    self.config = config
    self.mesh = mesh

  @jax.named_scope("tower")
  def __call__(self, patches: Patches) -> Float[Array, "I S F D"]:
    """Computes the features of each image token: the one that stands for it, then the deep ones."""
    vision, dtype = self.config.vision, self.config.dtype
    positions = self.positions.get_value()[patches.corners].astype(jnp.float32)
    shares = patches.shares
    positions = jnp.einsum("inkd,ink->ind", positions, shares, precision=precision_of(positions, shares))
    x = split(self.patches(patches.pixels.astype(dtype)) + positions.astype(dtype), self.mesh)
    quarter = vision.d_model // vision.num_heads // 4
    angles = (patches.coordinates[..., None].astype(jnp.float32) * frequencies(2 * quarter, _THETA)).reshape(*x.shape[:2], 1, -1)
    rotated = Rotation(jnp.sin(angles), jnp.cos(angles))
    graph, stacked = nnx.split(self.layers)

    def step(x, block):
      return split(nnx.merge(graph, block)(x, rotated, patches.mask), self.mesh), None

    features, start = [], 0
    for i, layer in enumerate(vision.deep_layers):
      x = self._through(step, x, stacked, start, layer + 1)
      features.append(split(getattr(self, f"deep_merger_{i}")(x), self.mesh))
      start = layer + 1
    x = self._through(step, x, stacked, start, vision.num_layers)
    return jnp.stack([split(self.merger(x), self.mesh), *features], axis=2)

  def _through(self, step, x: Float[Array, "I N W"], stacked, start: int, stop: int) -> Float[Array, "I N W"]:
    """Applies the layers from `start` up to `stop`."""
    if start == stop:
      return x
    return jax.lax.scan(rematerialised(step, self.config.remat), x, jax.tree.map(lambda a: a[start:stop], stacked))[0]
