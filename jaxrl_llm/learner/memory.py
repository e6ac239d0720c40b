"""Estimates of device memory by kind, for `--dry_run` and for out-of-memory messages.

The memory of the backward pass is counted instead of guessed: the model is traced, and the arrays
that its forward pass saves for the backward pass are added up. Rematerialisation policies,
attention kernels, adapters and experts therefore need no formulas here.
"""

import functools
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree
from ml_collections import ConfigDict

from jaxrl_llm.decoding.sampler.begin import num_rows
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner import picture_memory, programs
from jaxrl_llm.learner.needs import abstract_batch, needed_by_step
from jaxrl_llm.learner.teacher_programs import abstract_params
from jaxrl_llm.models import ModelConfig, make_critic, make_model, residual, trainable
from jaxrl_llm.models.attention import suited
from jaxrl_llm.models.cache import num_bytes
from jaxrl_llm.models.decoding import serving_of
from jaxrl_llm.models.decoding_weights import unstacked_shardings
from jaxrl_llm.models.head import chunk_tokens
from jaxrl_llm.models.image_slots import Room
from jaxrl_llm.models.linear import lower_precision
from jaxrl_llm.models.params import combine, partition
from jaxrl_llm.models.remat import AUTO, CHEAPEST
from jaxrl_llm.types import Objective

# Measured on what XLA compiles for CPUs and TPUs; tests/learner/test_memory.py compares the
# estimates to it.
_CHUNKS = 2.0  # Logit chunks alive at once in the backward pass: logits and gradient. Forward: 1.
_COTANGENTS = 0.5  # Gradients of a layer's activations, as a fraction of those activations.
_FORWARD = 0.35  # Fraction of a layer's activations alive at once without a backward pass.
_GROUPED = 4.0  # Arrays of all experts' tokens in the backward pass of a batched grouped product.
_FILLED = 0.9  # Fraction of a device's memory that rows may fill.

OVERESTIMATE = 1.3
"""Largest estimate divided by the memory of what XLA compiled.

It was up to 1.6 for experts on several devices and for pictures.
"""


class Footprint(NamedTuple):
  """Memory of each device, in bytes.

  Attributes:
    held: Memory held between programs, by kind.
    programs: Additional memory while a program runs, by program and kind.
    of_sampler: Memory of a device that only samples, by kind; empty if all devices do both.
    on_host: Memory of the hosts, per device.
  """

  held: dict[str, float]
  programs: dict[str, dict[str, float]]
  of_sampler: dict[str, float]
  on_host: float = 0.0

  @property
  def largest(self) -> str:
    """Name of the program that needs most memory."""
    return max(self.programs, key=lambda name: sum(self.programs[name].values()))

  @property
  def peak(self) -> float:
    """Peak memory of a device that learns, over all programs."""
    return sum(self.held.values()) + sum(self.programs[self.largest].values())


