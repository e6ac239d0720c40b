"""The project's sampler and update against those of other libraries, on the same work.

All engines get the same weights, jobs and settings.

  python -m experiments.benchmarks.peers --checkpoint=DIR --prompts=FILE.npz --ignore_eos
    --python.tunix=PYTHON --json=OUT
  python -m experiments.benchmarks.peers --checkpoint=DIR --batch=FILE.npz --objective=grpo
    --python.tunix=PYTHON --python.trl=PYTHON

Each engine runs in a process of its own (`engines/worker.py`), under the interpreter that
`--python.ENGINE` names, because peers need packages of their own. All engines load and compile
first. Then each in turn does one generation or one update while the others wait, so that whatever
slows the machine down slows all of them. The engines must do the same work: samplers agree in the
mean log-probability of their tokens, and updates in the first loss.
"""

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.benchmarks.engines import job as sampling
from experiments.benchmarks.engines import train_job as training
from experiments.benchmarks.engines.job import Job
from experiments.benchmarks.engines.train_job import TrainJob
from experiments.benchmarks.engines.turns import take_turns
from experiments.benchmarks.reporting import megabytes, spread, write_json

OURS = "ours"
SAME_LOSS = 1e-5
ALIKE = ("trl",)
"""Engines with the same loss as this project. The `about` of the others says what differs."""


class Mode(NamedTuple):
  """Kind of comparison.

  Attributes:
    engines: Module of each engine.
    add_flags: Function that adds the flags of a job.
    job_from: Function that makes the job from the flags.
    check: Function that checks the job against its files, before any engine loads them. It may fill
      in what only the files contain.
    findings: Function `(ready, runs) -> findings` of one engine.
    columns: Columns of the table for the findings.
  """

  engines: dict[str, str]
  add_flags: Callable[[argparse.ArgumentParser], None]
  job_from: Callable[[argparse.Namespace], Any]
  check: Callable[[Any], Any]
  findings: Callable[[dict[str, Any], list[dict[str, Any]]], dict[str, Any]]
  columns: dict[str, Callable[[dict[str, Any]], str]]


def check_sampling(job: Job) -> Job:
  """Checks the prompts against the checkpoint.

  Raises:
    ValueError: If they do not fit. One line that names the flag or the file.
  """
  from jaxrl_llm.models import read_config

  if not job.temperature > 0:
    raise ValueError(
      f"--temperature: found {job.temperature}, expected a number above 0, because engines differ in greedy sampling"
    )
  config = read_config(job.checkpoint)
  sampling.read_prompts(job, vocab_size=config.vocab_size, max_positions=config.max_positions)
  return job


def check_training(job: TrainJob) -> TrainJob:
  """Checks the batch against the checkpoint.

  Returns:
    The job with an unused pad id.

  Raises:
    ValueError: If it does not fit. One line that names the flag or the file.
  """
  from experiments.benchmarks.train_step import check

  config, batch = check(job)
  return training.with_pad_id(job, batch, config.vocab_size)


