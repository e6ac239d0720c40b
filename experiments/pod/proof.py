"""Memory and time of a program on remote chips, and the learner's programs: update and score."""

from functools import partial
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments.pod import costs
from experiments.pod.compiled import Compiled, compile_for
from experiments.pod.kernels import Load
from experiments.pod.topology import Topology
from jaxrl_llm.config import policy, sizes
from jaxrl_llm.config.check import row_problems
from jaxrl_llm.config.policy import make_objective
from jaxrl_llm.decoding.apart.weights import copies_and_sums
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner.memory import Footprint, fitted, footprint
from jaxrl_llm.learner.needs import fields_needed
from jaxrl_llm.learner.programs import Programs, make_programs, rows_at_once
from jaxrl_llm.models import ModelConfig, lower_precision
from jaxrl_llm.models.head import chunk_tokens
from jaxrl_llm.types import TrainBatch

MOST_OPERATIONS = 1.1
"""Most operations that an update or a scoring may be compiled to, over those that it needs."""

MOST_BYTES = 1.3
"""Bytes of a compiled decoding step over those that it needs, above which there is a warning."""

_VOCABULARY = 264  # Vocabulary size of presets without a tokenizer of their own.
_TILE = 128  # Slots that a row on a TPU is a multiple of.


class Plan(NamedTuple):
  """Programs to compile and the chips to compile them for.

  Attributes:
    config: Checked config.
    topology: Chips to compile for.
    mesh: Mesh of the learner.
    sampler_mesh: Mesh of the sampler; the learner's mesh or other chips.
    model: Shape of the model.
    programs: Programs of the learner.
    only_planned: Whether to stop when memory is laid out and collectives are placed, without the
      chips' machine code, which takes minutes.
  """

  config: ConfigDict
  topology: Topology
  mesh: Mesh
  sampler_mesh: Mesh
  model: ModelConfig
  programs: Programs
  only_planned: bool


class Proof(NamedTuple):
  """Compiled program with its memory and its work.

  Attributes:
    name: Name of the program.
    compiled: Properties of the compiled program.
    parts: Bytes of the arguments, by content.
    beside: Bytes on the chip that the program does not use, such as the moments during sampling.
    work: Work of one run.
    rows: Number of rows of its batch; 0 for the sampler's programs.
    note: Remark on the numbers; empty for none.
  """

  name: str
  compiled: Compiled
  parts: dict[str, float]
  beside: float
  work: costs.Work
  rows: int = 0
  note: str = ""

  @property
  def peak(self) -> float:
    """Peak memory of a chip while the program runs, in bytes."""
    sizes = self.compiled
    return sizes.arguments + sizes.outputs - sizes.aliased + sizes.temporaries + sizes.code + self.beside

  def fits(self, topology: Topology) -> bool:
    """Returns whether the program fits the chips' memory."""
    return self.compiled.refused is None and self.peak <= topology.chip.memory_bytes

  @property
  def excess(self) -> float:
    """Operations of the compiled program over those that it needs; 0 if unknown, or none are."""
    operations, needed = self.compiled.operations, self.work.flops + self.work.repeated_flops
    return operations.flops / needed if operations and needed else 0.0

  @property
  def is_wasteful(self) -> bool:
    """Whether an update or a scoring is compiled to more than `MOST_OPERATIONS`."""
    return self.name in ("update", "score") and self.excess > MOST_OPERATIONS

  @property
  def num_collectives(self) -> float:
    """Number of collectives of one run."""
    return sum(x.times for x in self.compiled.traffic.values())

  @property
  def excess_bytes(self) -> float:
    """Bytes that the compiled program moves over those that it needs; 0 if unknown, or none are."""
    operations, needed = self.compiled.operations, self.work.num_bytes
    return operations.num_bytes / needed if operations and needed else 0.0

  def compiled_seconds(self, topology: Topology) -> float:
    """Returns the bound on the time with the bytes of the compiled program, if that moves more."""
    bounds = self.seconds(topology)
    return max(*bounds.values(), bounds["memory"] * self.excess_bytes)

  def latencies(self) -> tuple[float, ...]:
    """Returns the time of the collectives in a row, by each latency of `COLLECTIVE_S`."""
    return tuple(self.num_collectives * each for each in costs.COLLECTIVE_S)

  def seconds(self, topology: Topology) -> dict[str, float]:
    """Returns lower bounds on the time of one run: its compute, memory traffic and collectives.

    The compute is that of the compiled program, if that is more than what the program needs.
    """
    chip, operations = topology.chip, self.compiled.operations
    network = sum(x.seconds for x in self.compiled.traffic.values())
    return {
      "compute": max(self.work.flops, operations.flops if operations else 0.0) / chip.flops_per_s,
      "memory": self.work.num_bytes / chip.bytes_per_s,
      "network": network,
    }

  def utilisation(self, topology: Topology) -> float:
    """Returns an upper bound on the utilisation, the model's FLOP/s over the chip's.

    It follows from the slowest of the three bounds on the time.
    """
    return self.work.model_flops / topology.chip.flops_per_s / max(*self.seconds(topology).values(), 1e-12)