def footprint(
  config: ConfigDict,
  shape: ModelConfig,
  mesh: Mesh,
  sampler_mesh: Mesh,
  objective: Objective,
  *,
  needs: frozenset[str],
  engine_columns: int | None = None,
  teachers: Mapping[str, ModelConfig] = MappingProxyType({}),
) -> Footprint:
  """Estimates the memory of each device; allocates nothing and needs none of the devices.

  Args:
    config: Checked config.
    shape: Shape of the model.
    mesh: Mesh of the learner.
    sampler_mesh: Mesh of the sampler, possibly with the same devices.
    objective: Objective that RL minimises.
    needs: Optional fields of a batch that the run computes, from `needs.fields_needed`.
    engine_columns: Number of columns of the decoding engine's cache; None if the sampler draws.
    teachers: Shape of each teacher by name. The policy itself, if it is the teacher, is none.

  Raises:
    ValueError: If a mesh does not divide a weight.
  """
  learner, model = config.learner, make_model(shape, mesh=mesh)
  trained = trainable(shape, model.logical_axes)
  (optimizer, _), _ = programs.make_optimizers(config)
  place_state = partial(programs.place_state, offload=learner.offload_optimizer)
  state = place_state(mesh, model, optimizer, trainable=trained)
  gradients = bytes_of(partition(state.params, trained)[0])
  warm_rows = config.warm_start.row_buckets if config.warm_start.num_steps else ()
  rows = max(*learner.row_buckets, *warm_rows, 0)
  room = programs.room_in_rows(config, shape)
  options = dict(routes=programs.replayed_routes(config, shape), shares=learner.share_prompts, room=room)
  batch = abstract_batch(mesh, rows, learner.row_tokens, **options)
  batch = needed_by_step(batch, objective.needs, **programs.step_options(config))

  held = {"weights": bytes_of(state.params), "optimizer moments": bytes_of((state.opt_state, state.step))}
  if ("ref_logprobs" in needs or config.teacher.frozen) and shape.lora is None:
    held["frozen reference"] = held["weights"]
  weights_of = {name: (x, abstract_params(mesh, make_model(x, mesh=mesh))) for name, x in teachers.items()}
  if weights_of:
    held["teacher" if len(weights_of) == 1 else "teachers"] = sum(bytes_of(params) for _, params in weights_of.values())
  if config.teacher.path == "self":
    weights_of = {"": (shape, state.params)}
  if "values" in needs:
    held["critic and its moments"] = bytes_of(place_state(mesh, make_critic(shape, mesh=mesh), optimizer))
  held["batch"] = learner.updates_per_rollout * bytes_of(batch)

  num_shards = mesh_lib.num_row_shards(mesh) * mesh.shape["context"]
  at_once = programs.rows_at_once(config, mesh) or rows
  rows_here = at_once / num_shards
  update = {"gradients": gradients}
  if rows > at_once:
    update["accumulated gradients"] = sum(_size(x, jnp.float32) for x in jax.tree.leaves(partition(state.params, trained)[0]))
  update["activations"] = saved(shape, mesh, rows=rows_here, row_tokens=learner.row_tokens)
  layer = {"gathered weights": 2 * gathered(state.params, mesh)}
  layer |= backward_of_layer(shape, mesh, rows=rows_here, row_tokens=learner.row_tokens)
  compared = weights_of.get("", (None,))[0] if config.teacher.gkd_coef else None
  update |= _larger(layer, head(shape, mesh, tokens=rows_here * learner.row_tokens, learns=True, teacher=compared))
  layer = {"activations": _FORWARD * one_layer(shape, mesh, rows=rows_here, row_tokens=learner.row_tokens)}
  layer |= {"gathered weights": gathered(state.params, mesh)}
  logprobs = _larger(layer, head(shape, mesh, tokens=rows_here * learner.row_tokens, learns=False))
  by_program = {"update": update, "logprobs": logprobs}
  for teacher, params in weights_of.values() if config.teacher.opd_coef else ():
    slots, rows_seen = learner.row_tokens, rows_here
    if config.teacher.privileged is not None:
      slots = config.teacher.row_tokens
      rows_seen = (programs.rows_at_once(config, mesh) or max(config.teacher.row_buckets)) / num_shards
    layer = {"activations": _FORWARD * one_layer(teacher, mesh, rows=rows_seen, row_tokens=slots)}
    needed = _larger(layer | {"gathered weights": gathered(params, mesh)}, head(teacher, mesh, tokens=rows_seen * slots, learns=False))
    by_program["teacher"] = _larger(by_program.get("teacher", {}), needed)
  if room is not None:
    pictures = rows_here * room.pictures
    if shape.train_tower:
      by_program["update"] = update | picture_memory.of_update(shape, mesh, room, pictures=pictures)
      by_program["logprobs"] = _larger(logprobs, picture_memory.of_pass(shape, mesh, state.params, room, pictures=pictures))
    else:
      pictures = programs.pictures_at_once(room, mesh) / mesh_lib.num_row_shards(mesh)
      of_tower = picture_memory.of_pass(shape, mesh, state.params, room, pictures=pictures)
      by_program["tower"] = of_tower | {"patches": picture_memory.size(room.patches(1)) * pictures}

  sampler_dtype, of_sampler = config.model.sampler_dtype or shape.dtype, {}
  sampled_shape = shape._replace(dtype=sampler_dtype, decode_weights=config.serving.weights)
  sampled = sampling(config, sampled_shape, sampler_mesh, engine_columns=engine_columns)
  lowered = make_model(sampled_shape, mesh=sampler_mesh)
  serving = serving_of(shape, sampler_mesh, layout=config.serving.layout)
  place = lambda mesh, **options: mesh_lib.param_shardings(mesh, lowered.logical_axes, state.params, **options)
  of_params = place(sampler_mesh, fields=mesh_lib.SAMPLER_FIELDS)
  of_decoding = of_params if serving is None else place(serving.mesh, rules=serving.rules)
  weights = jax.eval_shape(lambda params: lowered.decoding_weights(lower_precision(params, sampler_dtype)), state.params)
  decoding = bytes_of(placed_like(weights, unstacked_shardings(sampled_shape, weights, of_decoding)))
  if engine_columns is not None:
    # The engine keeps its cache, and its weights until the next ones are there.
    sampled |= {"next weights laid out for decoding": decoding}
  if sampler_mesh == mesh and engine_columns is not None:
    held |= {"weights laid out for decoding": decoding, "key-value cache": sampled.pop("key-value cache")}
    by_program["sampling"] = sampled
  elif sampler_mesh == mesh:
    by_program["sampling"] = {"weights laid out for decoding": decoding, **sampled, **_of_prompts(config, shape, mesh, state.params)}
  else:
    arrived = sum(_size(x, sampler_dtype) for x in jax.tree.leaves(placed_like(state.params, of_params)))
    by_program["weight sync"] = {"weights in transit to the sampler": arrived}
    # With a lag, the next weights arrive while rollouts are drawn with previous ones. Each batch of
    # the sampler keeps those that it was begun with, and the engine only its own.
    versions = 1 + (config.rollout.staleness if engine_columns is None else min(config.rollout.staleness, 1))
    of_sampler = {"weights": arrived * versions, "weights laid out for decoding": decoding, **sampled}
  keep = lambda parts: {name: size for name, size in parts.items() if size}
  return Footprint(
    keep(held),
    {name: keep(parts) for name, parts in by_program.items()},
    keep(of_sampler),
    bytes_of(state, on_host=True),
  )


