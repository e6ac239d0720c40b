"""The sampler's programs compiled for remote chips: prefill and one decoding step."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from experiments.pod import costs, hlo
from experiments.pod.compiled import Compiled, Traffic, compile_for
from experiments.pod.kernels import Load
from experiments.pod.proof import Plan, Proof
from jaxrl_llm.decoding.sampler import exchange
from jaxrl_llm.decoding.sampler.begin import begin, num_rows
from jaxrl_llm.decoding.sampler.loop import grow
from jaxrl_llm.decoding.sampler.requests import Requests
from jaxrl_llm.decoding.sampler.sampler import make_settings
from jaxrl_llm.decoding.sampler.state import Inputs, Loop, Settings, exchanges
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.devices.mesh import BATCH_AXES
from jaxrl_llm.learner.programs import records_routes
from jaxrl_llm.models import Model, ModelConfig, make_model
from jaxrl_llm.models.decoding import serving_of
from jaxrl_llm.models.decoding_weights import unstacked_shardings
from jaxrl_llm.rollouts.gallery import abstract_shown
from jaxrl_llm.rollouts.samplers import in_dtype, room_in_prompts

FEW_LAYERS = (2, 4)
"""Numbers of layers with which a decoding step is compiled to machine code.

Its layers are not scanned. The numbers of the whole model lie on the line through these two.
"""

_STEPS_PER_EXCHANGE = 400
"""Decoding steps between two exchanges of samples, for the traffic of a step.

`lengths.simulate` counts 403 for 256 prompts x 8 samples of mean length 4,096 and 256 rows on 64
chips.
"""

_STOP, _PAD = 1, 0  # Token ids, which do not matter to the compiled programs.
_WHOLE = ("step", "written")  # Fields of `Inputs` and `Loop` that have no rows.


class Sampler(NamedTuple):
  """Sampler of a run and the shardings of its arrays.

  Attributes:
    model: Model in the sampler's dtype.
    settings: Settings of the run.
    prefill: Function from prompts to inputs and a loop, with room for the first tokens.
    start: Function that also makes room for the whole cache.
    arguments: Abstract arguments of both.
    inputs: Abstract inputs that `start` returns, with their shardings.
    loop: Abstract loop that `start` returns, with its shardings.
  """

  model: Model
  settings: Settings
  prefill: Callable
  start: Callable
  arguments: tuple
  inputs: Inputs
  loop: Loop


def make_sampler(plan: Plan, num_layers: int) -> Sampler:
  """Makes the sampler of a run, with some or all of the model's layers."""
  config, section, mesh = plan.config, plan.config.rollout, plan.sampler_mesh
  shape = _shape(plan)._replace(num_layers=num_layers)
  plain = make_model(shape, mesh=mesh, serving=serving_of(shape, mesh, layout=config.serving.layout))
  model = in_dtype(plain)
  settings = make_settings(
    model,
    group_size=section.group_size,
    max_new_tokens=section.max_new_tokens,
    stop_ids=(_STOP,),
    pad_id=_PAD,
    temperature=section.temperature,
    top_k=section.top_k,
    top_p=section.top_p,
    slots=section.slots,
    cache_dtype=section.cache_dtype,
    cache_blocks=section.cache_blocks,
    record_routing=records_routes(config, shape),
  )
  params = _params(plan, plain)
  shardings = jax.tree.map(lambda x: x.sharding, params)
  prompts = (section.num_prompts + section.spare_prompts, max(section.prompt_buckets))
  arrays = [
    jax.ShapeDtypeStruct(prompts, dtype, sharding=mesh_lib.row_sharding(mesh)) for dtype in (jnp.int32, bool)
  ]
  room = room_in_prompts(config, shape)
  place = partial(jax.ShapeDtypeStruct, sharding=mesh_lib.row_sharding(mesh))
  requests = Requests(place((prompts[0] * section.group_size, 2), jnp.uint32))
  arguments = (params, *arrays, requests, *([] if room is None else [abstract_shown(room, *prompts, place)]))

  def prefill(*arguments):
    return begin(model, settings, *arguments)[:2]

  def start(*arguments):
    inputs, loop = prefill(*arguments)
    for _ in settings.cache_blocks[1:]:
      loop = grow(model, settings, loop)
    return inputs, loop

  programs = []
  for program in (prefill, start):
    inputs, loop = jax.eval_shape(program, *arguments)
    shardings_out = sampler_shardings(plan, shape, shardings, inputs, loop)
    programs.append(jax.jit(program, out_shardings=shardings_out))
  return Sampler(model, settings, *programs, arguments, *map(_placed, (inputs, loop), shardings_out))


