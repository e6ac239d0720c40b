"""Memory and time of a program on remote chips, and the learner's programs: update and score."""

from typing import NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments.pod import costs
from experiments.pod.compiled import Compiled, compile_for
from experiments.pod.kernels import Load
from experiments.pod.topology import Topology
from jaxrl_llm.config import policy
from jaxrl_llm.config.check import row_problems
from jaxrl_llm.config.policy import make_objective
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner.memory import footprint, slots_that_fit
from jaxrl_llm.learner.needs import fields_needed
from jaxrl_llm.learner.programs import Programs, make_programs
from jaxrl_llm.models import ModelConfig
from jaxrl_llm.models.head import chunk_tokens
from jaxrl_llm.types import TrainBatch

MOST_OPERATIONS = 1.1
"""Most operations that an update or a scoring may be compiled to, over those that it needs."""

_VOCABULARY = 264  # Vocabulary size of presets without a tokenizer of their own.


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
    note: Remark on the numbers; empty for none.
  """

  name: str
  compiled: Compiled
  parts: dict[str, float]
  beside: float
  work: costs.Work
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
    """Operations of the compiled program over those that it needs; 0 if unknown."""
    operations = self.compiled.operations
    return operations.flops / (self.work.flops + self.work.repeated_flops) if operations else 0.0

  @property
  def is_wasteful(self) -> bool:
    """Whether an update or a scoring is compiled to more than `MOST_OPERATIONS`."""
    return self.name in ("update", "score") and self.excess > MOST_OPERATIONS

  def seconds(self, topology: Topology) -> dict[str, float]:
    """Returns lower bounds on the time of one run: its compute, memory traffic and collectives.

    The compute is that of the compiled program, if that is more than what the program needs.
    """
    chip, operations = topology.chip, self.compiled.operations
    network = sum(seconds for seconds, _ in self.compiled.traffic.values())
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
  objective = make_objective(config)
  needs = fields_needed(config, objective)
  if config.rollout.slots is None:
    estimate = footprint(config, model, mesh, sampler_mesh, objective, needs=needs)
    config.rollout.slots = slots_that_fit(config, model, sampler_mesh, estimate, limit=topology.chip.memory_bytes)
  programs = make_programs(config, mesh, model, objective, needs=needs)
  return Plan(config, topology, mesh, sampler_mesh, model, programs, only_planned)


def update(plan: Plan) -> Proof:
  """Compiles the optimizer update of the largest batch."""
  state, batch = plan.programs.rl_step.signatures[-1]
  rows = batch.tokens.shape[0]
  work = costs.rows_pass(plan.config, plan.model, plan.mesh, rows=rows, backward=True)
  held = costs.bytes_on_chip(state)
  work = work._replace(num_bytes=work.num_bytes + costs.optimizer_bytes(held, costs.bytes_on_chip(state.params)))
  parts = {
    "weights": costs.bytes_on_chip(state.params),
    "moments": costs.bytes_on_chip(state.opt_state),
    "batch": costs.bytes_on_chip(batch),
  }
  compiled = _compiled(plan, plan.programs.rl_step, (state, batch), batch)
  return Proof("update", compiled, parts, beside=0.0, work=work, note=f"{rows} rows of {batch.tokens.shape[1]} tokens, all full")


def score(plan: Plan) -> Proof:
  """Compiles the pass that scores the rollouts before the first update."""
  params, batch = plan.programs.logprobs.signatures[-1]
  work = costs.rows_pass(plan.config, plan.model, plan.mesh, rows=batch.tokens.shape[0], backward=False)
  parts = {"weights": costs.bytes_on_chip(params), "batch": costs.bytes_on_chip(batch)}
  compiled = _compiled(plan, plan.programs.logprobs, (params, batch), batch)
  return Proof("score", compiled, parts, beside=costs.bytes_on_chip(plan.programs.abstract_state.opt_state), work=work)


def _compiled(plan: Plan, program, arguments: tuple, batch: TrainBatch) -> Compiled:
  learner = plan.config.learner
  on_chip = batch.tokens.size / plan.mesh.size * plan.mesh.shape["tensor"] / learner.micro_batches
  tokens = max(learner.row_buckets) * learner.row_tokens / plan.mesh.size * plan.mesh.shape["tensor"] / learner.micro_batches
  # Number of iterations of the output head's loop.
  turns = -(-int(tokens) // (plan.model.head_tokens or chunk_tokens(plan.model.vocab_size, "tpu")))
  experts = plan.model.experts
  load = Load(int(on_chip * experts.top_k) if experts else None, passes=1 if batch.prefixes is None else 2)
  return compile_for(
    program.jitted, arguments, plan.mesh, plan.topology, unknown_trips=turns, only_planned=plan.only_planned, load=load
  )
