"""Lower bounds on a program's floating-point operations and bytes of memory traffic, for each chip.

XLA's own counts leave out the kernels of attention and experts, and count the body of a loop once.
This module counts matrix products, attention over rows of one whole sequence each, and the least
traffic between a chip's memory and its cores.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm.kernels import flash
from jaxrl_llm.learner.programs import rows_at_once
from jaxrl_llm.models import ModelConfig

_AGAIN = {"none": (0, 0), "dots": (0, 0), "offload": (0, 0), "attention": (1, 0), "full": (1, 1)}
"""Further forward passes of the layers' products, and of attention, by `model.remat`."""


COLLECTIVE_S = (5e-6, 10e-6, 15e-6)
"""Least, assumed and largest latency of a collective, in s: an assumption, not measured.

It supposes about 1 µs for each hop between neighbours, and that a torus of 4 x 4 x 4 chips takes 6
hops to gather and 12 to sum.
"""


class Work(NamedTuple):
  """Work of one chip in one run of a program.

  Attributes:
    flops: Operations of matrix products and attention, including the backward pass's recomputation.
    model_flops: Operations without recomputation, on which a utilisation is based.
    num_bytes: Least number of bytes moved to and from memory.
    repeated_flops: Operations that attention does beyond `flops` by design, on the pairs of a block
      that no query sees.
  """

  flops: float
  model_flops: float
  num_bytes: float
  repeated_flops: float = 0.0


def layer_weights(model: ModelConfig) -> tuple[float, float]:
  """Counts the weights of an average layer: those that one token uses, and all of them."""
  d, sparse = model.d_model, len(model.sparse_layers) / model.num_layers
  attention = 2 * d * model.head_dim * (model.num_heads + model.num_kv_heads)
  dense = 3 * d * model.d_ff * (1 - sparse)
  if model.experts is None:
    return attention + dense, attention + dense
  expert, router = 3 * d * model.experts.d_ff * sparse, d * model.experts.num_experts * sparse
  met = attention + dense + router + model.experts.top_k * expert
  return met, attention + dense + router + model.experts.num_experts * expert


def _attention(model: ModelConfig, pairs: Callable[[int | None], float]) -> float:
  """Counts the operations of all layers, by the pairs of a layer with a window, or with None."""
  return 4 * model.num_heads * model.head_dim * sum(pairs(model.window_of(layer)) for layer in range(model.num_layers))


def _pairs(length: int, window: int | None) -> float:
  """Counts the pairs of a causal row in which a query sees a key.

  Example:
    >>> _pairs(4, None), _pairs(4, 2), _pairs(4, 9)
    (10.0, 7.0, 10.0)
  """
  near = length if window is None else min(window, length)
  return near * (near + 1) / 2 + (length - near) * near


