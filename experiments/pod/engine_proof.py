"""The programs of an engine in processes of its own (`jaxrl_llm.cli.join`), for remote chips."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree
from ml_collections import ConfigDict

from experiments.pod import costs, hlo, sampler_proof, topology
from experiments.pod.compiled import Compiled, compile_for
from experiments.pod.kernels import Load
from experiments.pod.proof import Proof
from experiments.pod.topology import Topology
from jaxrl_llm.decoding.engine.programs import Program, Uncompiled, uncompiled_programs
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner.programs import records_routes
from jaxrl_llm.models import ModelConfig
from jaxrl_llm.rollouts.samplers import engine_sizes
from jaxrl_llm.run.setup.sampler_processes import mesh_of_sampler, model_of_sampler


class EnginePlan(NamedTuple):
  """An engine to compile, and the chips to compile it for.

  Attributes:
    config: Checked config.
    topology: Chips of the engine: those of a host, or the whole slice.
    mesh: Mesh of the engine.
    model: Shape of the learner's model.
    rows: Number of rows of an engine.
    spans: Number of spans of a prefill, and of pairs of rows of a copy.
    num_engines: Number of engines on the slice.
    only_planned: Whether to stop before machine code.
  """

  config: ConfigDict
  topology: Topology
  mesh: Mesh
  model: ModelConfig
  rows: int
  spans: int
  num_engines: int
  only_planned: bool

  @property
  def num_hosts(self) -> int:
    """Number of hosts of an engine, which run a process each."""
    return topology.num_hosts(self.topology.name)

  @property
  def copies(self) -> float:
    """Copies of the weights on the chips of a host, less than 1 if it holds a part of them."""
    _, params = model_of_sampler(self.config, self.model, self.mesh)
    return costs.bytes_on_chip(params) * self.mesh.size / self.num_hosts / weight_bytes(self)


def make_plan(config: ConfigDict, slice_name: str, shape: ModelConfig, *, only_planned: bool = False) -> EnginePlan:
  """Makes the plan of the engines on a slice.

  A host of the slice has an engine of its own if its chips hold a copy of the weights, that is if
  `mesh.sampler_expert` x `mesh.sampler_tensor` divides their number. Otherwise one engine has all
  chips of the slice, and a process on each host.

  Args:
    config: Checked config with samplers in processes of their own.
    slice_name: Name of the slice.
    shape: Shape of the learner's model.
    only_planned: Whether to stop before machine code.

  Raises:
    ValueError: If there is no such slice, or its chips do not fit the config.
  """
  of_host = topology.host_of(slice_name)
  chips_of_host, of_copy = math.prod(topology.parse(of_host)[1]), config.mesh.sampler_expert * config.mesh.sampler_tensor
  chips = topology.describe(of_host if chips_of_host % of_copy == 0 else slice_name)
  mesh, sizes = mesh_of_sampler(config, chips.devices), engine_sizes(config)
  shards = mesh_lib.num_row_shards(mesh)
  rows, spans = (-(-sizes[name] // shards) * shards for name in ("slots", "spans"))
  num_engines = topology.num_hosts(slice_name) // topology.num_hosts(chips.name)
  return EnginePlan(config, chips, mesh, shape, rows, spans, num_engines, only_planned)


def weight_bytes(plan: EnginePlan) -> float:
  """Returns the bytes of all weights in the dtype in which they travel."""
  _, params = model_of_sampler(plan.config, plan.model, plan.mesh)
  return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)))


def take(plan: EnginePlan) -> Proof:
  """Compiles the copy of weights that have arrived, with which the engine goes on.

  While it runs, the engine still draws with the earlier copy.
  """

  def of_layers(num_layers: int, only_planned: bool = plan.only_planned) -> tuple[Compiled, dict[str, float]]:
    programs = _programs(plan, num_layers)
    weights, cache = programs.weights_and_cache
    parts = {"arrived": costs.bytes_on_chip(programs.weights.arguments), "weights": costs.bytes_on_chip(weights)}
    return _compiled(plan, programs.weights, only_planned), parts | {"cache": costs.bytes_on_chip(cache)}

  compiled, parts, note = _extrapolated(plan, of_layers)
  work = costs.Work(0.0, 0.0, parts["arrived"] + parts["weights"])
  cache = parts.pop("cache")
  remark = "beside it lie the cache and the copy with which the engine draws meanwhile"
  return Proof("take", compiled, parts, parts["weights"] + cache, work, note="; ".join(x for x in (note, remark) if x))


def prefill(plan: EnginePlan) -> Proof:
  """Compiles the prefill of some tokens of some prompts."""
  chunk = engine_sizes(plan.config)["chunk"]
  tokens = plan.spans * chunk

  def of_layers(num_layers: int, only_planned: bool = plan.only_planned) -> tuple[Compiled, dict[str, float]]:
    programs = _programs(plan, num_layers)
    return _compiled(plan, programs.prefills[plan.spans], only_planned, load=_load(plan, tokens)), _parts(programs)

  compiled, parts, note = _extrapolated(plan, of_layers)
  met, _ = costs.layer_weights(plan.model)
  flops = tokens * 2 * plan.model.num_layers * met / plan.mesh.size
  work = costs.Work(flops, flops, parts["weights"])
  remark = f"{plan.spans} spans of {chunk} tokens; attention over earlier tokens is not counted as needed"
  return Proof("prefill", compiled, parts, parts["weights"] + parts.pop("held"), work, note="; ".join(x for x in (note, remark) if x))


def copy(plan: EnginePlan) -> Proof:
  """Compiles the copy of rows, by which the samples of a group share the prefill of its prompt."""

  def of_layers(num_layers: int, only_planned: bool = plan.only_planned) -> tuple[Compiled, dict[str, float]]:
    programs = _programs(plan, num_layers)
    return _compiled(plan, programs.copy, only_planned), _parts(programs)

  compiled, parts, note = _extrapolated(plan, of_layers)
  pairs = plan.spans // mesh_lib.num_row_shards(plan.mesh)
  of_row = parts["cache"] * mesh_lib.num_row_shards(plan.mesh) / plan.rows
  beside = 2 * parts.pop("weights") + parts.pop("held")
  remark = f"{plan.spans} whole rows, {pairs} on a chip"
  note = "; ".join(x for x in (note, remark) if x)
  return Proof("copy", compiled, parts, beside, costs.Work(0.0, 0.0, 2 * pairs * of_row), note=note)


def decode(plan: EnginePlan) -> Proof:
  """Compiles a stretch of steps, and counts one step of it."""
  steps = engine_sizes(plan.config)["steps"]

  def of_layers(num_layers: int, only_planned: bool = plan.only_planned) -> tuple[Compiled, dict[str, float]]:
    programs = _programs(plan, num_layers)
    compiled = _compiled(plan, programs.stretches[plan.rows], only_planned, load=_load(plan, plan.rows), unknown_trips=steps)
    traffic = {key: x.scaled(1 / steps) for key, x in compiled.traffic.items()}
    operations = compiled.operations and compiled.operations.scaled(1 / steps)
    copied = copied_bytes(compiled.text, programs.weights_and_cache[1])
    return compiled._replace(traffic=traffic, operations=operations), _parts(programs) | {"copied": copied}

  compiled, parts, note = _extrapolated(plan, of_layers)
  beside, copied = parts["weights"] + parts.pop("held"), parts.pop("copied")
  work = costs.decode_step(plan.config, plan.model, plan.mesh, rows=plan.rows, num_bytes=parts["weights"] + parts["cache"])
  proof = Proof("decode", compiled, parts, beside, work)
  step_s, copies_s = max(proof.seconds(plan.topology).values()), copied / plan.topology.chip.bytes_per_s
  copies = f"copies of parts of the cache move {copied / 1e9:.1f} GB more in each step, {copies_s * 1e3:.1f} ms"
  remarks = [
    f"one step of the {plan.rows} rows of an engine, full cache; a stretch of {steps} takes at least {steps * step_s * 1e3:.1f} ms",
    copies if copied else "the cache is not copied",
    "beside it lie weights that have arrived and their copy",
  ]
  return proof._replace(note="; ".join(x for x in (note, *remarks) if x))


def copied_bytes(text: str, cache: PyTree) -> float:
  """Counts the bytes that copies of parts of a cache read and write, each of them once.

  Args:
    text: Text of a compiled program.
    cache: Abstract cache with shardings.
  """
  total = 0.0
  for x in {(x.shape, x.dtype.name): x for x in jax.tree.leaves(cache)}.values():
    local = x.sharding.shard_shape(x.shape)
    # The compiler leaves out axes of size 1.
    shapes = {f"{hlo.SHORT[x.dtype.name]}[{','.join(map(str, sizes))}]" for sizes in (local, [size for size in local if size > 1])}
    total += 2.0 * math.prod(local) * x.dtype.itemsize * len(hlo.copies(text, shapes))
  return total


def _programs(plan: EnginePlan, num_layers: int) -> Uncompiled:
  config, sizes = plan.config, engine_sizes(plan.config)
  model, params = model_of_sampler(config, plan.model._replace(num_layers=num_layers), plan.mesh)
  options: dict[str, Any] = {name: sizes[name] for name in ("context", "chunk", "steps")}
  options |= dict(slots=plan.rows, spans=plan.spans, cache_dtype=config.rollout.cache_dtype or model.config.dtype)
  return uncompiled_programs(model, params, records_routes=records_routes(config, model.config), **options)


def _parts(programs: Uncompiled) -> dict[str, float]:
  weights, cache = programs.weights_and_cache
  names = ("weights", weights), ("cache", cache), ("held", programs.weights.arguments)
  return {name: costs.bytes_on_chip(tree) for name, tree in names}


def _compiled(plan: EnginePlan, program: Program, only_planned: bool, **options: Any) -> Compiled:
  return compile_for(program.jitted, program.arguments, plan.mesh, plan.topology, only_planned=only_planned, **options)


def _extrapolated(plan: EnginePlan, of_layers: Callable) -> tuple[Compiled, dict[str, float], str]:
  return sampler_proof.extrapolated(plan.model, of_layers)


def _load(plan: EnginePlan, tokens: int) -> Load:
  """Returns an even load of the experts by the tokens of all chips."""
  experts = plan.model.experts
  return Load(tokens * experts.top_k // mesh_lib.num_row_shards(plan.mesh) if experts else None)