def _params(plan: Plan, model: Model) -> PyTree:
  """Returns the abstract params from which a sampler decodes.

  They are the learner's, or have arrived in the sampler's dtype on its own devices.
  """
  mesh, params = plan.sampler_mesh, jax.eval_shape(model.init, jax.random.key(0))
  if mesh is not plan.mesh:
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(model.config.dtype)), params)
  return _placed(params, mesh_lib.param_shardings(mesh, model.logical_axes, params, fields=mesh_lib.SAMPLER_FIELDS))


def sampler_shardings(
  plan: Plan, shape: ModelConfig, params: PyTree, inputs: Inputs, loop: Loop
) -> tuple[Inputs, Loop]:
  """Returns the shardings of the sampler's inputs and its initial loop.

  They are those that the compiler chooses by itself, and are given here so that it need not be
  queried. Weights are sharded as the learner's, without the axis of the layers. The cache's rows
  are sharded over the axes that split a batch, and its heads over `tensor`. Everything else is
  sharded by rows.

  Args:
    plan: Plan with the sampler's mesh.
    shape: Shape of the sampler's model.
    params: Shardings of the learner's parameters.
    inputs: Abstract inputs.
    loop: Abstract loop.
  """
  mesh, shards = plan.sampler_mesh, mesh_lib.num_row_shards(plan.sampler_mesh)
  rows = lambda x: BATCH_AXES if x.ndim and x.shape[0] % shards == 0 else None
  by_rows = lambda x: NamedSharding(mesh, PartitionSpec(rows(x)) if x.ndim else PartitionSpec())
  by_heads = lambda x: NamedSharding(mesh, PartitionSpec(rows(x), "tensor"))
  whole = lambda _: mesh_lib.replicated(mesh)
  of_fields = lambda x: type(x)(
    *(jax.tree.map(whole if name in _WHOLE else by_rows, getattr(x, name)) for name in x._fields)
  )
  if serving := serving_of(shape, mesh, layout=plan.config.serving.layout):
    plain = make_model(shape)
    abstract = jax.eval_shape(plain.init, jax.random.key(0))
    params = mesh_lib.param_shardings(serving.mesh, plain.logical_axes, abstract, rules=serving.rules)
  weights = unstacked_shardings(shape, inputs.weights, params)
  return of_fields(inputs)._replace(weights=weights), of_fields(loop)._replace(cache=jax.tree.map(by_heads, loop.cache))


def prefill(plan: Plan) -> Proof:
  """Compiles the prefill of all prompts, each once, with room for all responses.

  The layers are scanned, and all of them are compiled.
  """
  sampler = make_sampler(plan, plan.model.num_layers)
  prompts, width = sampler.arguments[1].shape
  compiled = compile_for(
    sampler.prefill,
    sampler.arguments,
    plan.sampler_mesh,
    plan.topology,
    only_planned=plan.only_planned,
    load=_load(plan, prompts * width),
  )
  parts = {"weights": costs.bytes_on_chip(sampler.arguments[0])}
  work = costs.prefill(plan.config, plan.model, plan.sampler_mesh)
  return Proof(
    "prefill",
    compiled,
    parts,
    _beside(plan),
    work,
    note=f"{prompts} prompts of {width} tokens, with room for {sampler.settings.cache_blocks[0]} new ones in each row",
  )


def rows_of(plan: Plan) -> int:
  """Returns the number of rows that decode at once, over all chips."""
  section = plan.config.rollout
  return num_rows(plan.sampler_mesh, (section.num_prompts + section.spare_prompts) * section.group_size, section.slots)


