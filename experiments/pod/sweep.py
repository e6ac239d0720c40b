"""Search over mesh shapes and rows per device for an update.

An estimate of the memory prunes the settings, and the compiler plans the most promising ones. Given
only a generation of chips, the search tries slices from the smallest on until one fits.
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
from experiments.pod.proof import with_rows
from experiments.pod.topology import Topology
from jaxrl_llm.config import policy
from jaxrl_llm.config.check import row_problems
from jaxrl_llm.config.policy import make_objective
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner.memory import footprint
from jaxrl_llm.learner.needs import fields_needed
from jaxrl_llm.models import ModelConfig

COMPILED = 4
"""Number of settings per slice that the compiler plans."""

# Limits of the estimate over the memory. Plans needed 0.8 to 1.0 of the estimate, and the compiler
# can still compress those that are close.
_LIKELY, _POSSIBLE = 1.05, 1.35
_MOST = 8  # Maximum size of an axis other than fsdp.


class Candidate(NamedTuple):
  """Setting to try.

  Attributes:
    config: Config with the mesh, the rows per device and their buckets.
    memory: Estimated memory of a chip, in bytes.
    seconds: Estimated least time of an update, in s.
    in_turn: Estimated least time of an update without any overlap, in s. It distinguishes settings
      that have the same bound.
  """

  config: ConfigDict
  memory: float
  seconds: float
  in_turn: float = 0.0


def run(config: ConfigDict, name: str, arguments: Sequence[str], *, slices: int = 1, write_to: str = "") -> int:
  """Tries settings, prints a table and recommends one.

  Args:
    config: Checked config.
    name: Topology, or a generation to try its slices from the smallest on.
    arguments: Command line that makes the config, without mesh and rows per device.
    slices: Number of slices.
    write_to: File for the plans' numbers; empty for none.

  Returns:
    The exit code, 1 if no setting fits.
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
    print(f"no setting fits; to lower the memory: {', or '.join(report.STATE_SETTINGS)}")
    return 1
  # Among settings with the same bound, the one with the least other work.
  best = min(fitting, key=lambda numbers: (_step(numbers)[1], sum(numbers["update"]["bounds"].values())))
  print(f"recommended: --topology={best['topology']} {flags(best['mesh'], best['rows_per_device'])}")
  return 0


def best_of(settings: Iterator[Candidate], topology: Topology) -> list[Candidate]:
  """Selects the settings to plan: the fastest that will fit, then the smallest that may fit."""
  memory, every = topology.chip.memory_bytes, sorted(settings, key=lambda x: x.memory)
  likely = sorted((x for x in every if x.memory <= _LIKELY * memory), key=lambda x: (x.seconds, x.in_turn))
  possible = [x for x in every if _LIKELY * memory < x.memory <= _POSSIBLE * memory]
  smallest = f"; the smallest: {describe(every[0].config)}, {every[0].memory / 2**30:.1f} GiB a chip" if every else ""
  print(
    f"{topology.name}: {len(every)} settings, {len(likely)} fit by the estimate, {len(possible)} may{smallest}",
    flush=True,
  )
  # Half of the plans aim at speed and half at room, because the estimate is not exact.
  fast = likely[: COMPILED // 2]
  room = [x for x in every if x.memory <= _POSSIBLE * memory and not any(x is y for y in fast)]
  return (fast + room)[:COMPILED]


def _plan(settings: Sequence[Candidate], topology: Topology, arguments: Sequence[str]) -> list[dict[str, Any]]:
  """Returns the compiler's numbers of each setting, as in `report.as_json`, and the estimate."""
  plans = []
  for setting in settings:
    with tempfile.TemporaryDirectory() as folder:
      # Each in a process of its own: the compiler goes on generating unneeded machine code until
      # the process ends.
      out = Path(folder) / "out.json"
      mesh = {axis: setting.config.mesh[axis] for axis in mesh_lib.AXES}
      setting_flags = flags(mesh, setting.config.learner.rows_per_device).split()
      command = [sys.executable, "-m", "experiments.compile_for_pod", *arguments, *setting_flags]
      command += [
        f"--topology={topology.name}",
        f"--slices={topology.slices}",
        "--programs=update",
        "--only_plan",
        f"--json={out}",
      ]
      result = subprocess.run(command, capture_output=True, text=True)
      if not out.exists():
        raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr[-2000:]}")
      numbers = json.loads(out.read_text())
    fits = "fits" if numbers["update"]["fits"] else "does not fit"
    print(f"  {describe(setting.config)}: {numbers['update']['peak'] / 2**30:.1f} GiB a chip, {fits}", flush=True)
    plans.append({**numbers, "estimated": setting.memory, "memory_bytes": topology.chip.memory_bytes})
  return plans


def _step(numbers: dict[str, Any]) -> tuple[str, float]:
  """Returns what bounds an update, and its seconds."""
  bounds = numbers["update"]["bounds"]
  worst = max(bounds, key=bounds.get)
  return worst, bounds[worst]


