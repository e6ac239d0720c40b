"""Weights, linear maps, and the low-rank adapters beside them. Every parameter names its logical axes; `mesh` maps these to mesh axes."""

import math
import re

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.types import Params

ADAPTER = "_lora_"
"""In the name of every adapter's matrix: `q_lora_a` and `q_lora_b` lie beside `q`."""


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], *, fan_in: int, dtype: str = "float32") -> nnx.Param:
  """A weight drawn from N(0, 1/fan_in), cut at two deviations, with its logical axes."""
  init = jax.nn.initializers.truncated_normal(stddev=fan_in**-0.5)
  return nnx.Param(init(rngs.params(), shape, jnp.float32).astype(dtype), axes=axes)


def adapter(
  module: nnx.Module, name: str, path: str, weight: nnx.Param, config: ModelConfig, *, rngs: nnx.Rngs, ins: int = 1, lead: int = 0
) -> None:
  """Gives a weight its adapter where the config asks for one: `NAME_lora_a` at random, `NAME_lora_b` at zero, so that nothing changes yet.

  Args:
    module: holds the weight as `name`.
    name: attribute of the weight.
    path: what `Lora.targets` are matched with.
    weight: the weight, with its logical axes.
    config: of the model.
    rngs: of the module.
    ins: how many of its axes are inputs.
    lead: axes before those that number matrices (experts).
  """
  if config.lora is None or not any(re.fullmatch(target, path) for target in config.lora.targets):
    return
  shape, axes, rank = weight.shape, weight.get_metadata()["axes"], config.lora.rank
  first, last = lead + ins, lead
  a_shape, a_axes = (*shape[:first], rank), (*axes[:first], "rank")
  b_shape, b_axes = (*shape[:last], rank, *shape[first:]), (*axes[:last], "rank", *axes[first:])
  setattr(module, f"{name}{ADAPTER}a", param(rngs, a_shape, a_axes, fan_in=math.prod(shape[lead:first])))
  setattr(module, f"{name}{ADAPTER}b", nnx.Param(jnp.zeros(b_shape, jnp.float32), axes=b_axes))


def linear(module: nnx.Module, name: str, x: Float[Array, "..."], config: ModelConfig, *, ins: int = 1) -> Float[Array, "..."]:
  """x·W, plus (alpha / rank)·(x·A)·B where there is an adapter; in the dtype of `x`.

  Args:
    module: holds the weight and its adapter.
    name: attribute of the weight.
    x: its last `ins` axes are contracted with the first ones of the weight.
    config: of the model.
    ins: how many axes are contracted.
  """
  times = lambda x, weight, ins: jnp.tensordot(x, weight[...].astype(x.dtype), ins)
  y = times(x, getattr(module, name), ins)
  if not hasattr(module, f"{name}{ADAPTER}a"):
    return y
  # Two thin products: the sum W + A·B is never formed, and neither is its gradient.
  low = times(x, getattr(module, f"{name}{ADAPTER}a"), ins)
  return y + config.lora.alpha / config.lora.rank * times(low, getattr(module, f"{name}{ADAPTER}b"), 1)


def lower_precision(params: Params, dtype: str) -> Params:
  """Weights in another dtype, as a sampler wants them; scales of norms and routers, which compute in float32, stay.

  Args:
    params: of any model.
    dtype: of the result.
  """
  stays = lambda path: path[-1].key in ("scale", "router")
  return jax.tree_util.tree_map_with_path(lambda path, x: x if stays(path) else x.astype(dtype), params)