def loop_of_steps(plan: Plan, sampler: Sampler, *, only_planned: bool) -> Compiled:
  """Compiles the loop of the decoding steps, with the whole cache."""
  inputs, loop = sampler.inputs, sampler.loop

  # The whole loop, since its layouts of the cache are not those of a step by itself.
  def steps(fixed: Inputs, moved: Inputs, loop: Loop) -> tuple[Inputs, Loop]:
    inputs, loop = exchange.run(sampler.model, sampler.settings, exchange.with_fixed(moved, fixed), loop)
    return exchange.movable(inputs), loop

  changed = (exchange.movable(inputs), loop)
  return compile_for(
    jax.jit(steps, donate_argnums=(1, 2), out_shardings=jax.tree.map(lambda x: x.sharding, changed)),
    (exchange.fixed(inputs), *changed),
    plan.sampler_mesh,
    plan.topology,
    unknown_trips=_STEPS_PER_EXCHANGE,
    only_planned=only_planned,
    load=_load(plan, rows_of(plan)),
  )


def decode(plan: Plan) -> Proof:
  """Compiles a decoding step of all rows."""
  rows = rows_of(plan)

  def of_layers(num_layers: int, only_planned: bool = plan.only_planned) -> tuple[Compiled, dict[str, float]]:
    sampler = make_sampler(plan, num_layers)
    inputs, loop = sampler.inputs, sampler.loop
    compiled = loop_of_steps(plan, sampler, only_planned=only_planned)
    # The loop of the steps is inside that of the exchanges.
    loops = 2 if exchanges(loop) else 1
    per_step = lambda x: x / _STEPS_PER_EXCHANGE**loops
    traffic = {key: x.scaled(per_step(1)) for key, x in compiled.traffic.items()}
    operations = compiled.operations and compiled.operations.scaled(per_step(1))
    compiled = compiled._replace(traffic=traffic, operations=operations)
    depths.add(loops)
    parts = {"weights": costs.bytes_on_chip(inputs.weights), "cache": costs.bytes_on_chip(loop.cache)}
    shapes.update(local_shapes(loop.cache))
    return compiled, parts

  shapes: set[str] = set()
  depths: set[int] = set()
  compiled, parts, note = extrapolated(plan.model, of_layers)
  # The params stay on the chips: the sampler decodes with a copy in its own layout.
  beside = _beside(plan) + costs.bytes_on_chip(_params(plan, make_model(_shape(plan))))
  if note and not Proof("decode", compiled, parts, beside, costs.Work(0, 0, 0)).fits(plan.topology):
    # If memory is short, the compiler postpones some gathers. In small models it holds their
    # results at once, and the line through two of them therefore overestimates the memory.
    (compiled, parts), note = (
      of_layers(plan.model.num_layers, True),
      "all layers, only planned, because the line through fewer layers would not fit",
    )
  # If the compiler leaves the weights in place and sends the rows' few activations instead, a chip
  # reads only what it holds.
  gathered = sum(x.num_bytes for (kind, _), x in compiled.traffic.items() if kind == "all-gather")
  num_bytes = parts["weights"] + parts["cache"] + gathered
  work = costs.decode_step(plan.config, _shape(plan), plan.sampler_mesh, rows=rows, num_bytes=num_bytes)
  remarks = _loop_remarks(plan, compiled, shapes, rows, depth=max(depths))
  return Proof(
    "decode",
    compiled,
    parts,
    beside,
    work,
    note="; ".join(x for x in (note, f"one step of {rows} rows, full cache", *remarks) if x),
  )


def local_shapes(tree: PyTree) -> list[str]:
  """Returns the shapes of abstract arrays on one chip, as the compiler writes them."""
  local = lambda x: ",".join(map(str, x.sharding.shard_shape(x.shape)))
  return [f"{hlo.SHORT[x.dtype.name]}[{local(x)}]" for x in jax.tree.leaves(tree)]