def estimate(plan: Plan) -> Footprint:
  """Returns the memory of each chip by formula, as a run predicts it."""
  objective = make_objective(plan.config)
  needs = fields_needed(plan.config, objective)
  return footprint(plan.config, plan.model, plan.mesh, plan.sampler_mesh, objective, needs=needs)


def make_plan(config: ConfigDict, topology: Topology, *, only_planned: bool = False) -> Plan:
  """Makes the programs of a config for the chips of a topology, without compiling them.

  Raises:
    ValueError: If the mesh does not fit the chips, or does not divide the sizes.
  """
  mesh, sampler_mesh = mesh_lib.make_meshes(**config.mesh, devices=topology.devices)
  shards = (mesh_lib.num_row_shards(mesh), mesh_lib.num_row_shards(sampler_mesh))
  if problems := list(row_problems(config, *shards, context=mesh.shape["context"])):
    raise ValueError("\n".join(problems))
  model = policy.model_config(config, vocab_size=_VOCABULARY)
  config = with_rows(config, model, mesh)
  objective = make_objective(config)
  needs = fields_needed(config, objective)
  model = fitted(config, model, mesh, sampler_mesh, objective, limit=topology.chip.memory_bytes, needs=needs)
  programs = make_programs(config, mesh, model, objective, needs=needs)
  return Plan(config, topology, mesh, sampler_mesh, model, programs, only_planned)


def with_rows(config: ConfigDict, model: ModelConfig, mesh: Mesh) -> ConfigDict:
  """Returns a config with buckets of rows for a mesh: its own, or those that a run would choose.

  `config` sets all other sizes, so that the choice needs no data.
  """
  bounds = sizes.Bounds(mesh_lib.num_row_shards(mesh), mesh.shape["context"], model.d_model, _TILE, model.max_positions)
  return sizes.choose_sizes(config, sizes.Lengths(prompts=()), bounds)


def update_work(plan: Plan, rows: int) -> costs.Work:
  """Counts the work of an update of `rows` full rows."""
  state = plan.programs.abstract_state
  work = costs.rows_pass(plan.config, plan.model, plan.mesh, rows=rows, backward=True)
  of_optimizer = costs.optimizer_bytes(costs.bytes_on_chip(state), costs.bytes_on_chip(state.params))
  return work._replace(num_bytes=work.num_bytes + of_optimizer)


def score_work(plan: Plan, rows: int) -> costs.Work:
  """Counts the work of a scoring pass over `rows` full rows."""
  return costs.rows_pass(plan.config, plan.model, plan.mesh, rows=rows, backward=False)


def update(plan: Plan) -> Proof:
  """Compiles the optimizer update of the largest batch."""
  state, batch = max(plan.programs.rl_step.signatures, key=_rows)
  rows = _rows((state, batch))
  parts = {
    "weights": costs.bytes_on_chip(state.params),
    "moments": costs.bytes_on_chip(state.opt_state),
    "batch": costs.bytes_on_chip(batch),
  }
  compiled = _compiled(plan, plan.programs.rl_step, (state, batch), batch)
  note = f"{rows} rows of {batch.tokens.shape[1]} tokens, all full"
  return Proof("update", compiled, parts, beside=_snapshot_bytes(plan), work=update_work(plan, rows), rows=rows, note=note)


