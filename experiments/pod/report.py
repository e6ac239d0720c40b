"""Reports on compiled programs, as tables for a terminal and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from experiments.pod import costs, packed
from experiments.pod import proof as limits
from experiments.pod.engine_proof import EnginePlan
from experiments.pod.proof import Plan, Proof
from experiments.pod.rl_step import Estimate
from experiments.pod.two_sides import MOST_LAG, Balance
from experiments.pod.weight_move import Move, Way

SETTINGS = (
  "lower config.learner.rows_per_device",
  "raise config.mesh.fsdp (more chips)",
  "set config.model.remat='full'",
)
"""Settings that lower the memory of an update."""

STATE_SETTINGS = (
  "set config.model.param_dtype='bfloat16'",
  "config.learner.moments_dtype='bfloat16'",
  "config.learner.offload_optimizer=True",
)
"""Settings that remain if no mesh is enough."""

SAMPLING_SETTINGS = (
  "lower config.rollout.slots",
  "set config.rollout.cache_dtype='int8'",
  "raise config.mesh.fsdp or tensor (more chips)",
)
"""Settings that lower the memory of prefill and decoding."""

ENGINE_SETTINGS = (
  "lower config.rollout.slots",
  "set config.rollout.cache_dtype='int8'",
  "raise config.mesh.sampler_expert or sampler_tensor",
)
"""Settings that lower the memory of an engine in a process of its own."""

_GB = 2.0**30


def tables(plan: Plan | EnginePlan, proofs: list[Proof]) -> Group:
  """Builds the tables of memory, time and traffic of the programs."""
  kinds = ("arguments", "temporaries", "outputs", "aliased", "code", "beside")
  unit = "chip" if plan.topology.devices_per_chip == 1 else "device"
  memory = _table("program", *kinds, "peak", "of HBM", "fits", title=f"GiB of each {unit}")
  for proof in proofs:
    compiled = proof.compiled
    sizes = (
      compiled.arguments,
      compiled.temporaries,
      compiled.outputs,
      -compiled.aliased,
      compiled.code,
      proof.beside,
      proof.peak,
    )
    part = proof.peak / plan.topology.chip.memory_bytes
    memory.add_row(
      proof.name,
      *(f"{x / _GB:.2f}" for x in sizes),
      f"{part:.0%}",
      "yes" if proof.fits(plan.topology) else "[bold red]no",
    )
  times = _table(
    "program", "TFLOP needed", "compiled", "ratio", "GB needed", "compiled", "GB sent", "compute s", "memory s", "network s", "step s",
    "bound by", "MFU at most", "compiled in s",
  )  # fmt: skip
  for proof in proofs:
    operations = proof.compiled.operations
    if operations is None:
      continue
    seconds = proof.seconds(plan.topology)
    worst = max(seconds, key=seconds.get)
    sent = sum(x.num_bytes for x in proof.compiled.traffic.values())
    times.add_row(
      proof.name,
      f"{(proof.work.flops + proof.work.repeated_flops) / 1e12:,.1f}",
      f"{operations.flops / 1e12:,.1f}",
      f"{proof.excess:.2f}",
      f"{proof.work.num_bytes / 1e9:,.1f}",
      f"{operations.num_bytes / 1e9:,.1f}",
      f"{sent / 1e9:,.2f}",
      *(f"{x:.4g}" for x in seconds.values()),
      f"{seconds[worst]:.4g}",
      worst,
      f"{proof.utilisation(plan.topology):.0%}",
      f"{proof.compiled.seconds:.0f}",
    )
  times.title = f"work of each {unit} in one run, and the least time for it"
  steps = [_steps(plan, proof) for proof in proofs if proof.name == "decode" and proof.compiled.operations]
  return Group(memory, times, *steps, _traffic(proofs), *_remarks(plan, proofs))


def _steps(plan: Plan | EnginePlan, proof: Proof) -> Table:
  """Builds a table of the time of a decoding step: its bounds, and its bound with latencies."""
  least, assumed, most = (each * 1e6 for each in costs.COLLECTIVE_S)
  table = _table(
    "bound by needed bytes", "by compiled bytes", "collectives", "their latency", "bound + latency",
    title=f"ms of a decoding step; {assumed:.0f} µs of latency per collective are an assumption ({least:.0f} to {most:.0f}), not measured",
  )  # fmt: skip
  bound, latencies = max(proof.seconds(plan.topology).values()), proof.latencies()
  ranges = (f"{x[1] * 1e3:.2f} ({x[0] * 1e3:.2f} to {x[2] * 1e3:.2f})" for x in (latencies, [bound + each for each in latencies]))
  table.add_row(f"{bound * 1e3:.2f}", f"{proof.compiled_seconds(plan.topology) * 1e3:.2f}", f"{proof.num_collectives:.0f}", *ranges)
  return table


def rl_steps(plan: Plan, estimates: Sequence[Estimate]) -> Table:
  """Builds a table of the least time of an RL step at lengths of several means."""
  parts = list(estimates[0].parts)
  table = _table(
    "mean length", "decoding steps", "rows busy", "ms a decoding step", "rows of updates", "padding", *(f"{name} s" for name in parts),
    "RL step s", "tokens/s", "tokens/s a chip", title="least time of an RL step; lengths are log-normal, cut at the budget",
  )  # fmt: skip
  for estimate in estimates:
    rate = estimate.rollouts.tokens / estimate.seconds
    table.add_row(
      f"{estimate.mean:,.0f}",
      f"{estimate.rollouts.steps:,}",
      f"{estimate.rollouts.busy:.0%}",
      f"{estimate.step_s * 1e3:.2f}",
      ", ".join(map(str, sorted({update.bucket for update in estimate.updates}))),
      f"{packed.padding(estimate.updates):.0%}",
      *(f"{estimate.parts[name]:,.0f}" for name in parts),
      f"{estimate.seconds:,.0f}",
      f"{rate:,.0f}",
      f"{rate / plan.mesh.size:,.0f}",
    )
  return table


def moves(num_bytes: float, ways: Sequence[Way]) -> Table:
  """Builds a table of the time of a move of weights, by the way that they take."""
  title = f"least time of a move of {num_bytes / 1e9:.1f} GB of weights, in s"
  table = _table("what", "limits", *(name.replace("_", " ") for name in Move._fields), "at once", "one by one", "bound by", title=title)
  for way in ways:
    move = way.move
    table.add_row(way.name, way.limits, *(f"{x:.3g}" for x in (*move, move.seconds, move.one_by_one)), move.bound_by.replace("_", " "))
  return table


def balances(own: EnginePlan, balances: Sequence[Balance]) -> Group:
  """Builds tables of the rates of a learner and engines apart, and of the least lags."""
  rates = _table(
    "mean length", "ms a decoding step", "a batch is drawn in s", "learned in s", "longest response s", "tokens/s drawn", "learned",
    title="least times of the batch of an RL step, all rows busy; lengths are log-normal, cut at the budget",
  )  # fmt: skip
  lags = _table("what", *(f"{x.mean:,.0f}" for x in balances), title="least lag at which an RL step takes as long as the slower side")
  for x in balances:
    seconds = (f"{x.step_s * 1e3:.2f}", *(f"{each:,.1f}" for each in (x.drawing_s, x.learning_s, x.longest_s)))
    rates.add_row(f"{x.mean:,.0f}", *seconds, *(f"{x.tokens / each:,.0f}" if each else "" for each in (x.drawing_s, x.learning_s)))
  for name in balances[0].lags:
    lags.add_row(name, *(str(x.lags[name] if x.lags[name] is not None else f"above {MOST_LAG}") for x in balances))
  return Group(rates, lags, Text(f"{own.rows * own.num_engines} rows of {own.num_engines} engine(s)"))


def _table(*columns: str, title: str = "") -> Table:
  table = Table(title=title, title_justify="left")
  for column in columns:
    table.add_column(column, justify="left" if column in ("program", "kind", "mesh axes", "bound by", "what") else "right")
  return table


def _traffic(proofs: list[Proof]) -> Table:
  table = _table("program", "kind", "mesh axes", "times", "GB a chip", "seconds", title="collectives, loops included")
  for proof in proofs:
    for (kind, axes), x in sorted(proof.compiled.traffic.items(), key=lambda item: -item[1].seconds):
      if x.num_bytes >= 1e6:
        table.add_row(proof.name, kind, axes, f"{x.times:,.0f}", f"{x.num_bytes / 1e9:,.3f}", f"{x.seconds:.4g}")
  return table


def _remarks(plan: Plan | EnginePlan, proofs: list[Proof]) -> list[Text | Table]:
  lines = [f"{proof.name}: {proof.note}" for proof in proofs if proof.note]
  of_arguments = lambda proof: ", ".join(f"{name} {size / _GB:.2f}" for name, size in proof.parts.items())
  lines += [f"{proof.name}: of the arguments, in GiB: {of_arguments(proof)}" for proof in proofs]
  lines += [f"{proof.name}: {_of_operations(proof)}" for proof in proofs if proof.compiled.operations]
  if plan.only_planned:
    lines.append("memory, collectives and operations are as the compiler planned them, before it generated machine code")
  per_chip = plan.topology.devices_per_chip
  chips = f"{plan.mesh.size // per_chip} chips of {plan.topology.chip.kind} ({plan.topology.slices} x {plan.topology.name})"
  chips += f" of {per_chip} devices each" if per_chip > 1 else ""
  bad = [proof for proof in proofs if not proof.fits(plan.topology)]
  verdict = f"{plan.config.model.preset} fits {chips}" if not bad else f"{plan.config.model.preset} does not fit {chips}"
  remarks: list[Text | Table] = [Text("\n".join(lines))]
  for proof in bad:
    settings = ENGINE_SETTINGS
    if isinstance(plan, Plan):
      remarks.append(memory_parts(plan, proof))
      settings = SETTINGS if proof.name in ("update", "score", "snapshot") else SAMPLING_SETTINGS
    remarks.append(Text(f"{proof.name}: to lower it, {', or '.join(settings)}"))
  heavy = [proof for proof in proofs if proof.name == "decode" and proof.excess_bytes > limits.MOST_BYTES]
  remarks += [Text(f"{proof.name}: {_traffic_waste(proof)}", style="bold red") for proof in heavy]
  remarks.append(Text(verdict, style="bold green" if not bad else "bold red"))
  return [*remarks, *(Text(f"{proof.name}: {_waste(proof)}", style="bold red") for proof in proofs if proof.is_wasteful)]


def _of_operations(proof: Proof) -> str:
  """Lists the operations of a compiled program by kind, and the kernels that are not counted."""
  operations = proof.compiled.operations
  kinds = sorted(operations.by_kind.items(), key=lambda item: -item[1])
  text = "compiled TFLOP: " + ", ".join(f"{name} {flops / 1e12:,.1f}" for name, flops in kinds if flops)
  return text + (f"; not counted: the unknown kernels {', '.join(operations.unknown)}" if operations.unknown else "")


def _waste(proof: Proof) -> str:
  """Says that a program is compiled to more operations than it needs."""
  return f"compiled to {proof.excess:.2f} times the operations that it needs, expected at most {limits.MOST_OPERATIONS}"


def _traffic_waste(proof: Proof) -> str:
  """Says that a decoding step is compiled to move more bytes than it needs."""
  return f"compiled to move {proof.excess_bytes:.2f} times the bytes that it needs, which is above {limits.MOST_BYTES}"


def memory_parts(plan: Plan, proof: Proof) -> Table:
  """Builds a table of the estimated parts of a program's memory."""
  estimate = limits.estimate(plan)
  of_program = {"update": "update", "score": "logprobs"}.get(proof.name, "sampling")
  table = _table("what", "GiB", title=f"{proof.name}: parts of the memory (estimated)")
  for name, size in {**estimate.held, **estimate.programs.get(of_program, {})}.items():
    table.add_row(name, f"{size / _GB:.2f}")
  table.add_row("available", f"{plan.topology.chip.memory_bytes / _GB:.2f}")
  return table