def _pairs_in_blocks(length: int, window: int | None) -> float:
  """Counts the pairs of a causal row whose blocks are computed whole."""
  size = flash.block(length)
  blocks = -(-length // size)
  before = blocks if window is None else -(-(window - 1) // size)
  return min(sum(min(i, before) + 1 for i in range(blocks)) * float(size) ** 2, float(length) ** 2)


def weights_on_chip(model: ModelConfig, mesh: Mesh) -> float:
  """Counts the weights of all layers that a chip holds once fsdp has gathered them."""
  _, every = layer_weights(model)
  experts = 0.0 if model.experts is None else 3 * model.d_model * model.experts.d_ff * model.experts.num_experts
  experts *= len(model.sparse_layers) / model.num_layers
  return model.num_layers * ((every - experts) + experts / mesh.shape["expert"]) / mesh.shape["tensor"]


def micro_batches(config: ConfigDict, mesh: Mesh, rows: int) -> int:
  """Counts the micro-batches of a batch of `rows` rows."""
  return rows // (rows_at_once(config, mesh) or rows)


def rows_pass(config: ConfigDict, model: ModelConfig, mesh: Mesh, *, rows: int, backward: bool) -> Work:
  """Counts a pass over full packed rows: the update, or the scoring pass.

  Args:
    config: Checked config.
    model: Shape of the model.
    mesh: Mesh of the learner.
    rows: Number of rows of the batch.
    backward: Whether to count the backward pass, as in the update.
  """
  length, chips = config.learner.row_tokens, mesh.size
  met, _ = layer_weights(model)
  tokens = rows * length
  layers, head, attention = (
    2 * model.num_layers * met * tokens,
    2 * model.d_model * model.vocab_size * tokens,
    _attention(model, lambda window: rows * _pairs(length, window)),
  )
  itemsize, micro = jnp.dtype(model.dtype).itemsize, micro_batches(config, mesh, rows)
  in_blocks = _attention(model, lambda window: rows * _pairs_in_blocks(length, window))
  passes, repeated = 1, in_blocks - attention
  flops = model_flops = layers + head + attention
  if backward:
    # Frozen weights have no gradient. The products of adapters are few, and count nothing.
    learned = 2 if model.lora else 3
    model_flops = learned * (layers + head) + 3 * attention
    again, attention_again = _AGAIN[model.remat]
    # No policy keeps the products of experts.
    again = again or int(model.experts is not None and model.remat != "none")
    # The head's logits and the attention scores are recomputed under every policy.
    flops = model_flops + head + again * layers + (0.5 + attention_again) * attention
    passes = learned + again
    repeated *= 3.5 + attention_again
  # Activations: the inputs and outputs of each matrix product of a layer.
  d, heads = model.d_model, model.head_dim * (model.num_heads + 2 * model.num_kv_heads)
  wide = model.d_ff if model.experts is None else model.experts.top_k * (model.experts.d_ff + 2 * d / 3)
  activations = tokens / chips * model.num_layers * (6 * d + 2 * heads + 6 * wide) * itemsize * passes
  # In the backward pass the gather writes the weights once more.
  weights = weights_on_chip(model, mesh) * itemsize * micro * (passes + (1 if backward else 0))
  work = Work(flops / chips, model_flops / chips, activations + weights, repeated / chips)
  if model.train_tower and config.learner.row_images:
    return _with_tower(work, config, model, mesh, rows=rows, backward=backward)
  return work


def tower_pass(model: ModelConfig, mesh: Mesh, *, pictures: int, patches: int) -> Work:
  """Counts a forward pass of the vision tower.

  Args:
    model: Shape of a model with a tower.
    mesh: Mesh of the learner.
    pictures: Number of pictures, over all chips.
    patches: Number of patches of each picture.
  """
  vision, itemsize = model.vision, jnp.dtype(model.dtype).itemsize
  square = vision.d_model * vision.merge_size**2
  of_layer = 4 * vision.d_model**2 + 2 * vision.d_model * vision.d_ff
  of_merger = square * (square + model.d_model)
  mergers = 1 + len(vision.deep_layers)
  of_patch = vision.patch_width * vision.d_model + vision.num_layers * of_layer + mergers * of_merger / vision.merge_size**2
  attention = 4 * vision.num_layers * vision.d_model * patches**2
  flops = pictures * (2 * of_patch * patches + attention) / mesh.size
  weights = vision.num_layers * of_layer + mergers * of_merger
  activations = pictures * patches * vision.num_layers * (10 * vision.d_model + 2 * vision.d_ff) / mesh.size
  return Work(flops, flops, (weights + activations) * itemsize)


def _with_tower(work: Work, config: ConfigDict, model: ModelConfig, mesh: Mesh, *, rows: int, backward: bool) -> Work:
  """Adds the passes of a trained tower over the pictures of rows that are full of them."""
  patches = config.model.image_tokens * model.vision.merge_size**2
  tower = tower_pass(model, mesh, pictures=rows * config.learner.row_images, patches=patches)
  passes = 3 if backward else 1
  again = int(backward and model.remat != "none")
  return work._replace(
    flops=work.flops + (passes + again) * tower.flops,
    model_flops=work.model_flops + passes * tower.flops,
    num_bytes=work.num_bytes + (passes + again) * tower.num_bytes,
  )


def optimizer_bytes(state_bytes: float, gradient_bytes: float) -> float:
  """Counts the memory traffic of one AdamW update.

  Weights and moments are read and written; gradients are written and read.
  """
  return 2 * state_bytes + 2 * gradient_bytes


def prefill(config: ConfigDict, model: ModelConfig, mesh: Mesh) -> Work:
  """Counts the prefill of all prompts, each once, at the length of the largest bucket."""
  length, prompts = max(config.rollout.prompt_buckets), config.rollout.num_prompts + config.rollout.spare_prompts
  met, _ = layer_weights(model)
  attention = _attention(model, lambda window: prompts * _pairs(length, window))
  flops = 2 * model.num_layers * met * prompts * length + attention
  itemsize = jnp.dtype(model.dtype).itemsize
  return Work(flops / mesh.size, flops / mesh.size, weights_on_chip(model, mesh) * itemsize)


def decode_step(config: ConfigDict, model: ModelConfig, mesh: Mesh, *, rows: int, num_bytes: float) -> Work:
  """Counts a decoding step of one token for every row, with a full cache.

  Args:
    config: Checked config.
    model: Shape of the model, in the sampler's dtype.
    mesh: Mesh of the sampler.
    rows: Number of rows that decode at once, over all chips.
    num_bytes: Number of bytes that one chip reads: its weights, its cache, and the weights that it
      gathers from other chips.
  """
  met, _ = layer_weights(model)
  head = 2 * model.d_model * model.vocab_size
  seen = max(config.rollout.prompt_buckets) + config.rollout.max_new_tokens
  attention = _attention(model, lambda window: rows * (seen if window is None else min(window, seen)))
  flops = rows * (2 * model.num_layers * met + head) + attention
  return Work(flops / mesh.size, flops / mesh.size, num_bytes)


def bytes_on_chip(tree) -> float:
  """Returns the bytes of abstract arrays with shardings on one chip, without host memory."""
  is_here = lambda x: getattr(x, "sharding", None) is not None and x.sharding.memory_kind != "pinned_host"
  return sum(float(x.dtype.itemsize) * _count(x) for x in jax.tree.leaves(tree) if is_here(x))


def _count(x) -> float:
  total = 1.0
  for size in x.sharding.shard_shape(x.shape):
    total *= size
  return total
