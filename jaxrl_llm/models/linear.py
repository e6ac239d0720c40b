"""Weights, linear maps and their low-rank adapters.

Every parameter names its logical axes; `mesh` maps these to mesh axes.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxrl_llm.devices.mesh import RULES, num_row_shards
from jaxrl_llm.kernels.precision import dot, precision_of
from jaxrl_llm.models import quantized
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.taps import tap
from jaxrl_llm.types import Params

LEAST_ROWS, _LEAST_OUTPUTS = 64, 16
"""Least sizes of a product whose sums have one order on a CPU, however many its rows."""

ADAPTER = "_lora_"
"""Part of the name of every adapter matrix: `q_lora_a` and `q_lora_b` adapt `q`."""


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], *, fan_in: int, dtype: str = "float32") -> nnx.Param:
  """Draws a weight from N(0, 1/fan_in), truncated at two deviations, with its logical axes."""
  init = jax.nn.initializers.truncated_normal(stddev=fan_in**-0.5)
  return nnx.Param(init(rngs.params(), shape, jnp.float32).astype(dtype), axes=axes)


def adapter(module: nnx.Module, name: str, path: str, config: ModelConfig, *, rngs: nnx.Rngs, ins: int = 1, lead: int = 0) -> None:
  """Gives a weight an adapter if the config asks for one.

  `NAME_lora_a` is random and `NAME_lora_b` is zero, so that the adapter has no effect at first.

  Args:
    module: Module that holds the weight as `name`.
    name: Attribute of the weight.
    path: Path of the linear map, matched against `Lora.targets`.
    config: Config of the model.
    rngs: Random keys of the module.
    ins: Number of input axes of the weight.
    lead: Number of leading axes that index matrices (experts).
  """
  if config.lora is None or not any(re.fullmatch(target, path) for target in config.lora.targets):
    return
  weight = getattr(module, name)
  shape, axes, rank = weight.shape, weight.get_metadata()["axes"], config.lora.rank
  first, last = lead + ins, lead
  a_shape, a_axes = (*shape[:first], rank), (*axes[:first], "rank")
  b_shape, b_axes = (*shape[:last], rank, *shape[first:]), (*axes[:last], "rank", *axes[first:])
  setattr(module, f"{name}{ADAPTER}a", param(rngs, a_shape, a_axes, fan_in=math.prod(shape[lead:first])))
  setattr(module, f"{name}{ADAPTER}b", nnx.Param(jnp.zeros(b_shape, jnp.float32), axes=b_axes))


_THIN = 4
"""How many times fewer outputs than inputs make a weight thin."""


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Float[Array, "..."], weight: Float[Array, "..."], ins: int = 1) -> Float[Array, "..."]:
  """Contracts the last `ins` axes of `x` with the first ones of `weight`, in the dtype of `x`.

  The gradient of the weight is computed as xᵀ·dy, in the layout of the weight. JAX's own rule
  computes its transpose, and XLA on CPUs then copies a transposed dy. On a SwiGLU of 256 x 768 over
  7,680 tokens, the copy takes a third of the time.

  Example:
    >>> matmul(jnp.ones((2, 3)), jnp.ones((3, 4, 5)), 1).shape
    (2, 4, 5)
  """
  weight = weight.astype(x.dtype)
  return jnp.tensordot(x, weight, ins, precision=precision_of(x, weight))


def _matmul_bwd(ins: int, saved: tuple[Array, Array], ct: Array) -> tuple[Array, Array]:
  x, weight = saved
  of_tokens, of_outputs = tuple(range(x.ndim - ins)), tuple(range(x.ndim - ins, ct.ndim))
  outs, product = ct.ndim - len(of_tokens), partial(jax.lax.dot_general, precision=precision_of(x, ct))
  if _THIN * math.prod(ct.shape[len(of_tokens) :]) <= math.prod(x.shape[len(of_tokens) :]):
    # The matrix A of an adapter. XLA on CPUs copies the transpose of the left operand, and computes
    # it anew if it is cheap to compute: of a SwiGLU's product, that took a fifth of an update.
    of_weight = jnp.moveaxis(product(ct, x, ((of_tokens, of_tokens), ((), ()))), range(outs), range(-outs, 0))
  else:
    of_weight = product(x, ct, ((of_tokens, of_tokens), ((), ())))
  of_x = product(ct, weight.astype(x.dtype), ((of_outputs, tuple(range(ins, weight.ndim))), ((), ())))
  return of_x, of_weight.astype(weight.dtype)


matmul.defvjp(lambda x, weight, ins: (matmul(x, weight, ins), (x, weight)), _matmul_bwd)


@jax.custom_vjp
def matmul_in_float32(x: Float[Array, "..."], weight: Array) -> Float[Array, "..."]:
  """Multiplies in the dtype of `x`, with sums and results in float32.

  The gradient is rounded to the dtype of `x` before its two products, as TPUs do by themselves. By
  JAX's own rule GPUs would widen the other operands instead, for products in TensorFloat32 at half
  the speed.

  Example:
    >>> matmul_in_float32(jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4))).dtype.name
    'float32'
  """
  return dot(x, weight.astype(x.dtype), x.ndim - 1, 0)


def _matmul_in_float32_bwd(saved: tuple[Array, Array], ct: Array) -> tuple[Array, Array]:
  x, weight = saved
  ct, of_tokens = ct.astype(x.dtype), tuple(range(x.ndim - 1))
  of_x = dot(ct, weight.astype(x.dtype), ct.ndim - 1, 1)
  return of_x.astype(x.dtype), dot(x, ct, of_tokens, of_tokens).astype(weight.dtype)


matmul_in_float32.defvjp(lambda x, weight: (matmul_in_float32(x, weight), (x, weight)), _matmul_in_float32_bwd)


@jax.custom_vjp
def swiglu(gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
  """Computes silu(gate) ⊙ up, keeping only its two inputs for the backward pass.

  References:
    GLU variants improve transformer, arXiv:2002.05202, 2020.
  """
  return jax.nn.silu(gate) * up


def _swiglu_bwd(saved: tuple[Array, Array], ct: Array) -> tuple[Array, Array]:
  gate, up = saved
  sigmoid = jax.nn.sigmoid(gate)
  return ct * up * sigmoid * (1 + gate * (1 - sigmoid)), ct * gate * sigmoid


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_bwd)


def geglu(gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
  """Computes gelu(gate) ⊙ up, with the tangent form of the function; keeps what `swiglu` keeps.

  References:
    GLU variants improve transformer, arXiv:2002.05202, 2020.
  """
  return jax.checkpoint(lambda gate, up: jax.nn.gelu(gate, approximate=True) * up)(gate, up)


GATED = {"silu": swiglu, "gelu_tanh": geglu}
"""Gated products by their activation."""


def in_one_order(
  product: Callable[[Array, Array], Array], x: Float[Array, "B *batch I"], weight: Float[Array, "I O"], mesh: Mesh | None, parts: int = 1
) -> Float[Array, "B *batch O"]:
  """Computes x·W in float32 so that the bits of a row do not depend on the other rows.

  `product` multiplies matrices. Small ones are padded with zeros, since XLA on CPUs adds in another
  order there; see `devices.xla_flags.EXACT` for the rest. The first axis of `x` may be sharded over
  the rows of a mesh, and `parts` devices have a part of the outputs each.
  """
  shards = 1 if mesh is None or len(x) % num_row_shards(mesh) else num_row_shards(mesh)
  # XLA on CPUs has products of bfloat16 in some shapes only.
  rows, weight = x.astype(jnp.float32).reshape(len(x), -1, x.shape[-1]), weight.astype(x.dtype).astype(jnp.float32)
  count, least = rows.shape[1], -(-LEAST_ROWS * shards // len(x))
  rows = jnp.pad(rows, ((0, 0), (0, max(least - count, 0)), (0, 0)))
  weight = weight.reshape(len(weight), parts, -1)
  outputs = weight.shape[2]
  weight = jnp.pad(weight, ((0, 0), (0, 0), (0, max(_LEAST_OUTPUTS - outputs, 0))))
  y = product(rows, weight.reshape(len(weight), -1))[:, :count]
  return y.reshape(*x.shape[:-1], parts, -1)[..., :outputs].reshape(*x.shape[:-1], -1)


def rounded(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
  """Returns a product that programs on CPUs round before they add it to something else.

  Some would otherwise compute product and sum by one instruction that rounds once, and others, with
  other fusions, would not.
  """
  return jnp.maximum(x, jnp.finfo(x.dtype).min)


def _parts(axes: Sequence[str], size: int, mesh: Mesh | None) -> int:
  """Returns over how many devices the axis tensor of a mesh splits an axis of a matrix."""
  is_split = mesh is not None and any(RULES[axis] == "tensor" for axis in axes) and size % mesh.shape["tensor"] == 0
  return mesh.shape["tensor"] if is_split else 1


def _split(x: Float[Array, "*batch I"], parts: int, mesh: Mesh | None) -> Float[Array, "*batch I"]:
  """Splits rows over the axis tensor of a mesh, or not: any other split would be another sum."""
  if mesh is None or mesh.size == 1:
    return x
  spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1), "tensor" if parts > 1 else None)
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def linear(module: nnx.Module, name: str, x: Float[Array, "..."], config: ModelConfig, *, ins: int = 1) -> Float[Array, "..."]:
  """Computes x·W for the weight `name` of a module; see `matmul`.

  Adds (alpha / rank)·(x·A)·B if the weight has an adapter. While decoding, weights may be in 8
  bits.
  """

  def times(x, variable, ins):
    weight = variable.get_value()
    product = quantized.matmul if isinstance(weight, quantized.Quantized) else matmul
    if config.exact:
      matrix = weight.reshape(math.prod(weight.shape[:ins]), -1)
      axes, rows = variable.get_metadata()["axes"], x.reshape(*x.shape[: x.ndim - ins], len(matrix))
      of_inputs, of_outputs = (_parts(axes[part], matrix.shape[i], module.mesh) for i, part in enumerate((slice(ins), slice(ins, None))))
      rows = _split(rows, of_inputs, module.mesh)
      y = _split(in_one_order(product, rows, matrix, module.mesh, of_outputs).astype(x.dtype), of_outputs, module.mesh)
      return checkpoint_name(y.reshape(*y.shape[:-1], *weight.shape[ins:]), "linear")
    return checkpoint_name(product(x, weight, ins), "linear")

  x = tap(f"{name} in", x, ins)
  y = times(x, getattr(module, name), ins)
  if hasattr(module, f"{name}{ADAPTER}a"):
    # Two thin products: neither the sum W + A·B nor its gradient is ever formed.
    low = times(x, getattr(module, f"{name}{ADAPTER}a"), ins)
    y = y + config.lora.alpha / config.lora.rank * times(low, getattr(module, f"{name}{ADAPTER}b"), 1)
  return tap(name, y, y.ndim - x.ndim + ins)


def lower_precision(params: Params, dtype: str) -> Params:
  """Casts the weights of any model for a sampler.

  Norm scales and routers, which compute in float32, keep their dtype.
  """
  stays = lambda path: path[-1].key in ("scale", "router")
  return jax.tree_util.tree_map_with_path(lambda path, x: x if stays(path) else x.astype(dtype), params)
