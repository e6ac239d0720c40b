"""The sampler's programs compiled for chips that are elsewhere: prefill, which begins the job, and one step of decoding."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from experiments.pod import costs
from experiments.pod.compiled import Compiled, compile_for
from experiments.pod.proof import Plan, Proof
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.devices.mesh import BATCH_AXES
from jaxrl_llm.learner.programs import records_routes
from jaxrl_llm.models import Model, ModelConfig, make_model
from jaxrl_llm.models.transformer import STACKS, runs
from jaxrl_llm.rollouts.samplers import in_dtype
from jaxrl_llm.sampler.begin import begin, num_rows
from jaxrl_llm.sampler.loop import advance, grow
from jaxrl_llm.sampler.requests import Requests
from jaxrl_llm.sampler.sampler import make_settings
from jaxrl_llm.sampler.state import Job, Loop, Settings

FEW = (2, 4)
"""Layers that a step of decoding is compiled with for machine code: its layers are not scanned. The rest is a line through these two."""

_STOP, _PAD = 1, 0  # Ids of no importance to what is compiled.
_WHOLE = ("key", "step", "written")  # Of a job and a loop, what has no rows.


class Sampler(NamedTuple):
  """The sampler of a run, and where its arrays lie.

  Attributes:
    model: in the sampler's dtype.
    settings: of the run.
    start: prompts to a job and its loop, with room for the whole cache.
    arguments: of `start`, abstract.
    job: that `start` returns, abstract, each array where it lies.
    loop: as `job`.
  """

  model: Model
  settings: Settings
  start: Callable
  arguments: tuple
  job: Job
  loop: Loop


def make_sampler(plan: Plan, num_layers: int) -> Sampler:
  """The sampler of a run, with some of the model's layers or all."""
  config, section, mesh = plan.config, plan.config.rollout, plan.sampler_mesh
  shape = _shape(plan)._replace(num_layers=num_layers)
  plain = make_model(shape, mesh=mesh)
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
  params = jax.eval_shape(plain.init, jax.random.key(0))
  if mesh is not plan.mesh:
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(shape.dtype)), params)
  shardings = mesh_lib.param_shardings(mesh, plain.logical_axes, params)
  prompts = (section.num_prompts + section.spare_prompts, max(section.prompt_buckets))
  arrays = [jax.ShapeDtypeStruct(prompts, dtype, sharding=mesh_lib.row_sharding(mesh)) for dtype in (jnp.int32, bool)]
  key = _placed(jax.eval_shape(jax.random.key, 0), mesh_lib.replicated(mesh))
  arguments = (_placed(params, shardings), *arrays, key)

  def start(params, prompts, mask, key):
    job, loop, _ = begin(model, settings, params, prompts, mask, key, Requests())
    for _ in settings.cache_blocks[1:]:
      loop = grow(model, settings, loop)
    return job, loop

  job, loop = jax.eval_shape(start, *arguments)
  lie = where_it_lies(plan, shape, shardings, job, loop)
  return Sampler(model, settings, jax.jit(start, out_shardings=lie), arguments, *map(_placed, (job, loop), lie))


def where_it_lies(plan: Plan, shape: ModelConfig, params: PyTree, job: Job, loop: Loop) -> tuple[Job, Loop]:
  """Shardings of what begins the sampler's loop: those that the compiler chooses by itself, said here so that nobody need ask it.

  Weights lie as the learner's do, without the axis of the layers; the cache's rows over the axes that split a batch and its heads over
  `tensor`; all else by rows.

  Args:
    plan: has the mesh.
    shape: of the sampler's model.
    params: shardings of the learner's.
    job: abstract.
    loop: abstract.
  """
  mesh, shards = plan.sampler_mesh, mesh_lib.num_row_shards(plan.sampler_mesh)
  rows = lambda x: BATCH_AXES if x.ndim and x.shape[0] % shards == 0 else None
  by_rows = lambda x: NamedSharding(mesh, PartitionSpec(rows(x)) if x.ndim else PartitionSpec())
  by_heads = lambda x: NamedSharding(mesh, PartitionSpec(rows(x), "tensor"))
  whole = lambda _: mesh_lib.replicated(mesh)
  of_fields = lambda x: type(x)(*(jax.tree.map(whole if name in _WHOLE else by_rows, getattr(x, name)) for name in x._fields))
  stacks = {name: jax.tree.leaves(params[name]) for name in STACKS if name in params}
  inside = {name: [NamedSharding(mesh, PartitionSpec(*x.spec[1:])) for x in found] for name, found in stacks.items()}
  of_layers = [inside[run.stack] for run in runs(shape) for _ in range(run.count)]
  blocks = tuple(jax.tree.unflatten(jax.tree.structure(x), found) for x, found in zip(job.weights.blocks, of_layers, strict=True))
  weights = job.weights._replace(rest={name: x for name, x in params.items() if name not in STACKS}, blocks=blocks)
  return of_fields(job)._replace(weights=weights), of_fields(loop)._replace(cache=jax.tree.map(by_heads, loop.cache))


