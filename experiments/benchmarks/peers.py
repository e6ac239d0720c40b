"""Our sampler against those of other libraries: the same weights, prompts and settings, side by side.

  python -m experiments.benchmarks.peers --checkpoint=DIR --prompts=FILE.npz --ignore_eos --python.tunix=PYTHON --json=OUT

Each engine lives in a process of its own (`engines/worker.py`), under the interpreter that `--python.ENGINE` names, since peers want
packages of their own. All load and compile first; then each in turn is asked for one generation, while the others wait: what slows the
machine down slows all of them. All keep the log-probability of every drawn token; its mean must agree, or they do not sample the same.
"""

import argparse
import json
import os
import pathlib
import select
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

from experiments.benchmarks.engines.job import Job, add_flags, job_from

ROOT = pathlib.Path(__file__).absolute().parents[2]
ENGINES = {
  "ours": "experiments.benchmarks.engines.ours",
  "tunix": "experiments.benchmarks.engines.google_tunix",
  "transformers": "experiments.benchmarks.engines.hf_transformers",
}
OURS = "ours"


class Failed(Exception):
  """An engine that could not do its part; the message is one line."""


class Worker(NamedTuple):
  """An engine's process.

  Attributes:
    name: key of `ENGINES`.
    process: with pipes for stdin and stdout.
    log: what it writes to stderr.
    timeout: seconds to wait for an answer.
  """

  name: str
  process: subprocess.Popen
  log: IO[str]
  timeout: float


def start(name: str, command: Sequence[str], *, timeout: float) -> Worker:
  """Starts a worker.

  Args:
    name: of the engine.
    command: to run, in the root of the repository.
    timeout: seconds to wait for an answer.

  Raises:
    Failed: no such program.
  """
  log = tempfile.TemporaryFile("w+")  # noqa: SIM115  It lives as long as the worker.
  environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
  pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
  try:
    process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)
  except OSError as error:
    raise Failed(f"{name}: cannot run {command[0]} ({error.strerror}); pass --python.{name}=PYTHON") from error
  return Worker(name, process, log, timeout)


