"""`python -m experiments.reliability.storm [--asynchronous] [--bucket] [--kills=25] ...`

A run is killed again and again, and restarted with the same command each time, until it finishes.
Then it is compared with an undisturbed run: every number of its metrics, the fingerprint of every
batch of tokens, its samples and its last weights must be the same bits.

  --kills      number of SIGKILLs at random times; half of them while a checkpoint is being written
  --phases     phases at whose beginning a SIGKILL strikes, as in update,save; default: all of them
  --minutes    minimum duration instead, with as many runs as it takes
  --processes  number of processes of the run, over loopback; one of them, chosen at random, gets
               the signal, and the others have to notice
  --seed       seed of the random choices
  --out        folder, which must not exist; default: a temporary one
  --config.*   settings of the run, which is `configs/gspo.py:tiny` with some RL steps for each kill
               and a checkpoint every 4 steps, or every step with several processes

SIGTERMs come in addition. Prints a table and writes it, with all attempts, to `storm.json` in the
folder.

With `--bucket` (S3) or `--bucket=gs` the workdir of the run is in an emulated bucket, which answers
with 429 or 500, slowly or not at all for a third of the time. Half of the restarts after a random
strike have an empty mirror, as on a new machine. Both the last mirror and what a reader brings from
the bucket must have the bits of the undisturbed run.

With `--asynchronous` the run has a queue of rollouts, responses that go on with new weights, and
two samplers in processes of their own; with `--processes=2` a learner of two processes and one
sampler of two. `--job=calculator` has conversations and replayed routes, `--job=pictures` pictures.
Half of the kills strike the learner, half a sampler, and the others of the struck one end, too. The
run is then repeated by its schedule twice: undisturbed, and with up to 10 kills. The schedules, the
numbers, the samples and the last weights of all three must be the same bits. Besides, each step has
learned from one batch, no token is older than `rollout.staleness` allows, what a learner had
written before its end is done again as it was, and no process is left. Takes --kills, --seed,
--out, --processes, --job and --config.*, and writes `asynchronous.json`.
"""

import json
import logging
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.reliability import asynchronous, emulated_bucket
from experiments.reliability.attempts import Ended, Job, attempt, last_step, mismatches, saving, stepping
from jaxrl_llm.run.observe.faults import PHASES
from jaxrl_llm.workdir.bucket.address import mirror_of, parse
from jaxrl_llm.workdir.bucket.copies import localize

FLAGS = (
  "--config=configs/gspo.py:tiny",
  "--config.warm_start.num_steps=8",
  "--config.checkpoint.warm_start_every=4",
  "--config.eval.every=20",
  # Rewards of random weights would otherwise all be 0, and so would the gradients.
  "--config.reward.overlong_buffer=16",
  "--config.log.num_table_rows=0",
  "--config.log.tensorboard=False",
)
_ALONE = ("phases", "minutes", "bucket")  # Not for asynchronous runs.
_TERMS = 3
# Upper bound on the RL steps between two strikes: on an idle machine 4, and 6 to 15 for a SIGTERM.
_STEPS_EACH = 8
_NAMES = {
  "at random": "SIGKILL at random",
  "while saving": "SIGKILL while a checkpoint is written",
  "SIGTERM": "SIGTERM at random",
}


class Options(NamedTuple):
  """Parsed command line."""

  kills: int
  phases: tuple[str, ...]
  minutes: float | None
  processes: int
  seed: int
  out: Path
  flags: tuple[str, ...]
  asynchronous: bool = False
  bucket: str = ""
  job: str = "text"


class Strike(NamedTuple):
  """Kill and its cost.

  Attributes:
    kind: Kind, "at random", "while saving", "SIGTERM", or the phase.
    ended: End of the attempt.
    redone: Number of RL steps that were on disk and are repeated.
    moved: Whether the attempt began with an empty mirror of the bucket.
  """

  kind: str
  ended: Ended
  redone: int
  moved: bool = False