def score(plan: Plan) -> Proof:
  """Compiles the pass that scores the rollouts before the first update."""
  params, batch = max(plan.programs.logprobs.signatures, key=_rows)
  rows, moments = _rows((params, batch)), costs.bytes_on_chip(plan.programs.abstract_state.opt_state)
  parts = {"weights": costs.bytes_on_chip(params), "batch": costs.bytes_on_chip(batch)}
  compiled = _compiled(plan, plan.programs.logprobs, (params, batch), batch)
  return Proof("score", compiled, parts, beside=moments + _snapshot_bytes(plan), work=score_work(plan, rows), rows=rows)


def tower(plan: Plan) -> Proof:
  """Compiles the pass of a frozen vision tower over as many pictures as it sees in one call."""
  (params, patches), state = plan.programs.features.signatures[0], plan.programs.abstract_state
  pictures, size = patches.mask.shape
  own = costs.bytes_on_chip(params["tower"])
  parts = {"weights": own, "patches": costs.bytes_on_chip(patches)}
  compiled = compile_for(plan.programs.features.jitted, (params, patches), plan.mesh, plan.topology, only_planned=plan.only_planned)
  beside = costs.bytes_on_chip(state) - own
  note = f"{pictures} pictures of {size} patches each"
  return Proof("tower", compiled, parts, beside, costs.tower_pass(plan.model, plan.mesh, pictures=pictures, patches=size), note=note)


def snapshot(plan: Plan) -> Proof:
  """Compiles the copy of the weights that travels to samplers in other processes."""
  params, dtype = plan.programs.abstract_state.params, sampler_dtype(plan.config, plan.model)
  jitted = jax.jit(partial(copies_and_sums, dtype=dtype))
  parts, copies = {"weights": costs.bytes_on_chip(params)}, _snapshot_bytes(plan)
  compiled = compile_for(jitted, (params,), plan.mesh, plan.topology, only_planned=plan.only_planned)
  moments = costs.bytes_on_chip(plan.programs.abstract_state.opt_state)
  work = costs.Work(0.0, 0.0, parts["weights"] + copies)
  return Proof("snapshot", compiled, parts, moments, work, note=f"copies in {dtype} of {copies / 2**30:.2f} GiB a chip, and checksums")


def _snapshot_bytes(plan: Plan) -> float:
  """Returns the bytes of the copies that lie on a chip until they have reached its host."""
  if not plan.config.rollout.samplers:
    return 0.0
  params, dtype = plan.programs.abstract_state.params, sampler_dtype(plan.config, plan.model)
  lowered = jax.eval_shape(lambda params: lower_precision(params, dtype), params)
  placed = jax.tree.map(lambda x, like: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like.sharding), lowered, params)
  return costs.bytes_on_chip(placed)


def sampler_dtype(config: ConfigDict, model: ModelConfig) -> str:
  """Returns the dtype in which samplers hold weights."""
  return config.model.sampler_dtype or model.dtype


def _rows(signature: tuple) -> int:
  return signature[1].tokens.shape[0]


def _compiled(plan: Plan, program, arguments: tuple, batch: TrainBatch) -> Compiled:
  learner = plan.config.learner
  at_once = rows_at_once(plan.config, plan.mesh)
  # Number of iterations of the output head's loop.
  tokens = (at_once or max(learner.row_buckets)) * learner.row_tokens / plan.mesh.size * plan.mesh.shape["tensor"]
  turns = -(-int(tokens) // (plan.model.head_tokens or chunk_tokens(plan.model.vocab_size, plan.mesh)))
  rows, row_tokens = batch.tokens.shape
  on_chip = (at_once or rows) * row_tokens / plan.mesh.size * plan.mesh.shape["tensor"]
  experts = plan.model.experts
  load = Load(int(on_chip * experts.top_k) if experts else None)
  return compile_for(
    program.jitted, arguments, plan.mesh, plan.topology, unknown_trips=turns, only_planned=plan.only_planned, load=load
  )