def _loop_remarks(plan: Plan, compiled: Compiled, shapes: set[str], rows: int, *, depth: int) -> list[str]:
  """Says what the decoding loop sends and copies that it should not."""
  if compiled.refused:
    return []
  # The steps are the innermost loop.
  outer, largest = (hlo.largest_in_loops(compiled.text, num_devices=plan.sampler_mesh.size, depth=x) for x in (1, depth))
  copied = hlo.copies_by_depth(compiled.text, shapes)
  places = {0: "outside of the loops", depth: "in each step"}
  states = rows * plan.model.d_model * jnp.dtype(_shape(plan).dtype).itemsize
  return [
    f"largest collective of a step {largest / 1e6:.1f} MB, where the rows' states are {states / 1e6:.1f}",
    *([f"largest of an exchange {outer / 1e6:.1f} MB with {few_layers(plan.model)[1]} layers"] if depth > 1 else []),
    "the cache is not copied"
    if not copied
    else "copies of parts of the cache: " + ", ".join(f"{count} {places.get(at, 'in each exchange')}" for at, count in copied.items()),
  ]


def few_layers(model: ModelConfig) -> tuple[int, int]:
  """Returns two numbers of layers, of which the same share has a sliding window as of all.

  If only all layers have that share, the first is their number.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> few_layers(preset("qwen3-0.6b")), few_layers(preset("olmo3-7b")), few_layers(preset("gemma3-270m"))
    ((2, 4), (4, 8), (6, 12))
  """
  windows = [model.window_of(layer) for layer in range(model.num_layers)]
  period = next(p for p in range(1, len(windows) + 1) if all(x == windows[i % p] for i, x in enumerate(windows)))
  if period == 1:
    return FEW_LAYERS
  few = period if len(windows) % period == 0 else len(windows)
  return few, 2 * few


def extrapolated(model: ModelConfig, of_layers: Callable[[int], tuple[Compiled, Any]]) -> tuple[Compiled, dict[str, float], str]:
  """Compiles a program with few layers and extrapolates to all.

  Args:
    model: Shape of the whole model.
    of_layers: Function from a number of layers to the compiled program and the parts of its memory.

  Returns:
    The program with all layers, the parts, and a remark if they are extrapolated.
  """
  total, depths = model.num_layers, few_layers(model)
  if total <= depths[1] or model.experts and model.experts.layers:
    return *of_layers(total), ""
  (few, few_parts), (more, more_parts) = map(of_layers, depths)
  if few.refused or more.refused:
    return more, more_parts, f"compiled with {depths[1]} layers"
  steps = (total - depths[0]) / (depths[1] - depths[0])
  line = lambda a, b: a + (b - a) * steps
  sizes = {
    name: line(getattr(few, name), getattr(more, name))
    for name in ("arguments", "outputs", "aliased", "temporaries", "code")
  }
  traffic = {k: Traffic(*map(line, few.traffic.get(k, Traffic()), more.traffic[k])) for k in more.traffic}
  parts = {name: line(few_parts[name], more_parts[name]) for name in more_parts}
  operations = more.operations._replace(
    flops=line(few.operations.flops, more.operations.flops),
    num_bytes=line(few.operations.num_bytes, more.operations.num_bytes),
    by_kind={name: line(few.operations.by_kind.get(name, 0.0), flops) for name, flops in more.operations.by_kind.items()},
  )
  compiled = Compiled(**sizes, seconds=few.seconds + more.seconds, traffic=traffic, text=more.text, operations=operations)
  return (
    compiled,
    parts,
    f"compiled with {depths[0]} and {depths[1]} of {total} layers, extrapolated linearly",
  )


def _load(plan: Plan, tokens: int) -> Load:
  """Returns an even load of the experts by the tokens of all chips."""
  experts = plan.model.experts
  return Load(tokens * experts.top_k // mesh_lib.num_row_shards(plan.sampler_mesh) if experts else None)


def _shape(plan: Plan) -> ModelConfig:
  config = plan.config
  return plan.model._replace(
    dtype=config.model.sampler_dtype or plan.model.dtype,
    decode_attention=config.serving.attention,
    decode_weights=config.serving.weights,
  )


def _placed(tree: PyTree, shardings: PyTree) -> PyTree:
  return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings)


def _beside(plan: Plan) -> float:
  """Returns the bytes that the learner holds during sampling on its chips, besides the weights."""
  return costs.bytes_on_chip(plan.programs.abstract_state.opt_state) if plan.sampler_mesh is plan.mesh else 0.0
