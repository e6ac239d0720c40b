"""Low-rank adapters in the params tree: finding, removing and merging them."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxrl_llm.kernels.precision import precision_of
from jaxrl_llm.messages import Problem
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.linear import ADAPTER
from jaxrl_llm.models.model import Model, make_model
from jaxrl_llm.types import Params


def is_adapter(path: tuple) -> bool:
  """Returns whether a path of the params tree leads to an adapter matrix."""
  return ADAPTER in path[-1].key


def trainable(config: ModelConfig, params: PyTree) -> PyTree:
  """Returns a tree with True for each weight that is trained, else False.

  All weights are trained, or only the adapters if the config has any. A vision tower is trained if
  the config says so. `params` may also be the tree of logical axes.

  Raises:
    ValueError: If the targets match no weight.
  """
  is_leaf = lambda x: isinstance(x, tuple)
  if config.lora is None:
    is_frozen = lambda path: path[0].key == "tower" and not config.train_tower
    return jax.tree_util.tree_map_with_path(lambda path, _: not is_frozen(path), params, is_leaf=is_leaf)
  is_trained = jax.tree_util.tree_map_with_path(lambda path, _: is_adapter(path), params, is_leaf=is_leaf)
  if not any(jax.tree.leaves(is_trained)):
    targets = f"{config.lora.targets}, which match no linear map; try 'attention/.*' or 'mlp/down'"
    raise ValueError(Problem("model.lora_targets", targets))
  return is_trained


def reference(params: Params) -> Params:
  """Returns the params of the frozen base: the same arrays, with adapters of zeros.

  Only the adapters take further memory.
  """
  return jax.tree_util.tree_map_with_path(lambda path, x: jnp.zeros_like(x) if is_adapter(path) else x, params)


def merged(config: ModelConfig, params: Params) -> Params:
  """Replaces each weight that has an adapter by W + (alpha / rank)·A·B.

  Returns the params of the same model without adapters.
  """
  if config.lora is None:
    return params
  weights = {}
  for name, value in params.items():
    if isinstance(value, dict):
      weights[name] = merged(config, value)
    elif ADAPTER not in name:
      a, b = (params.get(f"{name}{ADAPTER}{part}") for part in "ab")
      scale = config.lora.alpha / config.lora.rank
      weights[name] = value if a is None else (value + scale * _product(a, b, value)).astype(value.dtype)
  return weights


def _product(a: jax.Array, b: jax.Array, weight: jax.Array) -> jax.Array:
  """Computes A·B in the shape of the weight.

  A is [*lead, *ins, r], B is [*lead, r, *outs] and the weight is [*lead, *ins, *outs].
  """
  lead = a.ndim + b.ndim - 2 - weight.ndim
  thin, wide = a.reshape(*a.shape[:lead], -1, a.shape[-1]), b.reshape(*b.shape[: lead + 1], -1)
  return jnp.matmul(thin, wide, precision=precision_of(thin, wide)).reshape(weight.shape)


def merge(model: Model, params: Params) -> tuple[Model, Params]:
  """Merges the adapters of a model, if any, into its weights.

  Returns a model without adapters and its params, which compute the same up to rounding.

  Example:
    >>> from jaxrl_llm.models import Lora, preset
    >>> model = make_model(preset("nano", vocab_size=264)._replace(lora=Lora(rank=2, alpha=4.0)))
    >>> plain, params = merge(model, model.init(jax.random.key(0)))
    >>> plain.config.lora, plain.num_params == make_model(preset("nano", vocab_size=264)).num_params
    (None, True)
  """
  return make_model(model.config._replace(lora=None), mesh=model.mesh), merged(model.config, params)