def _of_prompts(config: ConfigDict, shape: ModelConfig, mesh: Mesh, params: PyTree) -> dict[str, float]:
  """Returns the bytes that pictures of prompts take during sampling, by kind."""
  if not config.rollout.prompt_images:
    return {}
  prompts = max(config.rollout.num_prompts + config.rollout.spare_prompts, config.eval.batch_prompts)
  room = Room(shape, config.rollout.prompt_images, config.model.image_tokens)
  parts = {"pictures of prompts": picture_memory.of_prompts(mesh, room, prompts=prompts)}
  if shape.train_tower:
    pictures = prompts * room.pictures / mesh_lib.num_row_shards(mesh)
    parts |= picture_memory.of_pass(shape, mesh, params, room, pictures=pictures)
  return parts


def placed_like(shapes: PyTree, shardings: PyTree) -> PyTree:
  """Returns a tree of shapes with the given shardings."""
  return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings)


def bytes_of(tree: PyTree, *, on_host: bool = False) -> int:
  """Returns the bytes that a tree of placed shapes takes of each device.

  With `on_host`, returns the bytes in the memory of the device's host.
  """
  return sum(_size(x, x.dtype) for x in jax.tree.leaves(tree) if (x.sharding.memory_kind == "pinned_host") == on_host)


def _size(leaf: jax.ShapeDtypeStruct, dtype) -> int:
  return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * jnp.dtype(dtype).itemsize


def saved(shape: ModelConfig, mesh: Mesh, *, rows: float, row_tokens: int) -> float:
  """Returns the bytes that the forward pass of a micro-batch saves for its backward pass.

  `rows` is the number of rows per device, a fraction if a row is split.
  """
  of_row, fixed = kept(on_one_device(shape, mesh, row_tokens), row_tokens)
  # The states between layers lie over `tensor`; those of a model on one device are whole.
  is_sharded = residual.is_sharded((1, row_tokens, shape.d_model), mesh)
  elsewhere = (1 - 1 / mesh.shape["tensor"] if is_sharded else 0) * row_tokens * shape.d_model * jnp.dtype(shape.dtype).itemsize
  return fixed / (mesh.shape["fsdp"] * mesh.shape["expert"]) + rows * (of_row - shape.num_layers * elsewhere)