def _table(tried: Sequence[dict[str, Any]]) -> Table:
  table = Table(title="updates as planned by the compiler")
  for column in ("slice", "mesh and rows per device", "peak GiB", "of", "estimated GiB", "step s", "bound by", "MFU at most", "fits"):
    table.add_column(column)
  for numbers in tried:
    update, (worst, seconds) = numbers["update"], _step(numbers)
    sizes = (f"{x / 2**30:.1f}" for x in (update["peak"], numbers["memory_bytes"], numbers["estimated"]))
    # A refused setting has no program, and therefore no collectives to count.
    times = ("-", "-", "-") if update["refused"] else (f"{seconds:.3g}", worst, f"{update['mfu_ceiling']:.0%}")
    where = f"{numbers['slices']} x {numbers['topology']}" if numbers["slices"] > 1 else numbers["topology"]
    table.add_row(
      where,
      spell(numbers["mesh"], numbers["rows_per_device"]),
      *sizes,
      *times,
      "yes" if update["fits"] else "no",
    )
  return table


def describe(config: ConfigDict) -> str:
  """Describes the axes that are larger than 1, and the rows per device."""
  return spell({axis: config.mesh[axis] for axis in mesh_lib.AXES}, config.learner.rows_per_device)


def spell(mesh: dict[str, int], rows_per_device: int) -> str:
  """Describes a mesh and the number of rows that a device takes at a time.

  Example:
    >>> spell({"data": 1, "fsdp": 16, "expert": 4}, 2)
    'fsdp 16 x expert 4, 2 rows per device'
  """
  axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size != 1)
  return f"{axes or 'one chip'}, {rows_per_device} row{'s' if rows_per_device > 1 else ''} per device"


def flags(mesh: dict[str, int], rows_per_device: int) -> str:
  """Formats a mesh and the rows per device as flags of the command line."""
  return " ".join(
    [
      *(f"--config.mesh.{axis}={size}" for axis, size in mesh.items()),
      f"--config.learner.rows_per_device={rows_per_device}",
    ]
  )


def candidates(config: ConfigDict, topology: Topology) -> Iterator[Candidate]:
  """Yields all settings that satisfy the divisibility rules."""
  model = policy.model_config(config, vocab_size=264)
  chips = len(topology.devices)
  for sizes in shapes(model, chips // topology.slices):
    changed = config.copy_and_resolve_references()
    changed.mesh.update({**sizes, "data": topology.slices})
    shards = topology.slices * sizes["fsdp"] * sizes["expert"]
    # If the slots of a row are split, two rows at a time need no trial.
    for rows_per_device in (1, 2) if sizes["context"] == 1 else (1,):
      setting = changed.copy_and_resolve_references()
      setting.learner.rows_per_device = rows_per_device
      if not list(row_problems(setting, shards, shards, context=sizes["context"])):
        yield estimate(setting, model, topology)


def shapes(model: ModelConfig, chips: int) -> Iterator[dict[str, int]]:
  """Yields sizes of fsdp, expert, context and tensor that fit a slice and divide the model.

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
        fits = (
          not left
          and fsdp
          and model.d_model % fsdp == 0
          and (model.experts is None or model.experts.num_experts % expert == 0)
        )
        if (
          fits
          and tensor * expert * context <= 2 * _MOST
          and model.num_heads % tensor == 0
          and model.vocab_size % tensor == 0
        ):
          yield {"fsdp": fsdp, "expert": expert, "context": context, "tensor": tensor}


def estimate(config: ConfigDict, model: ModelConfig, topology: Topology) -> Candidate:
  """Estimates the memory and the time of a setting.

  The memory comes from `jaxrl_llm.learner.memory`, and the time from the operations and from the
  weights and tokens that every layer communicates.
  """
  mesh, sampler_mesh = mesh_lib.make_meshes(**config.mesh, devices=topology.devices)
  config = with_rows(config, model, mesh)
  objective = make_objective(config)
  needs = fields_needed(config, objective)
  memory_parts = footprint(config, model, mesh, sampler_mesh, objective, needs=needs)
  memory = sum(memory_parts.held.values()) + sum(memory_parts.programs["update"].values())
  rows = max(config.learner.row_buckets)
  micro = costs.micro_batches(config, mesh, rows)
  work = costs.rows_pass(config, model, mesh, rows=rows, backward=True)
  chip, size = topology.chip, mesh.shape
  # A mesh axis is assumed to use half of a chip's wires.
  wires = 2 * len(topology.shape) * chip.wire_bytes_per_s / 2
  # Weights travel twice in bfloat16, and gradients once in float32.
  weights = costs.weights_on_chip(model, mesh) * (2 * 2 + 4) * micro * (size["fsdp"] > 1)
  tokens = (
    rows
    / mesh_lib.num_row_shards(mesh)
    / size["context"]
    * config.learner.row_tokens
    * model.d_model
    * 2
    * model.num_layers
  )
  exchanged = tokens * (6 * (size["expert"] - 1 if model.experts else 0) + 8 * (size["tensor"] > 1) + (size["context"] > 1))
  network = (weights + exchanged) / wires
  bounds = (work.flops / chip.flops_per_s, network, work.num_bytes / chip.bytes_per_s)
  return Candidate(config, memory, max(bounds), sum(bounds))
