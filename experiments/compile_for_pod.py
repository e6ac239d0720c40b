"""`python -m experiments.compile_for_pod --config=FILE[:ARGUMENT] --topology=v5p:4x4x4 ...`

Compiles the programs of a run for remote TPUs or GPUs, with their compilers but none of them:
update, scoring, vision tower, prefill and one decoding step, as the run itself compiles them.
Prints memory by kind, operations and bytes as needed and as compiled, collectives, what bounds the
time, and an assumed latency of a step's collectives.

  --config         the experiment, as in configs/gspo.py:qwen3-30b-a3b
  --config.FIELD   another value for one field, as in --config.mesh.expert=8
  --topology       one slice: v5e:4x4, v5p:4x4x4, v6e:8x16, tpu7x:4x4x4 ...; or GPUs: rtx4090:1,
                   a100:1, h100:1, h200:8, h200:64 (docs/pod_plans.md has their compiler and limits)
  --sampler        slice of the samplers, as in v5p:4x4x4, if config.rollout.samplers is above 0:
                   each of its hosts runs `jaxrl_llm.cli.join`. Each has an engine if its chips hold
                   the weights, else they have one together; the time of a move of weights, too
  --slices         number of slices joined by a network; the data axis crosses them
  --programs       some of update, score, tower, prefill, decode; with --sampler also snapshot (the
                   learner copies the weights), take (an engine does), copy (an engine copies rows)
                   and drain (the sampler draws a batch at a time in the place of the engine).
                   Default: all of the run, which does not drain there
  --only_plan      stop each program at the compiler's plan of memory and collectives, which saves
                   minutes of generating machine code
  --sweep          try mesh shapes and numbers of rows per device for the update, and recommend the
                   best; with --topology=v6e, of the smallest slice of that generation that fits
  --lengths        mean lengths of responses, as in 2048,8192: least time of an RL step with
                   log-normal lengths; needs the program decode. With --sampler, the rates of both
                   sides, and the lag at which none waits for the other
  --prompt_tokens  tokens of each prompt in the packed rows, for --lengths. Default: as many as the
                   largest of rollout.prompt_buckets
  --json           file for the numbers
Flags of XLA are those of a run on these chips, with the changes in JAXRL_LLM_XLA_FLAGS; see
jaxrl_llm/devices/xla_flags.py.
Exit code: 0 if all programs fit, 1 if one does not, or if an update or a scoring is compiled to
more than 1.1 times the operations that it needs, 2 for bad input.
"""

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.pod import gpus
from experiments.pod import topology as topologies
from jaxrl_llm.config import check, command_line, sizes
from jaxrl_llm.config.command_line import UsageError
from jaxrl_llm.config.fields import flatten

DOES_NOT_FIT = 1
USAGE_ERROR = 2
PROGRAMS = ("update", "score", "tower", "prefill", "decode")
APART = ("snapshot", "take", "copy")
"""Further programs of a run with samplers in processes of their own."""

DRAIN = "drain"
"""Program that draws a batch on the samplers' slice as a learner that draws by itself does."""

FLAGS = {"topology": "", "slices": "1", "sampler": ""}
FLAGS |= dict.fromkeys(("programs", "only_plan", "sweep", "lengths", "prompt_tokens", "json"), "")
OF_TPUS = ("slices", "sampler", "only_plan", "sweep")
"""Flags that have no effect with GPUs."""


def main(argv: Sequence[str]) -> int:
  """Runs the command line and returns the exit code."""
  if {"-h", "--help"} & set(argv):
    print(__doc__)
    return 0
  try:
    config, flags = parse(argv)
    (gpus if gpus.are_named(flags["topology"]) else topologies).prepare()
    return run(config, flags)
  except (UsageError, ValueError) as error:
    for line in str(error).splitlines():
      print(f"error: {line}", file=sys.stderr)
    return USAGE_ERROR