def one_layer(shape: ModelConfig, mesh: Mesh, *, rows: float, row_tokens: int) -> float:
  """Returns the bytes of all activations of one layer."""
  of_row, _ = kept(on_one_device(shape._replace(remat="none"), mesh, row_tokens), row_tokens)
  return rows * of_row / shape.num_layers


def backward_of_layer(shape: ModelConfig, mesh: Mesh, *, rows: float, row_tokens: int) -> dict[str, float]:
  """Returns the bytes that the backward pass of one layer adds to the saved ones, by kind."""
  whole = one_layer(shape, mesh, rows=rows, row_tokens=row_tokens)
  recomputed = (
    0.0 if shape.remat == "none" else whole - saved(shape, mesh, rows=rows, row_tokens=row_tokens) / shape.num_layers
  )
  parts = {"recomputed layer": max(recomputed, 0.0), "gradients of a layer's activations": _COTANGENTS * whole}
  if shape.experts is not None and mesh_lib.platform_of(mesh) != "tpu":
    # Only TPUs have a grouped product. Elsewhere, each local expert is given room for all tokens.
    here = on_one_device(shape, mesh, row_tokens).experts
    copies = rows * row_tokens * here.top_k * shape.experts.num_experts / mesh.shape["expert"]
    parts["tokens copied to every expert"] = (
      _GROUPED * copies * max(shape.d_model, here.d_ff) * jnp.dtype(shape.dtype).itemsize
    )
  return parts


def _larger(*options: dict[str, float]) -> dict[str, float]:
  """Returns the largest of several allocations that are never alive at the same time."""
  return max(options, key=lambda parts: sum(parts.values()))


