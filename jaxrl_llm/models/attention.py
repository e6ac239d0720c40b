"""softmax(q·k / √C) v: one function for every platform, and the table of its implementations."""

import difflib
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.mesh import BATCH_AXES, num_row_shards

# Finite, so that a fully masked row (padding) gives a uniform softmax and not a NaN that would poison the gradient.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)

_LANES = 128  # Of a TPU's vector registers: blocks of the splash kernel are multiples of it.
_BLOCKS = (512, 256, 128)  # Larger ones read keys and values less often; 1024 leaves too little of the fast memory for the backward pass.


def xla_attention(
  q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], v: Float[Array, "B S K C"], mask: Bool[Array, "B T S"]
) -> Float[Array, "B T H C"]:
  """Grouped-query attention as plain array operations; the softmax in float32.

  Args:
    q: queries; head h reads key-value head h·K // H.
    k: keys.
    v: values.
    mask: True where a query may attend to a key.
  """
  batch, length, num_heads, width = q.shape
  # Query heads are grouped by the key-value head they read, so keys and values are never repeated in memory.
  q = q.reshape(batch, length, k.shape[2], -1, width)
  scores = jnp.einsum("btkgc,bskc->bkgts", q, k, preferred_element_type=jnp.float32) * width**-0.5
  scores = jnp.where(mask[:, None, None], scores, MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("bkgts,bskc->btkgc", weights, v).reshape(batch, length, num_heads, width)


class Rows(NamedTuple):
  """Packed rows, as attention sees them. Whichever of the two a backend does not read is never computed.

  Attributes:
    segments: sequence of each token, from 1; 0 is padding.
    mask: True where a token is an earlier one, or the same, of the same sequence.
  """

  segments: Int[Array, "B T"]
  mask: Bool[Array, "B T T"]


def packed(segments: Int[Array, "B T"]) -> Rows:
  """Causal attention within each sequence of a row."""
  causal = jnp.tril(jnp.ones((segments.shape[1],) * 2, bool))
  return Rows(segments, causal & (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, :, None])


def dot_product_attention(
  q: Float[Array, "B T H C"],
  k: Float[Array, "B S K C"],
  v: Float[Array, "B S K C"],
  mask: Bool[Array, "B T S"],
  *,
  implementation: str,
) -> Float[Array, "B T H C"]:
  """Attention by `jax.nn.dot_product_attention`.

  Args:
    q: queries.
    k: keys.
    v: values.
    mask: True where a query may attend to a key.
    implementation: "xla", or "cudnn" for the flash attention of NVIDIA's library.

  Raises:
    ValueError: "cudnn" with a dtype that it does not take.

  Note:
    cuDNN is handed the mask as a bias of B·T·T entries: it saves the scores of every head, not the mask.
  """
  if implementation == "cudnn" and q.dtype not in (jnp.bfloat16, jnp.float16):
    raise ValueError(
      f"model.attention: found 'cudnn' with activations of {q.dtype}, expected bfloat16 or float16; set model.dtype='bfloat16', or "
      "model.attention='xla'"
    )
  return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation=implementation)


def splash_attention(
  q: Float[Array, "B T H C"],
  k: Float[Array, "B T K C"],
  v: Float[Array, "B T K C"],
  segments: Int[Array, "B T"],
  *,
  mesh: Mesh | None = None,
  interpret: bool = False,
) -> Float[Array, "B T H C"]:
  """Flash attention for TPUs: blocks above the diagonal are skipped, scores never leave the chip, softmax and sums are float32.

  Args:
    q: queries; head h reads key-value head h·K // H.
    k: keys.
    v: values.
    segments: sequence of each token; 0 is padding, whose tokens see each other, so that no softmax is ever empty.
    mesh: rows lie over data, fsdp and expert, heads over tensor. XLA cannot split the kernel, so each device runs its own.
    interpret: emulate the kernel, slowly, on a device that is no TPU.

  Returns:
    The attention; at padding, something finite that means nothing.
  """
  attend = partial(_splash_on_one_device, interpret=interpret)
  if mesh is not None and mesh.size > 1:
    # A batch that does not divide, such as a single prompt by hand, lies whole on every device.
    split_rows = BATCH_AXES if q.shape[0] % num_row_shards(mesh) == 0 else None
    heads, ids = PartitionSpec(split_rows, None, "tensor", None), PartitionSpec(split_rows)
    attend = jax.shard_map(attend, mesh=mesh, in_specs=(heads, heads, heads, ids), out_specs=heads, check_vma=False)
  return attend(q, k, v, segments)


