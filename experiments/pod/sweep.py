"""Mesh shapes and micro-batches for an update: pruned by an estimate of memory, the most promising ones planned by the compiler.

Of a generation of chips alone, slices are tried from the smallest on, until one fits.
"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict
from rich.table import Table

from experiments.pod import costs, report
from experiments.pod import topology as topologies
from experiments.pod.topology import Topology
from jaxrl_llm.config import policy
from jaxrl_llm.config.check import row_problems
from jaxrl_llm.config.policy import make_objective
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner.memory import footprint
from jaxrl_llm.learner.needs import fields_needed
from jaxrl_llm.models import ModelConfig

COMPILED = 4
"""How many settings of a slice the compiler plans."""

_LIKELY, _POSSIBLE = 1.05, 1.35  # Estimate to memory: plans came out at 0.8 to 1.0 of it, and the compiler can still squeeze what is close.
_MOST = 8  # Size of an axis besides fsdp.


class Candidate(NamedTuple):
  """One setting.

  Attributes:
    config: with the mesh and the micro-batches.
    memory: bytes of a chip, estimated.
    seconds: of an update at the least, estimated.
    in_turn: the same if nothing went on beside anything else: what tells settings apart that are bound by the same thing.
  """

  config: ConfigDict
  memory: float
  seconds: float
  in_turn: float = 0.0


def run(config: ConfigDict, name: str, arguments: Sequence[str], *, slices: int = 1, write_to: str = "") -> int:
  """Tries settings, prints a table, and recommends one; 1 where none fits.

  Args:
    config: checked.
    name: a topology, or a generation for its smallest slice that fits.
    arguments: of a command line that makes the config, without meshes and micro-batches.
    slices: of the topology.
    write_to: a file for the plans' numbers; none where empty.
  """
  tried: list[dict[str, Any]] = []
  for each in [name] if ":" in name else topologies.slices_of(name):
    topology = topologies.describe(each, slices=slices)
    tried += (planned := _plan(best_of(candidates(config, topology), topology), topology, arguments))
    if any(numbers["update"]["fits"] for numbers in planned):
      break
  if tried:
    report.show(_table(tried))
  if write_to:
    Path(write_to).write_text(json.dumps(tried, indent=1))
  fitting = [numbers for numbers in tried if numbers["update"]["fits"]]
  if not fitting:
    print(f"none fits; to lower the memory: {', or '.join(report.STATE_SETTINGS)}")
    return 1
  # Of several that are bound by the same thing, the one with the least to do besides.
  best = min(fitting, key=lambda numbers: (_step(numbers)[1], sum(numbers["update"]["bounds"].values())))
  print(f"recommended: --topology={best['topology']} {flags(best['mesh'], best['micro_batches'])}")
  return 0


def best_of(found: Iterator[Candidate], topology: Topology) -> list[Candidate]:
  """What is worth a plan, best first: the fastest of those that will fit, then the smallest of those that may."""
  memory, every = topology.chip.memory_bytes, sorted(found, key=lambda x: x.memory)
  likely = sorted((x for x in every if x.memory <= _LIKELY * memory), key=lambda x: (x.seconds, x.in_turn))
  possible = [x for x in every if _LIKELY * memory < x.memory <= _POSSIBLE * memory]
  smallest = f"; the smallest: {describe(every[0].config)}, {every[0].memory / 2**30:.1f} GiB a chip" if every else ""
  print(f"{topology.name}: {len(every)} settings, {len(likely)} fit by the estimate, {len(possible)} may{smallest}", flush=True)
  # Half of the plans for speed, half for room: the estimate is not exact.
  fast = likely[: COMPILED // 2]
  room = [x for x in every if x.memory <= _POSSIBLE * memory and not any(x is y for y in fast)]
  return (fast + room)[:COMPILED]


def _plan(settings: Sequence[Candidate], topology: Topology, arguments: Sequence[str]) -> list[dict[str, Any]]:
  """The compiler's numbers of each, as `report.as_json` has them, and the estimate beside them."""
  found = []
  for setting in settings:
    with tempfile.TemporaryDirectory() as folder:
      # A process each: the compiler goes on with machine code that nobody waits for until the process ends.
      out = Path(folder) / "out.json"
      mesh = {axis: setting.config.mesh[axis] for axis in mesh_lib.AXES}
      setting_flags = flags(mesh, setting.config.learner.micro_batches).split()
      command = [sys.executable, "-m", "experiments.compile_for_pod", *arguments, *setting_flags]
      command += [f"--topology={topology.name}", f"--slices={topology.slices}", "--programs=update", "--only_plan", f"--json={out}"]
      result = subprocess.run(command, capture_output=True, text=True)
      if not out.exists():
        raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr[-2000:]}")
      numbers = json.loads(out.read_text())
    fits = "fits" if numbers["update"]["fits"] else "does not fit"
    print(f"  {describe(setting.config)}: {numbers['update']['peak'] / 2**30:.1f} GiB a chip, {fits}", flush=True)
    found.append({**numbers, "estimated": setting.memory, "memory_bytes": topology.chip.memory_bytes})
  return found


def _step(numbers: dict[str, Any]) -> tuple[str, float]:
  """What bounds an update, and its seconds."""
  bounds = numbers["update"]["bounds"]
  worst = max(bounds, key=bounds.get)
  return worst, bounds[worst]