def on_one_device(shape: ModelConfig, mesh: Mesh, row_tokens: int) -> ModelConfig:
  """Returns a model whose activations are as large as one device's share of the given model's.

  Heads and hidden layers are sharded over the mesh's `tensor` axis. Over `expert`, tokens are sent
  to the devices of their experts.
  """
  tensor, platform = mesh.shape["tensor"], mesh_lib.platform_of(mesh)
  backend = suited(platform, jnp.dtype(shape.dtype), shape.head_dim, row_tokens) if shape.attention == "auto" else shape.attention
  experts = shape.experts
  if experts is not None:
    # A device sees the tokens of all devices that share its experts, and makes room for each copy.
    copies = experts.top_k * mesh.shape["expert"]
    experts = experts._replace(top_k=copies, num_experts=max(experts.num_experts, copies), d_ff=max(experts.d_ff // tensor, 1))
  return shape._replace(
    num_heads=max(shape.num_heads // tensor, 1),
    num_kv_heads=max(shape.num_kv_heads // tensor, 1),
    d_ff=max(shape.d_ff // tensor, 1),
    experts=experts,
    # Kernels of other platforms cannot be traced here. They all save the same arrays: queries,
    # keys, values and the attention output.
    attention="chunked" if backend in ("cudnn", "flash") else backend,
  )


@functools.cache
def kept(here: ModelConfig, row_tokens: int) -> tuple[int, int]:
  """Traces what the forward pass of a model from `on_one_device` saves for its backward pass.

  Returns:
    The bytes of each row, and those that do not depend on the number of rows, such as weights in
    another dtype.
  """
  model = make_model(here)
  params = jax.eval_shape(model.init, jax.random.key(0))
  trained, frozen = partition(params, trainable(model.config, model.logical_axes))

  def backward(trained, frozen, rows):
    return jax.vjp(lambda trained: model.hidden(combine(trained, frozen), *rows).hidden, trained)[1]

  def size(num_rows: int) -> int:
    ints = jax.ShapeDtypeStruct((num_rows, row_tokens), jnp.int32)
    return picture_memory.saved_by(backward, trained, frozen, (ints, ints, ints))

  one, two = size(1), size(2)
  return two - one, max(2 * one - two, 0)


def gathered(params: PyTree, mesh: Mesh) -> float:
  """Returns the bytes of the largest layer's weights in use, gathered over `fsdp`.

  0 if the weights are not sharded over `fsdp`.
  """
  if mesh.shape["fsdp"] == 1:
    return 0.0
  stacks = [jax.tree.leaves(stack) for name, stack in params.items() if name.endswith("layers")]
  whole = lambda x: _size(x, x.dtype) * (mesh.shape["fsdp"] if "fsdp" in jax.tree.leaves(tuple(x.sharding.spec)) else 1) / x.shape[0]
  return max(sum(map(whole, leaves)) for leaves in stacks)


def head(shape: ModelConfig, mesh: Mesh, *, tokens: float, learns: bool, teacher: ModelConfig | None = None) -> dict[str, float]:
  """Returns the bytes that log-probabilities take, by kind.

  They are a chunk of logits, the states of a device's tokens in the order of their chunks, and the
  output head. A teacher that the policy is compared with adds its own.
  """
  vocab = shape.vocab_size / mesh.shape["tensor"]
  chunk = min(shape.head_tokens or chunk_tokens(shape.vocab_size, mesh) // (1 if teacher is None else 2), tokens)
  states = 2 * tokens * shape.d_model * jnp.dtype(shape.dtype).itemsize
  parts = {
    "chunk of logits": (_CHUNKS if learns else 1) * chunk * vocab * 4,
    "states before the head": states * (2 if learns else 1),
  }
  is_split = mesh.shape["fsdp"] > 1
  weights = vocab * shape.d_model * jnp.dtype(shape.param_dtype).itemsize if is_split else 0
  rounded = vocab * shape.d_model * jnp.dtype(shape.dtype).itemsize if shape.dtype != shape.param_dtype else 0
  parts |= {"output head": weights + rounded + (vocab * shape.d_model * 4 if learns else 0)}
  if teacher is None:
    return parts
  parts["the teacher's states"] = 2 * tokens * teacher.d_model * jnp.dtype(teacher.dtype).itemsize
  parts["the teacher's chunk of logits"] = chunk * vocab * 4
  parts["the teacher's output head"] = vocab * teacher.d_model * jnp.dtype(teacher.param_dtype).itemsize if is_split else 0
  return parts


def sampling(
  config: ConfigDict, shape: ModelConfig, mesh: Mesh, *, slots: int | None = None, engine_columns: int | None = None
) -> dict[str, float]:
  """Returns the bytes besides the weights on each device of the sampler, by kind.

  This is the larger of drawing rollouts and evaluating, or what the decoding engine takes for both.
  `slots` replaces the config's number.
  """
  section, shards, options = config.rollout, mesh_lib.num_row_shards(mesh), []
  if engine_columns is not None:
    most = (section.num_prompts + section.spare_prompts) * section.group_size
    rows, dtype = -(-min(slots or section.slots or most, most) // shards), section.cache_dtype or shape.dtype
    cache = num_bytes(shape, num_prompts=0, prompt_tokens=0, num_rows=rows, new_tokens=engine_columns, dtype=dtype, keeps_all=True)
    cache /= min(mesh.shape["tensor"], shape.num_kv_heads)
    return {"key-value cache": cache, "logits": 3 * rows * shape.vocab_size * 4}
  width, num_prompts = max(section.prompt_buckets), section.num_prompts + section.spare_prompts
  for prompts, group in ((num_prompts, section.group_size), (config.eval.batch_prompts, config.eval.samples)):
    rows = num_rows(mesh, prompts * group, slots or section.slots)
    sizes = dict(num_prompts=prompts, prompt_tokens=width, num_rows=rows, new_tokens=section.max_new_tokens)
    cache = num_bytes(shape, dtype=section.cache_dtype or shape.dtype, keeps_all=shape.exact, **sizes)
    cache /= shards * min(mesh.shape["tensor"], shape.num_kv_heads)
    logits = 3 * rows / shards * shape.vocab_size * 4
    options.append({"key-value cache": cache, "logits": logits})
  return _larger(*options)


def slots_that_fit(
  config: ConfigDict, shape: ModelConfig, mesh: Mesh, estimate: Footprint, *, limit: float, engine_columns: int | None = None
) -> int:
  """Returns the largest number of rows that decode at once and fit the devices.

  More rows share each read of the weights, and fewer sequences wait. The number starts with
  the platform's default and is halved until the estimate leaves a tenth of the memory free.

  Args:
    config: Checked config.
    shape: Shape of the model.
    mesh: Mesh of the sampler.
    estimate: Memory of each device with any number of slots.
    limit: Memory of each device in bytes.
    engine_columns: Number of columns of the decoding engine's cache; None if the sampler draws.
  """
  beside = estimate.of_sampler or estimate.held | estimate.programs["sampling"]
  fixed = sum(size for name, size in beside.items() if name not in ("key-value cache", "logits"))
  section, shards = config.rollout, mesh_lib.num_row_shards(mesh)
  sampled = shape._replace(dtype=config.model.sampler_dtype or shape.dtype)
  slots = num_rows(mesh, (section.num_prompts + section.spare_prompts) * section.group_size, None)
  needed = lambda slots: sum(sampling(config, sampled, mesh, slots=slots, engine_columns=engine_columns).values())
  while slots > shards and fixed + needed(slots) > _FILLED * limit:
    slots = -(-slots // (2 * shards)) * shards
  return slots


def fitted(
  config: ConfigDict, shape: ModelConfig, mesh: Mesh, sampler_mesh: Mesh, objective: Objective, *, limit: float | None, **options: Any
) -> ModelConfig:
  """Chooses `rollout.slots` and `model.remat` in a config that leaves them open.

  Rows take the most slots, and the backward pass recomputes the least, with which the estimate
  leaves a tenth of the devices' memory free. If it is unknown, nothing is recomputed, and the
  number of slots stays open.

  Args:
    config: Checked config with set sizes; changed in place.
    shape: Shape of the model.
    mesh: Mesh of the learner.
    sampler_mesh: Mesh of the sampler, possibly with the same devices.
    objective: Objective that RL minimises.
    limit: Memory of each device in bytes; None if unknown.
    **options: Further arguments of `footprint`.

  Returns:
    The shape of the model with its policy.
  """
  of_policy = lambda name: footprint(config, shape._replace(remat=name), mesh, sampler_mesh, objective, **options)
  if config.rollout.slots is None and limit is not None:
    columns = options.get("engine_columns")
    config.rollout.slots = slots_that_fit(config, shape, sampler_mesh, of_policy(shape.remat), limit=limit, engine_columns=columns)
  if config.model.remat == AUTO:
    fits = lambda name: limit is None or of_policy(name).peak <= _FILLED * limit
    config.model.remat = next(filter(fits, CHEAPEST), CHEAPEST[-1])
  return shape._replace(remat=config.model.remat)


def table(estimate: Footprint) -> list[str]:
  """Formats the estimate as lines: what is always held, what each program adds, and the peak.

  Example:
    >>> print("\\n".join(table(Footprint({"weights": 4e6}, {"update": {"gradients": 4e6, "activations": 9e6}}, {}))))
    estimated memory of each device, in MB:
      always          4.0  weights 4.0
      update        +13.0  activations 9.0, gradients 4.0
      peak           17.0  in update
  """

  def line(name: str, parts: dict[str, float], sign: str = "") -> str:
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return f"  {name:11s}{sign + format(sum(parts.values()) / 1e6, ',.1f'):>8s}  " + ", ".join(f"{k} {v / 1e6:,.1f}" for k, v in largest)

  lines = ["estimated memory of each device, in MB:", line("always", estimate.held)]
  lines += [line(name, parts, "+") for name, parts in estimate.programs.items()]
  lines += [f"  {'peak':11s}{estimate.peak / 1e6:>8,.1f}  in {estimate.largest}"]
  if estimate.of_sampler:
    lines += ["estimated memory of each device that only samples, in MB:", line("sampling", estimate.of_sampler)]
  return lines + (
    [f"estimated memory of the host for each device, in MB: {estimate.on_host / 1e6:,.1f}"] if estimate.on_host else []
  )
