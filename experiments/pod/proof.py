"""What a program on chips that are elsewhere takes of memory and time; and the learner's programs: update and score."""

from typing import NamedTuple

from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments.pod import costs
from experiments.pod.compiled import Compiled, compile_for
from experiments.pod.topology import Topology
from jaxrl_llm.config import policy
from jaxrl_llm.config.check import row_problems
from jaxrl_llm.config.policy import make_objective
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner.needs import fields_needed
from jaxrl_llm.learner.programs import Programs, make_programs
from jaxrl_llm.models import ModelConfig
from jaxrl_llm.models.head import chunk_tokens

_VOCABULARY = 264  # Of a tokenizer, for presets that have none of their own.


class Plan(NamedTuple):
  """What is compiled.

  Attributes:
    config: checked.
    topology: the chips.
    mesh: of the learner.
    sampler_mesh: of the sampler; the same, or other chips.
    model: its shape.
    programs: the learner's.
    only_planned: stop where memory is laid out and collectives are placed, and leave the chips' machine code, which takes minutes, aside.
  """

  config: ConfigDict
  topology: Topology
  mesh: Mesh
  sampler_mesh: Mesh
  model: ModelConfig
  programs: Programs
  only_planned: bool


class Proof(NamedTuple):
  """A program on its chips.

  Attributes:
    name: of the program.
    compiled: what the compiler says.
    parts: of the arguments, by what they hold.
    beside: bytes that lie on the chip besides, such as moments while responses are drawn.
    work: what one run does.
    note: what to know of the numbers; empty for nothing.
  """

  name: str
  compiled: Compiled
  parts: dict[str, float]
  beside: float
  work: costs.Work
  note: str = ""

  @property
  def peak(self) -> float:
    """Bytes of a chip while the program runs."""
    found = self.compiled
    return found.arguments + found.outputs - found.aliased + found.temporaries + found.code + self.beside

  def fits(self, topology: Topology) -> bool:
    """Whether it does."""
    return self.compiled.refused is None and self.peak <= topology.chip.memory_bytes

  def seconds(self, topology: Topology) -> dict[str, float]:
    """The least time of one run for what it computes, moves in memory, and sends."""
    chip = topology.chip
    network = sum(seconds for seconds, _ in self.compiled.traffic.values())
    return {"compute": self.work.flops / chip.flops_per_s, "memory": self.work.num_bytes / chip.bytes_per_s, "network": network}

  def utilisation(self, topology: Topology) -> float:
    """The ceiling of the model's FLOP/s over the chip's: no program can be faster than the slowest of its three bounds."""
    return self.work.model_flops / topology.chip.flops_per_s / max(*self.seconds(topology).values(), 1e-12)


def make_plan(config: ConfigDict, topology: Topology, *, only_planned: bool = False) -> Plan:
  """The programs of a config on the chips of a topology; compiles nothing yet.

  Raises:
    ValueError: a mesh that the chips do not make up, or sizes that it does not divide.
  """
  mesh, sampler_mesh = mesh_lib.make_meshes(**config.mesh, devices=topology.devices)
  shards = (mesh_lib.num_row_shards(mesh), mesh_lib.num_row_shards(sampler_mesh))
  if problems := list(row_problems(config, *shards, context=mesh.shape["context"])):
    raise ValueError("\n".join(problems))
  model = policy.model_config(config, vocab_size=_VOCABULARY)
  objective = make_objective(config)
  programs = make_programs(config, mesh, model, objective, needs=fields_needed(config, objective))
  return Plan(config, topology, mesh, sampler_mesh, model, programs, only_planned)


def update(plan: Plan) -> Proof:
  """An optimizer update of the largest batch."""
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
  compiled = _compiled(plan, plan.programs.rl_step, (state, batch))
  return Proof("update", compiled, parts, beside=0.0, work=work, note=f"{rows} rows of {batch.tokens.shape[1]} tokens, all full")


def score(plan: Plan) -> Proof:
  """The pass that scores what was sampled, before the first update."""
  params, batch = plan.programs.logprobs.signatures[-1]
  work = costs.rows_pass(plan.config, plan.model, plan.mesh, rows=batch.tokens.shape[0], backward=False)
  parts = {"weights": costs.bytes_on_chip(params), "batch": costs.bytes_on_chip(batch)}
  compiled = _compiled(plan, plan.programs.logprobs, (params, batch))
  return Proof("score", compiled, parts, beside=costs.bytes_on_chip(plan.programs.abstract_state.opt_state), work=work)


def _compiled(plan: Plan, program, arguments: tuple) -> Compiled:
  learner = plan.config.learner
  tokens = max(learner.row_buckets) * learner.row_tokens / plan.mesh.size * plan.mesh.shape["tensor"] / learner.micro_batches
  turns = -(-int(tokens) // (plan.model.head_tokens or chunk_tokens(plan.model.vocab_size, "tpu")))  # Of the output head's loop.
  return compile_for(program.jitted, arguments, plan.mesh, plan.topology, unknown_trips=turns, only_planned=plan.only_planned)