def _table(tried: Sequence[dict[str, Any]]) -> Table:
  table = Table(title="updates as the compiler plans them")
  for column in ("slice", "mesh and micro-batches", "peak GiB", "of", "estimated GiB", "step s", "bound by", "MFU at most", "fits"):
    table.add_column(column)
  for numbers in tried:
    update, (worst, seconds) = numbers["update"], _step(numbers)
    sizes = (f"{x / 2**30:.1f}" for x in (update["peak"], numbers["memory_bytes"], numbers["estimated"]))
    # What the compiler refuses has no program, so nothing to count sends between chips.
    times = ("-", "-", "-") if update["refused"] else (f"{seconds:.3g}", worst, f"{update['mfu_ceiling']:.0%}")
    where = f"{numbers['slices']} x {numbers['topology']}" if numbers["slices"] > 1 else numbers["topology"]
    table.add_row(where, spell(numbers["mesh"], numbers["micro_batches"]), *sizes, *times, "yes" if update["fits"] else "no")
  return table


def describe(config: ConfigDict) -> str:
  """The axes that are larger than 1, and the micro-batches."""
  return spell({axis: config.mesh[axis] for axis in mesh_lib.AXES}, config.learner.micro_batches)


def spell(mesh: dict[str, int], micro_batches: int) -> str:
  """As `describe`.

  Example:
    >>> spell({"data": 1, "fsdp": 16, "expert": 4}, 8)
    'fsdp 16 x expert 4, 8 micro-batches'
  """
  axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size != 1)
  return f"{axes or 'one chip'}, {micro_batches} micro-batches"


def flags(mesh: dict[str, int], micro_batches: int) -> str:
  """The same for a command line."""
  return " ".join([*(f"--config.mesh.{axis}={size}" for axis, size in mesh.items()), f"--config.learner.micro_batches={micro_batches}"])


def candidates(config: ConfigDict, topology: Topology) -> Iterator[Candidate]:
  """All settings that divide what they must."""
  model = policy.model_config(config, vocab_size=264)
  rows, chips = max(config.learner.row_buckets), len(topology.devices)
  for sizes in shapes(model, chips // topology.slices):
    changed = config.copy_and_resolve_references()
    changed.mesh.update({**sizes, "data": topology.slices})
    shards = topology.slices * sizes["fsdp"] * sizes["expert"]
    for rows_at_once in (1, 2):
      if rows % (shards * rows_at_once) or (rows_at_once > 1 and sizes["context"] > 1):
        continue
      setting = changed.copy_and_resolve_references()
      setting.learner.micro_batches = rows // shards // rows_at_once
      if not list(row_problems(setting, shards, shards, context=sizes["context"])):
        yield estimate(setting, model, topology)


def shapes(model: ModelConfig, chips: int) -> Iterator[dict[str, int]]:
  """Sizes of fsdp, expert, context and tensor that make up the chips of a slice and divide the model.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> [sizes["tensor"] for sizes in shapes(preset("qwen3-0.6b"), 2)]
    [1, 1, 2]
  """
  powers = lambda most: [2**i for i in range(int(math.log2(max(most, 1))) + 1)]
  for tensor in powers(min(model.num_kv_heads, _MOST)):
    for expert in powers(_MOST) if model.experts else (1,):
      for context in powers(_MOST):
        fsdp, left = divmod(chips, tensor * expert * context)
        fits = not left and fsdp and model.d_model % fsdp == 0 and (model.experts is None or model.experts.num_experts % expert == 0)
        if fits and tensor * expert * context <= 2 * _MOST and model.num_heads % tensor == 0 and model.vocab_size % tensor == 0:
          yield {"fsdp": fsdp, "expert": expert, "context": context, "tensor": tensor}


def estimate(config: ConfigDict, model: ModelConfig, topology: Topology) -> Candidate:
  """Memory by `jaxrl_llm.learner.memory`; time from operations, and from the weights and tokens that travel in every layer."""
  mesh, sampler_mesh = mesh_lib.make_meshes(**config.mesh, devices=topology.devices)
  objective = make_objective(config)
  needs = fields_needed(config, objective)
  found = footprint(config, model, mesh, sampler_mesh, objective, needs=needs)
  memory = sum(found.held.values()) + sum(found.programs["update"].values())
  rows, micro = max(config.learner.row_buckets), config.learner.micro_batches
  work = costs.rows_pass(config, model, mesh, rows=rows, backward=True)
  chip, size = topology.chip, mesh.shape
  wires = 2 * len(topology.shape) * chip.wire_bytes_per_s / 2  # Of a mesh axis perhaps half of a chip's wires.
  weights = costs.weights_on_chip(model, mesh) * (2 * 2 + 4) * micro * (size["fsdp"] > 1)  # Twice in bfloat16, gradients in float32.
  tokens = rows / mesh_lib.num_row_shards(mesh) / size["context"] * config.learner.row_tokens * model.d_model * 2 * model.num_layers
  exchanged = tokens * (6 * (size["expert"] - 1 if model.experts else 0) + 8 * (size["tensor"] > 1) + (size["context"] > 1))
  network = (weights + exchanged) / wires
  bounds = (work.flops / chip.flops_per_s, network, work.num_bytes / chip.bytes_per_s)
  return Candidate(config, memory, max(bounds), sum(bounds))
