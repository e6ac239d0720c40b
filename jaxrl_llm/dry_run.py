"""What a run would be, without running it: mesh, model, and an estimate of its memory."""

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm import mesh as mesh_lib
from jaxrl_llm.experiment import build
from jaxrl_llm.train_step import partition


def describe(config: ConfigDict) -> str:
  """Mesh, model and a memory estimate for each device, for `--dry_run`; allocates nothing.

  Args:
    config: checked.

  Raises:
    ValueError: as `build`.
  """
  experiment = build(config)
  rows, learner, rollout, model = max(config.learner.row_buckets), config.learner, config.rollout, experiment.model.config
  shards, copies = mesh_lib.num_row_shards(experiment.mesh), mesh_lib.num_row_shards(experiment.sampler_mesh)
  itemsize = jnp.dtype(model.dtype).itemsize
  weights = sum(_bytes_per_device(x) for x in jax.tree.leaves(experiment.abstract_state.params))
  state = sum(_bytes_per_device(x) for x in jax.tree.leaves(experiment.abstract_state))
  trained = sum(_bytes_per_device(x) for x in jax.tree.leaves(partition(experiment.abstract_state.params, experiment.trainable)[0]))
  tokens = rows * learner.row_tokens / shards / learner.micro_batches
  # Of a block the backward pass keeps about 8 arrays of the stream's width, 3 of the feed-forward's, and the attention weights.
  hidden = model.d_ff if model.experts is None else model.experts.top_k * model.experts.d_ff
  width = 8 * model.d_model + 3 * hidden + 2 * model.num_heads * learner.row_tokens
  activations = tokens * width * itemsize * (2 if model.remat else model.num_layers)
  logits = 3 * tokens * model.vocab_size * 4
  slots = max(rollout.prompt_buckets) + rollout.max_new_tokens
  prompts = rollout.num_prompts + rollout.spare_prompts
  sequences = max(prompts * rollout.group_size, config.eval.batch_prompts * config.eval.samples) / copies
  cached = 2 * model.num_layers * sequences * slots * model.num_kv_heads * model.head_dim / experiment.sampler_mesh.shape["tensor"]
  cache = cached * jnp.dtype(config.model.sampler_dtype or model.dtype).itemsize
  reference = weights if "ref_logprobs" in experiment.needs and model.lora is None else 0
  critic = sum(_bytes_per_device(x) for x in jax.tree.leaves(experiment.critic.abstract_state)) if experiment.critic else 0
  parts = {
    "weights": weights,
    "optimizer moments": state - weights,
    "gradients": trained,
    "frozen reference": reference,
    "critic and its moments": critic,
    "activations": activations,
    "logits": logits,
  }
  held = state + reference + critic
  meshes, peaks, of_sampler = {"mesh": experiment.mesh}, {"update": held + trained + activations + logits}, {}
  if experiment.sync is None:
    parts["key-value cache"] = cache
    peaks["sampling"] = held + cache
  else:
    meshes["mesh of the sampler"] = experiment.sampler_mesh
    moved = sum(_bytes_per_device(x) for x in jax.tree.leaves(experiment.sync.arrived))
    parts["weights on their way to the sampler"] = moved
    peaks["weight sync"] = held + moved
    # With a lag the next weights come while rollouts are still drawn with the last ones.
    of_sampler = {"weights": moved * (1 + rollout.staleness), "key-value cache": cache}
  kind = jax.devices()[0].device_kind
  lines = [
    *(f"{name}: {dict(mesh.shape)} over {mesh.size} {kind} device(s)" for name, mesh in meshes.items()),
    f"model: {config.model.path or config.model.preset}, {experiment.model.num_params:,} parameters",
    f"rollout batch: {rollout.num_prompts} prompts x {rollout.group_size} samples; updates per rollout: {learner.updates_per_rollout}",
    "estimated memory for each device, in MB: " + _in_mb(parts),
    f"estimated peak for each device: {max(peaks.values()) / 1e6:.1f} MB ({_in_mb(peaks)})",
  ]
  if of_sampler:
    lines.append("estimated memory for each device that only samples, in MB: " + _in_mb(of_sampler))
  return "\n".join(lines)


def _in_mb(parts: dict[str, float]) -> str:
  return ", ".join(f"{name} {size / 1e6:.1f}" for name, size in parts.items() if size)


def _bytes_per_device(leaf: jax.ShapeDtypeStruct) -> int:
  return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