def ask(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
  """Sends a request and waits for the answer.

  Raises:
    Failed: the worker says that something went wrong, ends, or takes too long.
  """
  try:
    worker.process.stdin.write(json.dumps(request) + "\n")
    worker.process.stdin.flush()
    ready, _, _ = select.select([worker.process.stdout], [], [], worker.timeout)
    line = worker.process.stdout.readline() if ready else None
  except BrokenPipeError:
    line = ""
  if line is None:
    raise Failed(f"{worker.name}: no answer for {worker.timeout:g} s; raise --timeout or ask for less")
  if not line:
    raise Failed(f"{worker.name}: the worker ended with status {worker.process.wait()}: {_last_line(worker.log)}")
  answer = json.loads(line)
  if "error" in answer:
    raise Failed(f"{worker.name}: {' '.join(answer['error'].split())}")
  return answer


def _last_line(log: IO[str]) -> str:
  log.seek(0)
  lines = [line.strip() for line in log.read().splitlines() if line.strip()]
  return lines[-1] if lines else "it said nothing"


def stop(worker: Worker) -> None:
  """Ends a worker, whatever state it is in."""
  if worker.process.poll() is None:
    try:
      worker.process.stdin.write(json.dumps({"stop": True}) + "\n")
      worker.process.stdin.close()
      worker.process.wait(timeout=10)
    except (BrokenPipeError, subprocess.TimeoutExpired):
      worker.process.kill()
      worker.process.wait()
  worker.process.stdout.close()
  worker.log.close()


def compare(commands: dict[str, Sequence[str]], job: Job, *, repeats: int, timeout: float, warm: int = 1) -> dict[str, Any]:
  """Times engines in turn.

  Args:
    commands: of each engine's worker.
    job: what all of them sample.
    repeats: generations of each engine.
    timeout: seconds to wait for one answer.
    warm: generations of each engine that are not timed; the first compiles.

  Returns:
    Under `engines` what each did, under `failed` why the others did not.
  """
  workers, ready, runs, failed = {}, {}, {}, {}
  try:
    for name, command in commands.items():
      try:
        workers[name] = start(name, command, timeout=timeout)
        ready[name], runs[name] = ask(workers[name], {"job": job._asdict(), "warm": warm}), []
        print(f"{name}: ready in {ready[name]['load_seconds'] + ready[name]['warm_seconds']:.1f} s", file=sys.stderr, flush=True)
      except Failed as error:
        failed[name] = str(error)
    for repeat in range(repeats):
      for name in [name for name in runs if name not in failed]:
        try:
          runs[name].append(ask(workers[name], {"generate": job.seed + repeat}))
          last = runs[name][-1]
          print(f"{repeat + 1}/{repeats} {name}: {last['seconds']:.3f} s, {last['tokens']} tokens", file=sys.stderr, flush=True)
        except Failed as error:
          failed[name] = str(error)
  finally:
    for worker in workers.values():
      stop(worker)
  engines = {name: ready[name] | summary(found, ready[name]) for name, found in runs.items() if name not in failed}
  return dict(job=job._asdict(), engines=engines, failed=failed, ratio=ratio(engines), finished=time.strftime("%Y-%m-%d %H:%M:%S"))


def summary(runs: list[dict[str, Any]], ready: dict[str, Any]) -> dict[str, Any]:
  """What the generations of one engine come to.

  Args:
    runs: answers to requests to generate.
    ready: the answer to the job.
  """
  spread = lambda values: dict(median=statistics.median(values), min=min(values), max=max(values))
  peak, tokens, loaded = max(run["peak_bytes"] for run in runs), [run["tokens"] for run in runs], ready.get("loaded_bytes")
  return {
    "seconds": spread([run["seconds"] for run in runs]),
    "cpu_seconds": spread([run["cpu_seconds"] for run in runs]),
    "tokens_per_s": spread([run["tokens"] / run["seconds"] for run in runs]),
    "generated_tokens": tokens,
    "mean_length": sum(tokens) / sum(len(run["lengths"]) for run in runs),
    "mean_logprob": sum(run["mean_logprob"] * run["tokens"] for run in runs) / sum(tokens),
    "peak_bytes": peak,
    "increase_bytes": None if loaded is None else peak - loaded,
    # What compiling leaves behind is in the one above, not in this one.
    "over_idle_bytes": max((run["peak_bytes"] - run["idle_bytes"] for run in runs if run["idle_bytes"] is not None), default=None),
    "all_seconds": [run["seconds"] for run in runs],
  }


def ratio(engines: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
  """Our tokens/s over those of the fastest peer, run by run; None without one of the two.

  Example:
    >>> engine = lambda speed: {"tokens_per_s": {"median": speed}, "generated_tokens": [10, 10], "all_seconds": [10 / speed] * 2}
    >>> ratio({"ours": engine(6.0), "a": engine(2.0), "b": engine(3.0)})
    {'peer': 'b', 'median': 2.0, 'min': 2.0, 'max': 2.0}
  """
  peers = [name for name in engines if name != OURS]
  if OURS not in engines or not peers:
    return None
  best = max(peers, key=lambda name: engines[name]["tokens_per_s"]["median"])
  speeds = lambda name: [tokens / seconds for tokens, seconds in zip(engines[name]["generated_tokens"], engines[name]["all_seconds"])]
  ratios = [ours / theirs for ours, theirs in zip(speeds(OURS), speeds(best))]
  return dict(peer=best, median=statistics.median(ratios), min=min(ratios), max=max(ratios))


def describe(result: dict[str, Any]) -> str:
  """The results as a table."""
  megabytes = lambda x: "unknown" if x is None else f"{x / 1e6:,.0f}"
  columns = {
    "engine": lambda name, x: name,
    "tokens/s": lambda name, x: f"{x['tokens_per_s']['median']:,.0f}",
    "min": lambda name, x: f"{x['tokens_per_s']['min']:,.0f}",
    "max": lambda name, x: f"{x['tokens_per_s']['max']:,.0f}",
    "seconds": lambda name, x: f"{x['seconds']['median']:.3f}",
    "CPU s": lambda name, x: f"{x['cpu_seconds']['median']:.2f}",
    "tokens": lambda name, x: f"{statistics.median(x['generated_tokens']):,.0f}",
    "mean logprob": lambda name, x: f"{x['mean_logprob']:.4f}",
    "peak MB": lambda name, x: megabytes(x["peak_bytes"]),
    "over loaded MB": lambda name, x: megabytes(x["increase_bytes"]),
    "over idle MB": lambda name, x: megabytes(x["over_idle_bytes"]),
    "loaded s": lambda name, x: f"{x['load_seconds']:.1f}",
    "warm s": lambda name, x: f"{x['warm_seconds']:.1f}",
  }
  rows = [list(columns), *([cell(name, x) for cell in columns.values()] for name, x in result["engines"].items())]
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
  lines += [f"{name}: {engine['about']}" for name, engine in result["engines"].items()]
  if found := result["ratio"]:
    lines.append(f"ours / {found['peer']}, run by run: median {found['median']:.2f}, {found['min']:.2f} to {found['max']:.2f}")
  return "\n".join([*lines, *(f"failed: {problem}" for problem in result["failed"].values())])


def main(argv: list[str] | None = None) -> int:
  """The command; its exit status, 1 where an engine failed."""
  parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.peers", description=__doc__.splitlines()[0])
  add_flags(parser)
  parser.add_argument("--engines", default=",".join(ENGINES), help="in the order of their turns")
  for name in ENGINES:
    parser.add_argument(f"--python.{name}", default=sys.executable, metavar="PYTHON", help="interpreter of its worker")
    parser.add_argument(f"--options.{name}", default="", metavar="FLAGS", help="further flags of its worker")
  parser.add_argument("--warm", type=int, default=2, help="first generations that are not timed; a second may still compile a trifle")
  parser.add_argument("--timeout", type=float, default=1800, help="seconds to wait for one answer")
  args = parser.parse_args(argv)
  try:
    names = args.engines.split(",")
    if unknown := [name for name in names if name not in ENGINES]:
      raise ValueError(f"--engines: found {unknown[0]!r}, expected some of {', '.join(ENGINES)}")
    job = job_from(args)
    check(job)
  except (ValueError, OSError, ImportError) as error:
    print(error, file=sys.stderr)
    return 2
  flags = vars(args)
  commands = {name: [flags[f"python.{name}"], "-m", ENGINES[name], *shlex.split(flags[f"options.{name}"])] for name in names}
  result = compare(commands, job, repeats=args.repeats, timeout=args.timeout, warm=args.warm)
  print(describe(result))
  if args.json:
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=2) + "\n")
  return 1 if result["failed"] else 0


def check(job: Job) -> None:
  """Prompts against the checkpoint, before any engine loads it.

  Raises:
    ValueError: one line that names flag or file.
  """
  from experiments.benchmarks.engines.job import read_prompts
  from jaxrl_llm.models import read_config

  if not job.temperature > 0:
    raise ValueError(f"--temperature: found {job.temperature}, expected a number above 0: not every engine is greedy in the same way")
  config = read_config(job.checkpoint)
  read_prompts(job, vocab_size=config.vocab_size, max_positions=config.max_positions)


if __name__ == "__main__":
  sys.exit(main())