def parse(argv: Sequence[str]) -> tuple[Any, dict[str, Any]]:
  """Parses the config and the other flags without starting JAX.

  Raises:
    UsageError: If a flag, a file, a field or a value does not exist.
    ValueError: If the topology does not exist.
  """
  path, overrides, rest = command_line.split(argv)
  flags: dict[str, Any] = dict(FLAGS)
  for argument in rest:
    match = re.fullmatch(r"--?(\w+)(?:=(.*))?", argument)
    if not match or match.group(1) not in FLAGS:
      raise UsageError(
        f"unknown argument {argument!r}, expected --config, --config.FIELD or "
        f"{', '.join(f'--{name}' for name in FLAGS)}"
      )
    flags[match.group(1)] = "true" if match.group(2) is None else match.group(2)
  for name in ("config", "topology"):
    if not (path if name == "config" else flags[name]):
      raise UsageError(
        f"--{name} is missing, expected one as in --config=configs/gspo.py:qwen3-30b-a3b --topology=v5p:4x4x4"
      )
  flags["topology"] = flags["topology"].lower()
  if gpus.are_named(flags["topology"]):
    gpus.parse(flags["topology"])
    if given := [name for name in OF_TPUS if flags[name] != FLAGS[name]]:
      raise UsageError(f"--{given[0]}: found {flags[given[0]]!r} with GPUs, expected none: it is about slices of TPUs")
  elif not (flags["sweep"] and flags["topology"] in topologies.GENERATIONS):
    topologies.parse(flags["topology"])
  if not flags["slices"].isdigit() or int(flags["slices"]) < 1:
    raise UsageError(f"--slices: found {flags['slices']!r}, expected 1 or more")
  flags["slices"], flags["sampler"] = int(flags["slices"]), flags["sampler"].lower()
  known = PROGRAMS + (APART if flags["sampler"] else ())
  flags["programs"] = tuple(flags["programs"].split(",")) if flags["programs"] else known
  named = (*known, *([DRAIN] if flags["sampler"] else []))
  if unknown := set(flags["programs"]) - set(named):
    raise UsageError(f"--programs: found {sorted(unknown)[0]!r}, expected some of {','.join(named)}")
  if flags["sampler"]:
    _check_sampler(flags)
  if not re.fullmatch(r"(\d+(,\d+)*)?", flags["lengths"]):
    raise UsageError(f"--lengths: found {flags['lengths']!r}, expected mean lengths separated by commas, as in 2048,8192")
  if flags["lengths"] and "decode" not in flags["programs"]:
    raise UsageError("--lengths: found without the program decode, expected --programs to name it")
  flags["lengths"] = tuple(int(mean) for mean in flags["lengths"].split(",") if mean)
  if flags["prompt_tokens"] and not (flags["prompt_tokens"].isdecimal() and int(flags["prompt_tokens"]) and flags["lengths"]):
    raise UsageError(f"--prompt_tokens: found {flags['prompt_tokens']!r}, expected a number of tokens, together with --lengths")
  flags["prompt_tokens"] = int(flags["prompt_tokens"] or 0) or None
  config = command_line.override(command_line.load(path), overrides)
  kept = {
    field: texts
    for field, texts in overrides.items()
    if not field.startswith("mesh.") and field != "learner.rows_per_device"
  }
  flags["of_sweep"] = [
    f"--config={path}", *(f"--config.{field}={text}" for field, texts in kept.items() for text in texts)
  ]
  if bool(flags["sampler"]) != (config.rollout.samplers > 0):
    expected = "none" if flags["sampler"] else "the slice of the samplers, as in v5p:4x4x4"
    why = f"config.rollout.samplers is {config.rollout.samplers}"
    raise UsageError(f"--sampler: found {flags['sampler'] or 'none'}, expected {expected}, because {why}")
  if flags["slices"] > 1 and config.mesh.data == 1 and "mesh.data" not in overrides:
    config.mesh.data = flags["slices"]
    print(f"config.mesh.data = {flags['slices']}: the axis that crosses slices")
  if problems := check.config_problems(config):
    raise UsageError("\n".join(problems))
  of_pictures = {path: flatten(config)[path] for path in sizes.IMAGE_SIZES}
  if any(of_pictures.values()) and not all(of_pictures.values()):
    (first, *_) = (path for path, value in of_pictures.items() if value is None)
    raise UsageError(f"config.{first}: found None, expected a size, because no data is read here to choose it")
  if not config.learner.row_images or config.model.train_tower:
    if flags["programs"] != known and "tower" in flags["programs"]:
      raise UsageError("--programs: found tower, expected others: no pass of a frozen tower over pictures is in this run")
    flags["programs"] = tuple(name for name in flags["programs"] if name != "tower")
  if (flags["prompt_tokens"] or 0) > (widest := max(config.rollout.prompt_buckets or (0,))):
    raise UsageError(f"--prompt_tokens: found {flags['prompt_tokens']}, expected at most {widest}, the largest of rollout.prompt_buckets")
  # Buckets of rows are chosen for the mesh, without data.
  if fields := [path for path in sizes.open_sizes(config) if path != "learner.row_buckets"]:
    raise UsageError(
      "\n".join(
        f"config.{path}: found None, expected a size, because no data is read here to choose it" for path in fields
      )
    )
  return config, flags


def _check_sampler(flags: dict[str, Any]) -> None:
  """Checks the flags beside --sampler.

  Raises:
    UsageError: If one has no effect.
    ValueError: If there is no such slice.
  """
  try:
    topologies.parse(flags["sampler"])
  except ValueError as error:
    raise ValueError(str(error).replace("--topology", "--sampler")) from None
  if flags["sweep"]:
    raise UsageError("--sweep: found it together with --sampler, expected none: it is about a learner that draws")