def sampler_findings(ready: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
  """Computes the mean length and the mean log-probability of a sampler's tokens."""
  del ready
  tokens = sum(run["tokens"] for run in runs)
  return {
    "mean_length": tokens / sum(len(run["lengths"]) for run in runs),
    "mean_logprob": sum(run["mean_logprob"] * run["tokens"] for run in runs) / tokens,
  }


def update_findings(ready: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
  """Returns the loss and gradient norm of the first update, timed or not, and the last loss."""
  first = (ready["warm"] or runs)[0]
  return {"first_loss": first["loss"], "first_grad_norm": first["grad_norm"], "last_loss": runs[-1]["loss"]}


ENGINES = "experiments.benchmarks.engines."
SAMPLING = Mode(
  engines={OURS: ENGINES + "ours", "tunix": ENGINES + "google_tunix", "transformers": ENGINES + "hf_transformers"},
  add_flags=sampling.add_flags,
  job_from=sampling.job_from,
  check=check_sampling,
  findings=sampler_findings,
  columns={"mean logprob": lambda x: f"{x['mean_logprob']:.4f}"},
)
TRAINING = Mode(
  engines={OURS: ENGINES + "ours_training", "tunix": ENGINES + "tunix_training", "trl": ENGINES + "trl_training"},
  add_flags=training.add_flags,
  job_from=training.job_from,
  check=check_training,
  findings=update_findings,
  columns={"first loss": lambda x: f"{x['first_loss']:.7f}", "grad norm": lambda x: f"{x['first_grad_norm']:.6f}"},
)


def compare(
  commands: dict[str, Sequence[str]],
  job: Any,
  *,
  repeats: int,
  timeout: float,
  warm: int = 1,
  mode: Mode = SAMPLING,
) -> dict[str, Any]:
  """Times engines in turn.

  Args:
    commands: Command of each engine's worker.
    job: Job of all engines.
    repeats: Number of timed runs of each engine.
    timeout: Deadline of an answer, in seconds.
    warm: Number of runs of each engine that are not timed; the first one compiles.
    mode: Kind of the job.

  Returns:
    The results of each engine under `engines`, and the reasons of failures under `failed`.
  """
  turns = take_turns(commands, job._asdict(), repeats=repeats, timeout=timeout, warm=warm, seed=getattr(job, "seed", 0))
  engines = {
    name: turns.ready[name] | summary(runs, turns.ready[name]) | mode.findings(turns.ready[name], runs)
    for name, runs in turns.runs.items()
  }
  differs = differences(engines)
  return dict(
    job=job._asdict(), engines=engines, failed=turns.failed, ratio=ratio(engines), first_loss_differs=differs,
    finished=time.strftime("%Y-%m-%d %H:%M:%S"),
  )  # fmt: skip


def differences(engines: dict[str, dict[str, Any]]) -> dict[str, float]:
  """Computes how far each peer's first loss is from this project's; empty if nothing was trained.

  Example:
    >>> differences({"ours": {"first_loss": 0.5}, "trl": {"first_loss": 0.25}})
    {'trl': 0.25}
  """
  if "first_loss" not in engines.get(OURS, {}):
    return {}
  return {
    name: abs(engine["first_loss"] - engines[OURS]["first_loss"]) for name, engine in engines.items() if name != OURS
  }


def summary(runs: list[dict[str, Any]], ready: dict[str, Any]) -> dict[str, Any]:
  """Summarises the runs of one engine, independently of the kind of the job.

  Args:
    runs: Answers to the requests to run.
    ready: Answer to the job.
  """
  peak, tokens, loaded = (
    max(run["peak_bytes"] for run in runs),
    [run["tokens"] for run in runs],
    ready.get("loaded_bytes"),
  )
  return {
    "seconds": spread([run["seconds"] for run in runs]),
    "cpu_seconds": spread([run["cpu_seconds"] for run in runs]),
    "tokens_per_s": spread([run["tokens"] / run["seconds"] for run in runs]),
    "tokens": tokens,
    "peak_bytes": peak,
    "increase_bytes": None if loaded is None else peak - loaded,
    # Memory that compilation leaves behind counts in `increase_bytes`, but not in this number.
    "over_idle_bytes": max(
      (run["peak_bytes"] - run["idle_bytes"] for run in runs if run["idle_bytes"] is not None), default=None
    ),
    "all_seconds": [run["seconds"] for run in runs],
  }


def ratio(engines: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
  """Computes this project's tokens/s over those of the fastest peer, run by run.

  It is None if either of the two is missing.

  Example:
    >>> engine = lambda speed: {
    ...   "tokens_per_s": {"median": speed}, "tokens": [10, 10], "all_seconds": [10 / speed] * 2
    ... }
    >>> ratio({"ours": engine(6.0), "a": engine(2.0), "b": engine(3.0)})
    {'peer': 'b', 'median': 2.0, 'min': 2.0, 'max': 2.0}
  """
  peers = [name for name in engines if name != OURS]
  if OURS not in engines or not peers:
    return None
  best = max(peers, key=lambda name: engines[name]["tokens_per_s"]["median"])
  speeds = lambda name: [
    tokens / seconds for tokens, seconds in zip(engines[name]["tokens"], engines[name]["all_seconds"])
  ]
  ratios = [ours / theirs for ours, theirs in zip(speeds(OURS), speeds(best))]
  return dict(peer=best) | spread(ratios)


def describe(result: dict[str, Any], mode: Mode = SAMPLING) -> str:
  """Formats the results as a table."""
  columns = {
    "engine": lambda name, x: name,
    "tokens/s": lambda name, x: f"{x['tokens_per_s']['median']:,.0f}",
    "min": lambda name, x: f"{x['tokens_per_s']['min']:,.0f}",
    "max": lambda name, x: f"{x['tokens_per_s']['max']:,.0f}",
    "seconds": lambda name, x: f"{x['seconds']['median']:.3f}",
    "CPU s": lambda name, x: f"{x['cpu_seconds']['median']:.2f}",
    "tokens": lambda name, x: f"{statistics.median(x['tokens']):,.0f}",
    **{title: lambda name, x, cell=cell: cell(x) for title, cell in mode.columns.items()},
    "peak": lambda name, x: megabytes(x["peak_bytes"]),
    "over loaded": lambda name, x: megabytes(x["increase_bytes"]),
    "over idle": lambda name, x: megabytes(x["over_idle_bytes"]),
    "loaded s": lambda name, x: f"{x['load_seconds']:.1f}",
    "warm s": lambda name, x: f"{x['warm_seconds']:.1f}",
  }
  rows = [list(columns), *([cell(name, x) for cell in columns.values()] for name, x in result["engines"].items())]
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
  lines += [f"{name}: {engine['about']}" for name, engine in result["engines"].items()]
  if best := result["ratio"]:
    lines.append(
      f"ours / {best['peer']}, run by run: median {best['median']:.2f}, {best['min']:.2f} to {best['max']:.2f}"
    )
  lines += [
    f"first loss of {name} differs from ours by {difference:.1e}"
    for name, difference in result["first_loss_differs"].items()
  ]
  return "\n".join([*lines, *(f"failed: {problem}" for problem in result["failed"].values())])


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns its exit status, 1 if an engine failed or has another loss."""
  argv = sys.argv[1:] if argv is None else argv
  mode = TRAINING if any(flag.split("=")[0] == "--batch" for flag in argv) else SAMPLING
  parser = argparse.ArgumentParser(
    prog="python -m experiments.benchmarks.peers",
    description=__doc__.splitlines()[0],
    epilog="Compares updates with --batch, and samplers otherwise.",
  )
  mode.add_flags(parser)
  parser.add_argument("--engines", default=",".join(mode.engines), help="engines in the order of their turns")
  for name in mode.engines:
    parser.add_argument(
      f"--python.{name}", default=sys.executable, metavar="PYTHON", help="Python interpreter of its worker"
    )
    parser.add_argument(f"--options.{name}", default="", metavar="FLAGS", help="further flags of its worker")
  parser.add_argument(
    "--warm", type=int, default=2, help="number of first runs that are not timed; a second may still compile a little"
  )
  parser.add_argument("--timeout", type=float, default=1800, help="deadline of an answer, in seconds")
  args = parser.parse_args(argv)
  try:
    names = args.engines.split(",")
    if unknown := [name for name in names if name not in mode.engines]:
      raise ValueError(f"--engines: found {unknown[0]!r}, expected some of {', '.join(mode.engines)}")
    job = mode.check(mode.job_from(args))
  except (ValueError, OSError, ImportError) as error:
    print(error, file=sys.stderr)
    return 2
  flags = vars(args)
  commands = {
    name: [flags[f"python.{name}"], "-m", mode.engines[name], *shlex.split(flags[f"options.{name}"])] for name in names
  }
  result = compare(commands, job, repeats=args.repeats, timeout=args.timeout, warm=args.warm, mode=mode)
  print(describe(result, mode))
  write_json(args.json, result)
  another = [name for name in ALIKE if result["first_loss_differs"].get(name, 0) > SAME_LOSS]
  return 1 if result["failed"] or another else 0


if __name__ == "__main__":
  sys.exit(main())
