"""Weights in the form in which decoding reads them: unstacked, as matrices, possibly in 8 bits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.quantized import Quantized, quantize
from jaxrl_llm.models.transformer import STACKS, layer_spans
from jaxrl_llm.types import Params

_INPUTS = dict.fromkeys(("q", "k", "v", "gate", "up"), ("embed",)) | {"o": ("heads", "head_dim"), "down": ("mlp",)}
"""Logical axes that the linear maps of a block sum over."""

_HEADS = (("heads", "head_dim"), ("kv_heads", "head_dim"))


class DecodingWeights(NamedTuple):
  """Params laid out for decoding: the weights of each block by itself, and those outside blocks.

  Weights whose outputs are heads, [D H C], are matrices [D H·C]. A TPU keeps the last two axes of
  an array in tiles, and would lay such weights out anew at the entry of every loop.
  """

  rest: Params
  blocks: tuple[PyTree, ...]


def outside_of_blocks(tree: dict[str, Any]) -> dict[str, Any]:
  """Returns the part of a params tree that belongs to no block, without a vision tower."""
  return {name: x for name, x in tree.items() if name not in (*STACKS, "tower")}


def to_matrices(weights: DecodingWeights) -> DecodingWeights:
  """Joins the axes of heads in the weights of blocks, except in biases, which have no inputs."""

  def joined(variable: nnx.Variable) -> nnx.Variable:
    weight = variable.get_value()
    return variable.replace(weight.reshape(len(weight), -1)) if variable.get_metadata()["axes"][1:] in _HEADS else variable

  return weights._replace(blocks=jax.tree.map(joined, weights.blocks, is_leaf=_is_variable))


def to_8_bits(weights: DecodingWeights, config: ModelConfig) -> DecodingWeights:
  """Rounds the linear maps of blocks and the output head to `config.decode_weights`.

  Routers, norms, biases and adapters stay as they are, and so does an embedding that is not the
  head.
  """

  def rounded(path, variable: nnx.Variable) -> nnx.Variable:
    inputs = _inputs(path, variable)
    return variable.replace(quantize(variable.get_value(), inputs, config.decode_weights)) if inputs else variable

  blocks = jax.tree_util.tree_map_with_path(rounded, weights.blocks, is_leaf=_is_variable)
  name, inputs = _head(config)
  return DecodingWeights(weights.rest | {name: quantize(weights.rest[name], inputs, config.decode_weights)}, blocks)


def unstacked_shardings(config: ModelConfig, weights: DecodingWeights, shardings: PyTree) -> DecodingWeights:
  """Returns the shardings of weights for decoding, from those of the params.

  Args:
    config: Sizes and options.
    weights: Weights as `Model.decoding_weights` returns them, or abstract ones.
    shardings: Params tree with a sharding in place of each array.
  """
  of_stack = {name: jax.tree.leaves(shardings[name]) for name in STACKS if name in shardings}
  of_layers = [of_stack[span.stack] for span in layer_spans(config) for _ in range(span.count)]

  def of_block(block: PyTree, stack: list[NamedSharding]) -> PyTree:
    variables, places = jax.tree_util.tree_leaves_with_path(block, is_leaf=_is_variable), []
    for (path, variable), sharding in zip(variables, stack, strict=True):
      places += _places(variable.get_value(), sharding.mesh, tuple(sharding.spec)[1:], _inputs(path, variable))
    return jax.tree.unflatten(jax.tree.structure(block), places)

  rest, (name, inputs) = outside_of_blocks(shardings), _head(config)
  if isinstance(weights.rest[name], Quantized):
    rest[name] = Quantized(*_places(weights.rest[name], rest[name].mesh, tuple(rest[name].spec), inputs))
  return DecodingWeights(rest, tuple(map(of_block, weights.blocks, of_layers)))


def _places(weight: Any, mesh: Mesh, spec: Sequence, inputs: tuple[int, ...]) -> list[NamedSharding]:
  """Returns the shardings of the arrays of a weight, given the mesh axes of its own axes."""
  # The columns of a matrix lie as its heads did.
  spec = (*spec, *[None] * weight.ndim)[: weight.ndim]
  of_scale = [axis for i, axis in enumerate(spec) if i not in inputs]
  return [NamedSharding(mesh, PartitionSpec(*x)) for x in ([spec, of_scale] if isinstance(weight, Quantized) else [spec])]


def _inputs(path: tuple, variable: nnx.Variable) -> tuple[int, ...]:
  """Returns the axes of a block's weight that its linear map sums over; none for other params."""
  summed = _INPUTS.get(path[-1].key, ())
  return tuple(i for i, axis in enumerate(variable.get_metadata()["axes"]) if axis in summed)


def _head(config: ModelConfig) -> tuple[str, tuple[int, ...]]:
  """Returns the name of the output head and the axes that it sums over."""
  return ("embedding", (1,)) if config.tie_embeddings else ("head", (0,))


def _is_variable(x: Any) -> bool:
  return isinstance(x, nnx.Variable)