def run(config, flags: dict[str, Any]) -> int:
  """Compiles and reports the programs, and returns the exit code."""
  from experiments.pod import proof, report, rl_step, sampler_proof, sweep

  if flags["sweep"]:
    return sweep.run(config, flags["topology"], flags["of_sweep"], slices=flags["slices"], write_to=flags["json"])
  name = flags["topology"]
  topology = gpus.describe(name) if gpus.are_named(name) else topologies.describe(name, slices=flags["slices"])
  plan = proof.make_plan(config, topology, only_planned=bool(flags["only_plan"]))
  print(
    f"{plan.model.num_layers} layers, {plan.programs.model.num_params:,} parameters; mesh {dict(plan.mesh.shape)}",
    flush=True,
  )
  print("XLA flags: " + (" ".join(f"--{name}={value}" for name, value in topology.flags.items()) or "none"), flush=True)
  learned = {"update": proof.update, "score": proof.score, "tower": proof.tower}
  if flags["sampler"]:
    return _with_samplers(config, flags, plan, learned | {"snapshot": proof.snapshot})
  prove = learned | {"prefill": sampler_proof.prefill, "decode": sampler_proof.decode}
  proofs = [prove[name](plan) for name in flags["programs"]]
  report.show(report.tables(plan, proofs))
  estimates = [rl_step.estimate(plan, proofs, mean, prompt_tokens=flags["prompt_tokens"]) for mean in flags["lengths"]]
  if estimates:
    report.show(report.rl_steps(plan, estimates))
  if flags["json"]:
    Path(flags["json"]).write_text(json.dumps(report.as_json(plan, proofs, estimates), indent=1))
  return 0 if all(x.fits(topology) and not x.is_wasteful for x in proofs) else DOES_NOT_FIT


def _with_samplers(config, flags: dict[str, Any], plan: Any, learned: dict[str, Any]) -> int:
  """Compiles and reports a learner and samplers apart, and returns the exit code."""
  from experiments.pod import engine_proof, report, sampler_proof, two_sides, weight_move

  own = engine_proof.make_plan(config, flags["sampler"], plan.model, only_planned=plan.only_planned)
  engine = {name: getattr(engine_proof, name) for name in ("take", "prefill", "copy", "decode")}
  hosts = plan.topology.slices * topologies.num_hosts(plan.topology.name)
  sizes = f"{own.mesh.size} chips, {own.num_hosts} host(s) and {own.rows} rows each"
  print(f"{own.num_engines} engine(s) on {flags['sampler']}, of {sizes}; {hosts} host(s) of the learner", flush=True)
  drained = plan._replace(config=plan.config.copy_and_resolve_references(), topology=own.topology, sampler_mesh=own.mesh)
  drained.config.rollout.slots = own.rows
  # The sampler's first: once a plan is known, the compiler still generates machine code.
  of_sampler = [prove(own) for name, prove in engine.items() if name in flags["programs"]]
  of_drain = [prove(drained) for prove in (sampler_proof.prefill, sampler_proof.decode) if DRAIN in flags["programs"]]
  proofs = [prove(plan) for name, prove in learned.items() if name in flags["programs"]]
  sides = (("learner", plan, proofs), ("sampler", own, of_sampler), ("sampler, a batch at a time", drained, of_drain))
  for title, side, compiled in sides:
    if compiled:
      print(f"\n{title}:", flush=True)
      report.show(report.tables(side, compiled))
  num_bytes, chip = engine_proof.weight_bytes(own), plan.topology.chip
  receivers, chips = own.num_engines * own.num_hosts, own.mesh.size // own.num_hosts
  between = weight_move.Sides(hosts, 1, receivers, chips=chips, copies=own.copies, spread=own.num_hosts)
  ways = weight_move.ways(num_bytes, between, wire=chip.wire_bytes_per_s, network=chip.network_bytes_per_s)
  report.show(report.moves(num_bytes, ways))
  both = [*proofs, *of_sampler]
  balances = [two_sides.balance(plan, own, both, ways, mean, prompt_tokens=flags["prompt_tokens"]) for mean in flags["lengths"]]
  if balances:
    report.show(report.balances(own, balances))
  if flags["json"]:
    numbers = report.as_json(plan, proofs) | report.samplers_as_json(own, of_sampler, num_bytes, ways)
    numbers |= {DRAIN: report.proofs_as_json(drained, of_drain), "balances": [x._asdict() for x in balances]}
    Path(flags["json"]).write_text(json.dumps(numbers, indent=1))
  return 0 if all(x.fits(side.topology) and not x.is_wasteful for _, side, each in sides for x in each) else DOES_NOT_FIT


if __name__ == "__main__":
  code = main(sys.argv[1:])
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)  # Does not wait for the compiler, which may still generate machine code.