def prefill(plan: Plan) -> Proof:
  """All prompts, each once, and room for all responses. Its layers are scanned, and compiled all of them."""
  sampler = make_sampler(plan, plan.model.num_layers)
  compiled = compile_for(sampler.start, sampler.arguments, plan.sampler_mesh, plan.topology, only_planned=plan.only_planned)
  parts = {"weights": costs.bytes_on_chip(sampler.arguments[0])}
  work = costs.prefill(plan.config, plan.model, plan.sampler_mesh)
  prompts, width = sampler.arguments[1].shape
  return Proof("prefill", compiled, parts, _beside(plan), work, note=f"{prompts} prompts of {width} tokens, with room for the whole cache")


def decode(plan: Plan) -> Proof:
  """One step of all rows."""

  def of_layers(num_layers: int, only_planned: bool = plan.only_planned) -> tuple[Compiled, dict[str, float]]:
    model, settings, _, _, job, loop = make_sampler(plan, num_layers)
    step = jax.jit(
      lambda job, loop: advance(model, settings, job, loop), donate_argnums=1, out_shardings=jax.tree.map(lambda x: x.sharding, loop)
    )
    parts = {"weights": costs.bytes_on_chip(job.weights), "cache": costs.bytes_on_chip(loop.cache)}
    return compile_for(step, (job, loop), plan.sampler_mesh, plan.topology, only_planned=only_planned), parts

  compiled, parts, note = _extrapolated(plan, of_layers)
  # The learner's weights stay: what decodes is a copy, laid out for it.
  beside = _beside(plan) + (costs.bytes_on_chip(plan.programs.abstract_state.params) if plan.sampler_mesh is plan.mesh else 0.0)
  if note and not Proof("decode", compiled, parts, beside, costs.Work(0, 0, 0)).fits(plan.topology):
    # Short of memory the compiler gathers later what a line through two small models takes it to hold at once.
    (compiled, parts), note = of_layers(plan.model.num_layers, True), "all layers, only planned: by a line through fewer it would not fit"
  section = plan.config.rollout
  rows = num_rows(plan.sampler_mesh, (section.num_prompts + section.spare_prompts) * section.group_size, section.slots)
  # Where the compiler leaves weights where they are, and sends the rows' few activations instead, nobody reads more than what it holds.
  gathered = sum(num_bytes for (kind, _), (_, num_bytes) in compiled.traffic.items() if kind == "all-gather")
  num_bytes = parts["weights"] + parts["cache"] + gathered
  work = costs.decode_step(plan.config, _shape(plan), plan.sampler_mesh, rows=rows, num_bytes=num_bytes)
  return Proof("decode", compiled, parts, beside, work, note="; ".join(x for x in (note, f"one step of {rows} rows, full cache") if x))


def _extrapolated(plan: Plan, of_layers: Callable[[int], tuple[Compiled, Any]]) -> tuple[Compiled, dict[str, float], str]:
  total = plan.model.num_layers
  if total <= FEW[1] or plan.model.experts and plan.model.experts.layers:
    return *of_layers(total), ""
  (few, few_parts), (more, more_parts) = map(of_layers, FEW)
  if few.refused or more.refused:
    return more, more_parts, f"compiled with {FEW[1]} layers"
  steps = (total - FEW[0]) / (FEW[1] - FEW[0])
  line = lambda a, b: a + (b - a) * steps
  sizes = {name: line(getattr(few, name), getattr(more, name)) for name in ("arguments", "outputs", "aliased", "temporaries", "code")}
  nothing = (0.0, 0.0)
  traffic = {k: tuple(map(line, few.traffic.get(k, nothing), more.traffic[k])) for k in more.traffic}
  parts = {name: line(few_parts[name], more_parts[name]) for name in more_parts}
  found = Compiled(**sizes, seconds=few.seconds + more.seconds, traffic=traffic)
  return found, parts, f"compiled with {FEW[0]} and {FEW[1]} of {total} layers, the rest a line through both"


def _shape(plan: Plan) -> ModelConfig:
  return plan.model._replace(dtype=plan.config.model.sampler_dtype or plan.model.dtype)


def _placed(tree: PyTree, shardings: PyTree) -> PyTree:
  return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings)


def _beside(plan: Plan) -> float:
  """What the learner holds while responses are drawn on its chips, besides the weights."""
  return costs.bytes_on_chip(plan.programs.abstract_state.opt_state) if plan.sampler_mesh is plan.mesh else 0.0