def as_json(plan: Plan, proofs: list[Proof], estimates: Sequence[Estimate] = ()) -> dict[str, Any]:
  """Returns the numbers of the tables, in bytes and seconds."""
  numbers = {
    "topology": plan.topology.name,
    "slices": plan.topology.slices,
    "chips": plan.mesh.size,
    "mesh": dict(plan.mesh.shape),
  }
  numbers |= {
    "model": plan.config.model.preset,
    "rows_per_device": plan.config.learner.rows_per_device,
    "row_buckets": list(plan.config.learner.row_buckets),
    "only_planned": plan.only_planned,
  }
  numbers |= proofs_as_json(plan, proofs)
  if estimates:
    numbers["rl_steps"] = [
      {
        "mean": x.mean, **x.rollouts._asdict(), "step_s": x.step_s, "rows": [update.rows for update in x.updates],
        "buckets": [update.bucket for update in x.updates], "padding": packed.padding(x.updates), "parts": x.parts, "seconds": x.seconds,
      }
      for x in estimates
    ]  # fmt: skip
  return numbers


def proofs_as_json(plan: Plan | EnginePlan, proofs: Sequence[Proof]) -> dict[str, Any]:
  """Returns the numbers of programs, by their names."""
  numbers = {}
  for proof in proofs:
    compiled = proof.compiled
    sizes = {
      name: getattr(compiled, name)
      for name in ("arguments", "temporaries", "outputs", "aliased", "code", "seconds", "refused")
    }
    traffic = {
      f"{kind} over {axes}": {"seconds": x.seconds, "bytes": x.num_bytes, "times": x.times}
      for (kind, axes), x in compiled.traffic.items()
    }
    numbers[proof.name] = {
      **sizes,
      "parts": proof.parts,
      "beside": proof.beside,
      "peak": proof.peak,
      "fits": proof.fits(plan.topology),
      "work": proof.work._asdict(),
      "operations": compiled.operations and compiled.operations._asdict(),
      "excess": proof.excess,
      "bounds": proof.seconds(plan.topology),
      "compiled_bound": proof.compiled_seconds(plan.topology),
      "latencies": proof.latencies(),
      "num_collectives": proof.num_collectives,
      "mfu_ceiling": proof.utilisation(plan.topology),
      "collectives": traffic,
      "note": proof.note,
    }
  return numbers


def samplers_as_json(plan: EnginePlan, proofs: Sequence[Proof], num_bytes: float, ways: Sequence[Way]) -> dict[str, Any]:
  """Returns the numbers of the samplers' programs, and of the moves of weights to them."""
  sizes = {"rows": plan.rows, "engines": plan.num_engines, "hosts_of_engine": plan.num_hosts, "chips_of_engine": plan.mesh.size}
  listed = [{"name": x.name, "limits": x.limits, **x.move._asdict(), "seconds": x.move.seconds} for x in ways]
  return {"sampler": sizes | proofs_as_json(plan, proofs), "weight_bytes": num_bytes, "weight_moves": listed}


def show(renderable: Any) -> None:
  """Prints something, as wide as necessary if the output is not a terminal."""
  console = Console()
  (console if console.is_terminal else Console(width=180)).print(renderable)
