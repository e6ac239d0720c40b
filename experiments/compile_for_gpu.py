"""What the compiled programs of a run do on a GPU, counted without having one.

  python -m experiments.compile_for_gpu [--target=h200] [--devices=1]
    [--programs=decode,update,memory]

Compiles the decoding step and the update of Qwen3-0.6B with XLA's compiler for CUDA, and checks
what they do against gates: kernels that are launched for each layer and outside of the layers,
reads of the logits, how keys are stored, casts of the output head, and the memory that each policy
of `model.remat` takes beside what the run predicts. Kernels are gated for one device; several are
compiled and counted, too.

  --target     h100 or h200
  --devices    number of GPUs: 1 to 8, or a multiple of 8 over as many hosts
  --programs   some of decode, update and memory; memory compiles the update four times
  --json       file for the numbers

The compiler is a package of JAX for Python >= 3.12: pip install jax-cuda13-plugin jax-cuda13-pjrt,
in the version of jax. It times no kernels here: products have default tiles, and none of the
numbers is a time. Exit code: 0 if all gates hold, 1 if one does not, 2 for bad input.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.pod import gpus, hlo, operations, proof, sampler_proof
from experiments.pod.launches import Loop, parse
from experiments.pod.proof import Plan
from jaxrl_llm.config import check, command_line
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models.remat import CHEAPEST

CONFIG = "configs/gspo.py:qwen3-0.6b"
SIZES = {
  "rollout.prompt_buckets": "(512,)",
  "rollout.max_new_tokens": "1024",
  "rollout.num_prompts": "64",
  "rollout.group_size": "8",
  "rollout.slots": "512",
  "learner.row_tokens": "4096",
  "learner.rows_per_device": "3",
  "learner.row_buckets": "(192,)",
  "warm_start.row_buckets": "(192,)",
  "learner.updates_per_rollout": "1",
  "model.remat": "full",
}
"""Sizes of the programs: 512 responses to 64 prompts of 512 tokens, and rows of 4,096 tokens."""

USAGE_ERROR = 2
PROGRAMS = ("decode", "update", "memory")

class Gate(NamedTuple):
  """A number of a compiled program and the bound that it has to keep.

  Attributes:
    what: What is counted.
    value: The number.
    bound: The most that it may be, or the least if `is_least`.
    is_least: Whether the bound is the least value.
    is_of_one: Whether the bound is that of one device; several also launch their collectives.
  """

  what: str
  value: float
  bound: float
  is_least: bool = False
  is_of_one: bool = False

  @property
  def holds(self) -> bool:
    """Whether the number keeps the bound."""
    return self.value >= self.bound if self.is_least else self.value <= self.bound


def decode(plan: Plan) -> list[Gate]:
  """Returns the gates of a decoding step."""
  few_layers, more_layers = depths = sampler_proof.few_layers(plan.model)
  samplers = [sampler_proof.make_sampler(plan, layers) for layers in depths]
  few, more = (sampler_proof.loop_of_steps(plan, sampler, only_planned=False) for sampler in samplers)
  counts = [len(parse(each.launches).deepest().launches) for each in (few, more)]
  of_layer = (counts[1] - counts[0]) / (more_layers - few_layers)
  alone = sum(not launch.in_graph for launch in parse(few.launches).deepest().launches)
  rows = sampler_proof.rows_of(plan) // mesh_lib.num_row_shards(plan.sampler_mesh)
  vocabulary = plan.model.vocab_size // plan.sampler_mesh.shape["tensor"]
  keys = sampler_proof.local_shapes([block.k for block in samplers[0].loop.cache.blocks[0]])
  return [
    Gate("decode: kernels of a layer", of_layer, 19, is_of_one=True),
    Gate("decode: kernels of a step outside of the layers", counts[0] - few_layers * of_layer, 35, is_of_one=True),
    Gate("decode: launches of a step that are in no command buffer", alone, 2, is_of_one=True),
    Gate("decode: reads of all logits", len(operations.readers(few.text, rows * vocabulary)), 2),
    Gate("decode: neighbouring bytes of a stored key", hlo.stored_together(few.text, keys), 64, is_least=True),
  ]


def update(plan: Plan) -> list[Gate]:
  """Returns the gates of an update."""
  compiled = proof.update(plan).compiled
  loops = _all_loops(parse(compiled.launches))
  backward = _only(loop for loop in loops if any("flash_backward" in name for name in loop.names()))
  forward = _only(loop for loop in loops if loop is not backward and any("flash_forward" in name for name in loop.names()))
  head = f"{hlo.SHORT[plan.model.dtype]}[{plan.model.vocab_size // plan.mesh.shape['tensor']},{plan.model.d_model}]"
  return [
    Gate("update: kernels of a layer, forward", len(forward.launches), 26, is_of_one=True),
    Gate("update: kernels of a layer, backward", len(backward.launches), 76, is_of_one=True),
    Gate("update: casts of the head in the loops of its chunks", len(hlo.casts_in_loops(compiled.text, head, depth=2)), 0),
    # The micro-batches with the layers and the head, both ways, and the quantiles of all metrics.
    Gate("update: loops", len(loops) - 1, 6),
  ]


def memory(plan: Plan) -> list[Gate]:
  """Returns the memory of an update with each remat policy over what the run predicts."""
  gates = []
  for name in CHEAPEST:
    config = plan.config.copy_and_resolve_references()
    config.model.remat = name
    of_policy = proof.make_plan(config, plan.topology)
    compiled = proof.update(of_policy).compiled
    estimate = proof.estimate(of_policy)
    predicted = sum(estimate.held.values()) + sum(estimate.programs["update"].values())
    needed = compiled.arguments + compiled.outputs - compiled.aliased + compiled.temporaries
    gib = f"{needed / 2**30:.1f} GiB"
    gates.append(Gate(f"memory: update with remat={name}, {gib}, over the prediction", needed / predicted, 1.1))
  return gates


def _all_loops(loop: Loop) -> list[Loop]:
  return [loop, *(inside for each in loop.loops for inside in _all_loops(each))]


def _only(loops) -> Loop:
  (loop,) = loops
  return loop


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line and returns the exit code."""
  parser = argparse.ArgumentParser(prog="python -m experiments.compile_for_gpu", description=__doc__.splitlines()[0])
  parser.add_argument("--target", choices=("h100", "h200"), default="h200")
  parser.add_argument("--devices", type=int, default=1)
  parser.add_argument("--programs", default=",".join(PROGRAMS), help=f"some of {','.join(PROGRAMS)}")
  parser.add_argument("--json", type=Path, help="file for the numbers")
  args = parser.parse_args(argv)
  names = args.programs.split(",")
  try:
    if unknown := set(names) - set(PROGRAMS):
      raise ValueError(f"--programs: found {sorted(unknown)[0]!r}, expected some of {','.join(PROGRAMS)}")
    gpus.parse(f"{args.target}:{args.devices}")
    gpus.prepare()
    topology = gpus.describe(f"{args.target}:{args.devices}")
    plans = {name: make_plan(topology, attention="xla" if name == "decode" else "auto") for name in names}
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return USAGE_ERROR
  gates = []
  for name in names:
    for gate in {"decode": decode, "update": update, "memory": memory}[name](plans[name]):
      if gate.is_of_one and args.devices > 1:
        print(f"     {gate.what}: {gate.value:.4g}", flush=True)
        continue
      gates.append(gate)
      bound = f"{'at least' if gate.is_least else 'at most'} {gate.bound:g}"
      print(f"{'ok  ' if gate.holds else 'FAIL'} {gate.what}: {gate.value:.4g}, {bound}", flush=True)
  if args.json:
    args.json.write_text(json.dumps({gate.what: gate.value for gate in gates}, indent=1))
  return 0 if all(gate.holds for gate in gates) else 1


def make_plan(topology, *, attention: str) -> Plan:
  """Makes the programs for a topology.

  `attention` is that of whole rows: cuDNN, which a prefill of short prompts takes, needs a GPU.
  """
  fields = {field: [text] for field, text in (SIZES | {"model.attention": attention}).items()}
  config = command_line.override(command_line.load(CONFIG), fields)
  if problems := check.config_problems(config):
    raise ValueError("\n".join(problems))
  return proof.make_plan(config, topology)


if __name__ == "__main__":
  sys.exit(main())