def main(argv: Sequence[str]) -> int:
  """Runs the command line; returns 0 if nothing differs, 1 if something does, 2 for bad input."""
  if {"-h", "--help"} & set(argv[1:]):
    print(__doc__)
    return 0
  try:
    options = read(argv[1:])
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of files that it can do without.
  options.out.mkdir(parents=True, exist_ok=True)
  if options.asynchronous:
    return asynchronous.run(
      options.out, job_name=options.job, processes=options.processes, kills=options.kills, seed=options.seed, flags=options.flags
    )
  golden, differing, strikes = job_of(options, "golden"), 0, []
  begun = time.monotonic()
  done = attempt(golden)
  if any(done.statuses):
    print(f"error: the undisturbed run ended with {done.statuses}; see {golden.workdir}.out.0", file=sys.stderr)
    return 1
  print(
    f"the undisturbed run: {last_step(golden.workdir)} RL steps, {time.monotonic() - begun:.0f} s", flush=True
  )
  lots, number = random.Random(options.seed), 0
  while not number or (options.minutes is not None and time.monotonic() - begun < 60 * options.minutes):
    stormy = job_of(options, f"storm-{number}")
    if options.bucket:
      new, differs = storm_in_bucket(stormy, golden, lots, options)
    else:
      new = storm(stormy, lots, kills=options.kills, phases=options.phases)
      differs = mismatches(golden.workdir, stormy.workdir)
    strikes, differing, number = strikes + new, differing + differs, number + 1
  text = table(strikes, differing)
  print(text)
  facts = {
    "machine": platform.machine(),
    "options": options._asdict() | {"out": str(options.out)},
    "mismatches": differing,
  }
  (options.out / "storm.json").write_text(
    json.dumps(facts | {"strikes": [x._asdict() | {"ended": x.ended._asdict()} for x in strikes]})
  )
  # What a lost machine had not sent yet is done again as well.
  late = not options.bucket and max((x.redone for x in strikes), default=0) > golden.every
  return 1 if differing or late else 0


def read(arguments: Sequence[str]) -> Options:
  """Parses the command line.

  Raises:
    ValueError: If a flag is unknown or a value is invalid.
  """
  values, flags = {
    "kills": "25", "phases": ",".join(PHASES), "minutes": "", "processes": "1", "seed": "0", "out": "", "bucket": "", "job": "",
  }, []  # fmt: skip
  is_asynchronous = "--asynchronous" in arguments
  for argument in arguments:
    if argument == "--asynchronous":
      continue
    argument = "--bucket=s3" if argument == "--bucket" else argument
    name, _, value = argument.removeprefix("--").partition("=")
    if name.startswith("config.") and argument.startswith("--"):
      flags.append(argument)
    elif name in values and argument.startswith("--") and value:
      if is_asynchronous and name in _ALONE:
        raise ValueError(f"found {argument!r} with --asynchronous, which has no effect there")
      if name == "job" and not is_asynchronous:
        raise ValueError(f"found {argument!r} without --asynchronous, where it has no effect")
      values[name] = value
    else:
      raise ValueError(
        f"found {argument!r}, expected --asynchronous, or --{', --'.join(values)} or --config.FIELD, each with =VALUE"
      )
  for name in ("kills", "processes", "seed"):
    if not values[name].isdecimal() or (name == "processes" and int(values[name]) < 1):
      raise ValueError(f"--{name}: found {values[name]!r}, expected a whole number")
  if values["bucket"] not in ("", "s3", "gs") or (values["bucket"] and values["processes"] != "1"):
    raise ValueError(f"--bucket: found {values['bucket']!r}, expected s3 or gs, and one process")
  if (job := values["job"] or "text") not in asynchronous.JOBS:
    raise ValueError(f"--job: found {job!r}, expected one of {', '.join(asynchronous.JOBS)}")
  phases = tuple(values["phases"].split(","))
  if unknown := [phase for phase in phases if phase not in PHASES]:
    raise ValueError(f"--phases: found {unknown[0]!r}, expected some of {', '.join(PHASES)}")
  try:
    minutes = float(values["minutes"]) if values["minutes"] else None
  except ValueError as error:
    raise ValueError(f"--minutes: found {values['minutes']!r}, expected a number") from error
  out = Path(values["out"] or tempfile.mkdtemp(prefix="storm-"))
  if values["out"] and out.exists():
    raise ValueError(f"--out: found {out}, which exists; choose another")
  return Options(
    int(values["kills"]), phases, minutes, int(values["processes"]), int(values["seed"]), out, tuple(flags), is_asynchronous,
    values["bucket"], job,
  )  # fmt: skip


def job_of(options: Options, name: str) -> Job:
  """Makes a job with a folder of its own."""
  # On two cores, eight devices take two seconds per step.
  devices, every = (4, 1) if options.processes > 1 else (1, 4)
  num_steps = _STEPS_EACH * (options.kills + _TERMS + len(options.phases))
  flags = (*FLAGS, f"--config.num_steps={num_steps}", f"--config.checkpoint.every={every}", *options.flags)
  return Job(flags, options.out / name, options.processes, devices, every, options.out / "programs")


