"""The samplers of a run: settings from the config, and compilation per shape."""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree
from ml_collections import ConfigDict

from jaxrl_llm.decoding.engine.programs import column_blocks
from jaxrl_llm.decoding.sampler import (
  Requests,
  SampleFn,
  StopTable,
  default_blocks,
  make_sampler,
  make_stop_table,
  no_partial,
)
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.devices.compilation import compiled_for
from jaxrl_llm.models import Model, ModelConfig, lower_precision, ragged
from jaxrl_llm.models.image_slots import Room
from jaxrl_llm.rollouts.gallery import abstract_shown
from jaxrl_llm.text_types import Tokenizer

_CONTROL_GROUPS = [pathlib.Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes")]


class Samplers(NamedTuple):
  """The samplers of a run.

  Attributes:
    sample: Sampler of training rollouts, as one program.
    eval_sample: Sampler of evaluations.
  """

  sample: SampleFn
  eval_sample: SampleFn


def make_samplers(config: ConfigDict, model: Model, tokenizer: Tokenizer, params: PyTree, *, records_routes: bool) -> Samplers:
  """Makes the samplers of training rollouts and of evaluations.

  They are compiled at their first call for every bucket of prompts. If both draw as many responses
  with the same settings, they are one program.

  Args:
    config: The experiment's config.
    model: Model in the sampler's dtype, on the sampler's mesh.
    tokenizer: The task's tokenizer.
    params: Abstract weights of the policy, as the samplers are given them.
    records_routes: Whether rollouts record the experts that their tokens visit.

  Raises:
    ValueError: If there is neither a stop token nor a stop string, or the vocabulary cannot write a
      stop string.
  """
  section = config.rollout
  common = dict(
    max_new_tokens=section.max_new_tokens,
    stop_ids=tokenizer.stop_ids,
    pad_id=tokenizer.pad_id,
    slots=section.slots,
    cache_dtype=section.cache_dtype,
    cache_blocks=section.cache_blocks,
    stop_table=stop_table(section.stop_strings, tokenizer),
  )
  check_stops(tokenizer, common["stop_table"])
  check_attention(config, model)
  training = common | dict(
    group_size=section.group_size,
    temperature=section.temperature,
    top_k=section.top_k,
    top_p=section.top_p,
    record_routing=records_routes,
  )
  filters = dict(temperature=config.eval.temperature, top_k=0, top_p=1.0)
  evaluating = common | filters | dict(group_size=config.eval.samples, record_routing=False)
  num_prompts, experts, lowered = section.num_prompts + section.spare_prompts, model.config.experts, in_dtype(model)
  routes = (model.config.num_layers, experts.top_k) if records_routes and experts else None
  sizes = num_prompts * section.group_size, config.eval.batch_prompts * config.eval.samples
  asked, eval_asked = (Requests(np.zeros((size, 2), np.uint32)) for size in sizes)
  if section.spare_prompts:
    responses = no_partial(sizes[0], section.max_new_tokens, routes)
    asked = asked._replace(partial=responses, enough_groups=np.int32(section.num_prompts))
  signatures = _signatures(config, model, params, num_prompts, asked)
  sample = eval_sample = compiled_for(jax.jit(make_sampler(lowered, **training)), signatures)
  if evaluating != training or config.eval.batch_prompts != num_prompts or section.spare_prompts:
    eval_signatures = _signatures(config, model, params, config.eval.batch_prompts, eval_asked)
    eval_sample = compiled_for(jax.jit(make_sampler(lowered, **evaluating)), eval_signatures)
  return Samplers(sample=sample, eval_sample=eval_sample)


def in_dtype(model: Model) -> Model:
  """Returns the model with weights cast to its dtype, once per batch and not at each step."""
  cast = lambda fn: lambda params, *args, **options: fn(lower_precision(params, model.config.dtype), *args, **options)
  return model._replace(prefill=cast(model.prefill), resume=cast(model.resume), decoding_weights=cast(model.decoding_weights))


def _signatures(config: ConfigDict, model: Model, params: PyTree, num_prompts: int, requests: Requests) -> list[tuple[Any, ...]]:
  """Returns a sampler's abstract arguments for all buckets of prompts.

  All are needed at once, because a batch of short prompts may first occur late in a run.

  Args:
    config: The experiment's config.
    model: Model on the sampler's mesh.
    params: Abstract weights of the policy, as the sampler is given them.
    num_prompts: Number of prompts.
    requests: Requests like those that it is given.
  """
  arrays = partial(jax.ShapeDtypeStruct, sharding=mesh_lib.row_sharding(model.mesh))
  abstract = lambda x: arrays(x.shape, x.dtype) if x.shape else jax.ShapeDtypeStruct((), x.dtype)
  asked = jax.tree.map(abstract, requests)
  shapes, room = [(num_prompts, width) for width in config.rollout.prompt_buckets], room_in_prompts(config, model.config)
  of_prompts = lambda shape: [] if room is None else [abstract_shown(room, *shape, arrays)]
  return [(params, arrays(shape, jnp.int32), arrays(shape, bool), asked, *of_prompts(shape)) for shape in shapes]


def room_in_prompts(config: ConfigDict, shape: ModelConfig) -> Room | None:
  """Returns the room for pictures in a prompt; None if the prompts show none."""
  return Room(shape, config.rollout.prompt_images, config.model.image_tokens) if config.rollout.prompt_images else None


def stop_table(strings: Sequence[str], tokenizer: Tokenizer) -> StopTable | None:
  """Makes the table of stop strings; None if there are no strings."""
  return make_stop_table(tokenizer.token_bytes(), tuple(strings)) if strings else None


def check_stops(tokenizer: Tokenizer, table: StopTable | None) -> None:
  """Checks that there is a stop token or a stop string.

  Raises:
    ValueError: If there is neither, so that every response would reach its budget.
  """
  if not tokenizer.stop_ids and table is None:
    raise ValueError(
      "config.rollout.stop_strings: found none, and the tokenizer names no token that ends a response, so that every "
      "response would reach config.rollout.max_new_tokens; set a stop string, or an eos token in the checkpoint's "
      "generation_config.json"
    )


def check_attention(config: ConfigDict, model: Model) -> None:
  """Checks that the attention which the config asks for can read the cache.

  Raises:
    ValueError: If it cannot. One line, with the fix.
  """
  platform, shape = mesh_lib.platform_of(model.mesh), model.config
  for columns in config.rollout.cache_blocks or default_blocks(config.rollout.max_new_tokens, shape, model.mesh):
    ragged.is_used(shape.decode_attention, platform, shape.head_dim, columns)


def engine_sizes(config: ConfigDict) -> dict[str, int]:
  """Returns the sizes of the decoding engine that draws conversations, as `make_engine` takes them.

  A row holds a whole conversation. By default there is one for each of a step; those of a larger
  evaluation wait for each other. Replies are short in short conversations, so chunks are too: room
  for more tokens than a chunk has costs as much as tokens.
  """
  section = config.rollout
  most, context = (section.num_prompts + section.spare_prompts) * section.group_size, max(section.prompt_buckets) + section.max_new_tokens
  chunk = min(max(1 << (context // 8).bit_length() - 1, 4), 32)
  open_at_once = most * (1 if section.update_in_flight is None else 1 + section.staleness)
  return dict(slots=min(section.slots or most, open_at_once), context=context, chunk=chunk, spans=256 // chunk, steps=8)


def engine_columns(config: ConfigDict, mesh: Mesh) -> int:
  """Returns the number of columns of the cache of the decoding engine that draws conversations."""
  platform = mesh_lib.platform_of(mesh)
  return sum(column_blocks(engine_sizes(config)["context"], platform))


def limit_of(config: ConfigDict, mesh: Mesh) -> int | None:
  """Returns the memory of each device of a mesh in bytes, as the config or the device says."""
  if config.memory_gb is not None:
    return int(config.memory_gb * 1e9)
  return memory_limit(mesh.local_devices[0], mesh.local_mesh.size)


def memory_limit(device: jax.Device, num_sharing: int) -> int | None:
  """Returns the memory of a device in bytes; None if unknown.

  On a CPU, the `num_sharing` devices of the process share the memory of the machine or container.
  """
  stats = device.memory_stats() or {}
  if "bytes_limit" in stats:
    return stats["bytes_limit"]
  if device.platform == "cpu" and hasattr(os, "sysconf"):
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_container_limits()]) // num_sharing
  return None


def _container_limits() -> Iterator[int]:
  """Yields the memory that Linux allows the control group of this process, if it is limited."""
  for path in _CONTROL_GROUPS:
    with contextlib.suppress(OSError, ValueError):  # No such file, or the word "max".
      yield int(path.read_text())
