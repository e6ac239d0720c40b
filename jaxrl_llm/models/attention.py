"""Attention, softmax(q·k / √C) v: one function for all platforms and the table of its backends."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxrl_llm.devices.mesh import BATCH_AXES, num_row_shards, platform_of
from jaxrl_llm.kernels.by_sequence import attention_by_sequence
from jaxrl_llm.kernels.chunked import chunked_attention
from jaxrl_llm.kernels.flash import KERNELS, flash_attention
from jaxrl_llm.kernels.partial import CPU_BLOCK, joined, mean_of, nothing_of
from jaxrl_llm.kernels.precision import default_precision_of, precision_of
from jaxrl_llm.kernels.visibility import MASKED, Rows, packed, padded
from jaxrl_llm.messages import Problem, did_you_mean

__all__ = ["BACKENDS", "Rows", "check_backend", "cudnn_attention", "packed", "row_attention", "suited", "xla_attention"]


def xla_attention(
  q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], v: Float[Array, "B S K C"], mask: Bool[Array, "B T S"], *, block: int = 1
) -> Float[Array, "B T H C"]:
  """Computes grouped-query attention in plain array operations, with the softmax in float32.

  Query head h reads key-value head h·K // H. The mask is True if a query may attend to a key.
  Rows are padded to a multiple of `block` tokens, because products of other lengths may add in
  another order than those of longer rows.
  """
  batch, tokens, num_heads, width = q.shape
  q, k, v = (padded(x, block) for x in (q, k, v))
  mask = jnp.pad(mask, ((0, 0), *((0, -size % block) for size in mask.shape[1:])))
  length, num_kv = q.shape[1], k.shape[2]
  # [B T H C] -> [B K H/K·T C]: query heads are grouped by the key-value head that they read, so
  # keys and values are never repeated in memory.
  q = q.reshape(batch, length, num_kv, -1, width).transpose(0, 2, 3, 1, 4).reshape(batch, num_kv, -1, width)
  scores = jnp.einsum("bkrc,bskc->bkrs", q, k, precision=precision_of(q, k), preferred_element_type=jnp.float32) * width**-0.5
  # Finite, so that a fully masked row (padding) gives a uniform softmax, not a NaN in the gradient.
  scores = jnp.where(jnp.tile(mask, (1, num_heads // num_kv, 1))[:, None], scores, MASKED)

  def mix(weights: Float[Array, "B K R S"]) -> Float[Array, "B K R C"]:
    weights = weights.astype(v.dtype)
    return jnp.einsum("bkrs,bskc->bkrc", weights, v, precision=precision_of(weights, v), preferred_element_type=jnp.float32)

  # As the first block of several: XLA fuses a sum that nothing precedes with other operations.
  mixed = mean_of(joined(nothing_of(q), scores, mix)).astype(v.dtype)
  return mixed.reshape(batch, num_kv, -1, length, width).transpose(0, 3, 1, 2, 4).reshape(batch, length, num_heads, width)[:, :tokens]


def cudnn_attention(
  q: Float[Array, "B T H C"], k: Float[Array, "B S K C"], v: Float[Array, "B S K C"], mask: Bool[Array, "B T S"]
) -> Float[Array, "B T H C"]:
  """Computes `xla_attention` by the flash attention of NVIDIA's library.

  Raises:
    ValueError: If the library does not support the dtype.

  Note:
    cuDNN takes the mask as a bias of B·T·T entries. It spares the memory for the scores of every
    head, but not that for the mask.
  """
  if q.dtype not in (jnp.bfloat16, jnp.float16):
    raise ValueError(
      f"model.attention: found 'cudnn' with activations of {q.dtype}, expected bfloat16 or float16; set model.dtype='bfloat16', or "
      "model.attention='xla'"
    )
  with default_precision_of(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")


def _on_each_device(attend: Callable, q: Array, k: Array, v: Array, rows: Rows, mesh: Mesh | None) -> Array:
  """Calls `attend(q, k, v, segments, prefixes, keys=, slots=, stripe=, window=)` on each shard.

  XLA cannot shard a kernel or a loop over blocks. Queries stay where they are. The keys and values
  of a row's other parts, and their gradients, travel over the axis context. Without stripes, the
  last part of a row of one long sequence has the most work.
  """
  if mesh is None or mesh.size == 1:
    return attend(q, k, v, rows.segments, rows.prefixes, window=rows.window)
  # Rows that do not divide evenly, such as a single prompt, are replicated on every device.
  split_rows = BATCH_AXES if q.shape[0] % num_row_shards(mesh) == 0 else None
  parts = mesh.shape["context"]
  context = "context" if parts > 1 and q.shape[1] % parts == 0 else None
  heads, ids = PartitionSpec(split_rows, context, "tensor", None), PartitionSpec(split_rows, context)
  slots, stripe, joined = np.arange(q.shape[1], dtype=np.int32), None, lambda x: x
  if rows.stripes is not None:
    slots, stripe, joined = rows.stripes.slots, rows.stripes.size, rows.stripes.joined

  def local(q, k, v, segments, prefixes, slots, window):
    if context is None:
      return attend(q, k, v, segments, prefixes, window=window)
    gathered = lambda x: joined(jax.lax.all_gather(x, context, axis=1, tiled=True))
    k, v, keys = map(gathered, (k, v, segments))
    window = window and window._replace(positions=gathered(window.positions))
    return attend(q, k, v, segments, prefixes, keys=keys, slots=slots, stripe=stripe, window=window)

  specs = (heads, heads, heads, ids, ids, PartitionSpec(context), ids)
  return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)(
    q, k, v, rows.segments, rows.prefixes, slots, rows.window
  )


def row_attention(
  q: Float[Array, "B T H C"],
  k: Float[Array, "B T K C"],
  v: Float[Array, "B T K C"],
  rows: Rows,
  *,
  backend: str,
  mesh: Mesh | None,
  exact: bool = False,
) -> Float[Array, "B T H C"]:
  """Computes self-attention over packed rows; see `xla_attention`.

  Args:
    q: Queries.
    k: Keys.
    v: Values.
    rows: Packed rows, which define the tokens that each token sees.
    backend: Key of `BACKENDS`, or "auto".
    mesh: Device mesh; None is one device. Rows are sharded over data, fsdp and expert, their parts
      over context, and heads over tensor.
    exact: Whether the sums are in the order of each sequence, in place of a backend; see
      `ModelConfig.exact`.

  Returns:
    The attention; finite but meaningless at padding.

  Raises:
    ValueError: If the backend does not exist, or does not support the platform or dtype.
  """
  if exact:
    return _on_each_device(attention_by_sequence, q, k, v, rows, mesh)
  platform = platform_of(mesh)
  check_backend(backend)
  name = suited(platform, q.dtype, q.shape[-1], q.shape[1]) if backend == "auto" else backend
  if platform not in (platforms := _PLATFORMS.get(name, (platform,))):
    raise ValueError(
      f"model.attention: found {name!r}, which runs on {' or '.join(platforms)}, but the platform is {platform}; "
      "expected 'auto' or 'xla'"
    )
  return BACKENDS[name](q, k, v, rows, mesh, platform)


def suited(platform: str, dtype: DTypeLike, head_dim: int, length: int) -> str:
  """Returns the backend that "auto" selects.

  Args:
    platform: Platform of the devices: "cpu", "gpu" or "tpu".
    dtype: Dtype of the queries.
    head_dim: Width of a head.
    length: Number of tokens of a row.

  Example:
    >>> suited("gpu", jnp.bfloat16, 64, 2047), suited("gpu", jnp.bfloat16, 64, 2048), suited("tpu", jnp.float32, 128, 4096)
    ('cudnn', 'flash', 'flash')
  """
  is_long = length > _AT_ONCE.get(platform, 2048)
  if platform == "tpu" and head_dim % 64 == 0:
    return "flash"
  # Shorter rows were not timed. For longer ones cuDNN takes 1.3 to 1.6 times as long on an H200 and
  # holds T·T numbers per row, and a loop would launch thousands of small products.
  if platform == "gpu" and length >= _FLASH and dtype in (jnp.bfloat16, jnp.float32) and KERNELS["gpu"].reads(head_dim):
    return "flash"
  if platform == "gpu" and dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128:
    return "cudnn"
  return "chunked" if is_long else "xla"


def check_backend(name: str) -> None:
  """Rejects a name that is neither "auto" nor a key of `BACKENDS`; starts no device.

  Raises:
    ValueError: If the name is unknown. One line, with the fix.

  Example:
    >>> check_backend("flsh")
    Traceback (most recent call last):
    ...
    ValueError: model.attention: found 'flsh', expected one of auto, ...; did you mean 'flash'?
  """
  names = ["auto", *BACKENDS]
  if name not in names:
    raise ValueError(Problem("model.attention", repr(name), f"one of {', '.join(names)}{did_you_mean(name, names)}"))


# Platforms of the backends that do not run everywhere. CPUs emulate "flash", for tests.
_PLATFORMS = {"cudnn": ("gpu",), "flash": tuple(KERNELS)}

# Tokens per block: elsewhere than on a CPU enough to fill the device.
_BLOCK = {"cpu": CPU_BLOCK, "gpu": 256, "tpu": 512}
# Rows up to this length do not benefit from blocks: on a CPU they are one block, and elsewhere each
# step of the loop waits for the one before.
_AT_ONCE = {"cpu": 64, "gpu": 2048, "tpu": 2048}
# Length from which "auto" selects the kernels of GPUs.
_FLASH = 2048

# Functions `(q, k, v, rows, mesh, platform) -> attention`. XLA itself shards those without
# `_on_each_device`.
BACKENDS = {
  "xla": lambda q, k, v, rows, mesh, platform: xla_attention(q, k, v, rows.mask, block=16 if platform == "cpu" else 1),
  "chunked": lambda q, k, v, rows, mesh, platform: _on_each_device(
    partial(chunked_attention, block=_BLOCK.get(platform, 256)), q, k, v, rows, mesh
  ),
  "cudnn": lambda q, k, v, rows, mesh, platform: cudnn_attention(q, k, v, rows.mask),
  "flash": lambda q, k, v, rows, mesh, platform: _on_each_device(
    partial(flash_attention, platform=platform, interpret=platform == "cpu"), q, k, v, rows, mesh
  ),
}