def storm_in_bucket(job: Job, golden: Job, lots: random.Random, options: Options) -> tuple[list[Strike], int]:
  """Strikes a run in an emulated bucket. Returns the strikes, and the mismatches with `golden`."""
  with emulated_bucket.bucket(options.bucket) as emulated, emulated_bucket.reached(emulated, options.out / "mirrors"):
    url = f"{emulated.url}/runs/{job.workdir.name}"
    job = job._replace(url=url, workdir=mirror_of(parse(url)).run)
    with emulated_bucket.changeable(emulated.weather):
      strikes = storm(job, lots, kills=options.kills, phases=options.phases)
    copy = localize(url)
    print(f"{emulated.weather.requests:,} requests, {emulated.weather.refused:,} of them refused", flush=True)
    return strikes, mismatches(golden.workdir, job.workdir) + mismatches(golden.workdir, copy)


def storm(job: Job, lots: random.Random, *, kills: int, phases: Sequence[str]) -> list[Strike]:
  """Strikes a run until it is finished, and returns the strikes.

  Args:
    job: Run, not yet begun.
    lots: Source of the random choices of times and victims.
    kills: Number of kills at random; some SIGTERMs come in addition.
    phases: Phases with one kill each.
  """
  planned = [
    *(["at random"] * (kills - kills // 2)),
    *(["while saving"] * (kills // 2)),
    *(["SIGTERM"] * _TERMS),
    *phases,
  ]
  lots.shuffle(planned)
  # The warm start comes first, because its phase only occurs at the beginning.
  planned.sort(key=lambda kind: kind != "warm_start")
  strikes = []
  while planned:
    kind = planned.pop(0)
    before = last_step(job.workdir)
    moved = bool(job.url) and kind not in PHASES and strikes != [] and lots.random() < 0.5
    if moved:
      shutil.rmtree(job.workdir.parents[1])
    victim = lots.randrange(job.processes)
    fault, when, signal_kind = "", None, signal.SIGKILL
    if kind in PHASES:
      fault = f"{kind}:{place(job, kind)}:kill@{victim}"
    else:
      signal_kind = signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL
      when = saving(lots) if kind == "while saving" else stepping(lots)
    ended = attempt(job, when=when, victims=(victim,), kind=signal_kind, fault=fault)
    if not any(ended.statuses):  # The run finished before it was struck.
      print(f"{kind}: finished first, at step {ended.step}; {len(planned)} strikes are left out", flush=True)
      return strikes
    strikes.append(Strike(kind, ended, 0, moved))
    if len(strikes) > 1:
      strikes[-2] = strikes[-2]._replace(redone=max(0, before - (ended.resumed or 0)))
    where = " on a new machine" if moved else ""
    print(f"{kind}: status {ended.statuses}, at RL step {ended.step}, resumed from {ended.resumed}{where}", flush=True)
  before = last_step(job.workdir)
  ended = attempt(job)
  if any(ended.statuses):
    raise RuntimeError(f"the last attempt ended with {ended.statuses}; see {job.workdir / 'logs'}")
  if strikes:
    strikes[-1] = strikes[-1]._replace(redone=max(0, before - (ended.resumed or 0)))
  return strikes


def place(job: Job, phase: str) -> int:
  """Returns the next step, or the number of the next checkpoint, at which a phase occurs."""
  warm, step = 8, last_step(job.workdir)
  if phase == "warm_start":
    return 3
  if phase in ("save", "manifest", "saved"):
    return warm + (step // job.every + 1) * job.every
  if phase == "eval":
    return (step // 20 + 1) * 20
  return step + 2


def table(strikes: Sequence[Strike], differing: int) -> str:
  """Formats the cost of the strikes in Markdown."""
  lines = ["| strike | kills | resumed | RL steps redone: most, mean | longest end, s |", "|---|---|---|---|---|"]
  groups = [(name, [x for x in strikes if x.kind == kind]) for kind, name in _NAMES.items()]
  groups.append(("SIGKILL at the beginning of a phase, once each", [x for x in strikes if x.kind in PHASES]))
  for name, group in [*groups, ("all", list(strikes))]:
    if group:
      redone, seconds = [x.redone for x in group], max(x.ended.seconds for x in group)
      lines.append(
        f"| {name} | {len(group)} | {len(group)} | {max(redone)}, {sum(redone) / len(redone):.1f} | {seconds:.1f} |"
      )
  return "\n".join([*lines, "", f"mismatches with the undisturbed run: {differing}"])


if __name__ == "__main__":
  sys.exit(main(sys.argv))