def _splash_on_one_device(q: Array, k: Array, v: Array, segments: Array, *, interpret: bool) -> Array:
  # Here, because only TPUs need it and it takes a while to import.
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  length, num_heads, width = q.shape[1:]
  padding = -length % _LANES
  padded = length + padding
  block = next(size for size in _BLOCKS if padded % size == 0)
  sizes = splash.BlockSizes(
    block_q=block,
    block_kv=block,
    block_kv_compute=block,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_kv_dkv_compute=block,
    block_q_dq=block,
    block_kv_dq=block,
  )
  mask = splash.MultiHeadMask([splash.CausalMask((padded, padded))] * num_heads)
  kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)
  q = (q.astype(jnp.float32) * width**-0.5).astype(q.dtype)  # The kernel does not scale.
  q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))).swapaxes(1, 2) for x in (q, k, v))
  segments = jnp.pad(segments, ((0, 0), (0, padding)))
  return jax.vmap(kernel)(q, k, v, splash.SegmentIds(segments, segments)).swapaxes(1, 2)[:, :length]


def row_attention(
  q: Float[Array, "B T H C"], k: Float[Array, "B T K C"], v: Float[Array, "B T K C"], rows: Rows, *, backend: str, mesh: Mesh | None
) -> Float[Array, "B T H C"]:
  """Self-attention over packed rows.

  Args:
    q: queries.
    k: keys.
    v: values.
    rows: which tokens see which.
    backend: key of `BACKENDS`, or "auto".
    mesh: rows lie over data, fsdp and expert, heads over tensor; None is one device.

  Raises:
    ValueError: a backend that does not exist, or not for this platform or dtype.
  """
  platform = mesh.devices.flat[0].platform if mesh is not None else jax.default_backend()  # A mesh may be of chips that are elsewhere.
  check_backend(backend)
  name = suited(platform, q.dtype, q.shape[-1]) if backend == "auto" else backend
  if platform not in (platforms := _PLATFORMS.get(name, (platform,))):
    raise ValueError(f"model.attention: found {name!r} on a {platform}, which runs on {' or '.join(platforms)}; expected 'auto' or 'xla'")
  return BACKENDS[name](q, k, v, rows, mesh, platform)


def suited(platform: str, dtype: DTypeLike, head_dim: int) -> str:
  """What "auto" stands for.

  Args:
    platform: "cpu", "gpu" or "tpu".
    dtype: of the queries.
    head_dim: width of a head.

  Example:
    >>> suited("gpu", jnp.bfloat16, 64), suited("gpu", jnp.float32, 64), suited("tpu", jnp.float32, 128)
    ('cudnn', 'xla', 'splash')
  """
  if platform == "tpu":
    return "splash" if head_dim % 64 == 0 else "xla"
  if platform == "gpu" and dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128:
    return "cudnn"
  return "xla"


def check_backend(name: str) -> None:
  """Refuses what is neither "auto" nor a key of `BACKENDS`; starts no device.

  Raises:
    ValueError: one line, with the fix.

  Example:
    >>> check_backend("splsh")
    Traceback (most recent call last):
    ...
    ValueError: model.attention: found 'splsh', expected one of auto, xla, dot_product, cudnn, splash; did you mean 'splash'?
  """
  names = ["auto", *BACKENDS]
  if name not in names:
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"model.attention: found {name!r}, expected one of {', '.join(names)}{hint}")


_PLATFORMS = {"cudnn": ("gpu",), "splash": ("tpu", "cpu")}  # The others run everywhere. The CPU only emulates, for tests.

# `(q, k, v, rows, mesh, platform) -> attention`.
BACKENDS = {
  "xla": lambda q, k, v, rows, mesh, platform: xla_attention(q, k, v, rows.mask),
  "dot_product": lambda q, k, v, rows, mesh, platform: dot_product_attention(q, k, v, rows.mask, implementation="xla"),
  "cudnn": lambda q, k, v, rows, mesh, platform: dot_product_attention(q, k, v, rows.mask, implementation="cudnn"),
  "splash": lambda q, k, v, rows, mesh, platform: splash_attention(q, k, v, rows.segments, mesh=mesh, interpret=platform == "cpu"),
}
