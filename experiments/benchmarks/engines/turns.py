"""Engines that take turns: one worker process each, of which one computes while the others wait."""

import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any, NamedTuple

ROOT = pathlib.Path(__file__).absolute().parents[3]


class Failed(Exception):
  """Failure of an engine; the message is one line."""


class Worker(NamedTuple):
  """Process of an engine.

  Attributes:
    name: Name of the engine.
    process: Process with pipes for stdin and stdout.
    log: File that receives its stderr.
    timeout: Deadline of an answer, in seconds.
  """

  name: str
  process: subprocess.Popen
  log: IO[str]
  timeout: float


class Turns(NamedTuple):
  """Answers of the engines.

  Attributes:
    ready: Answer to the job, of each engine that was loaded.
    runs: Answers to the timed runs, of each engine.
    failed: Reason of the failure, of each engine that failed.
  """

  ready: dict[str, dict[str, Any]]
  runs: dict[str, list[dict[str, Any]]]
  failed: dict[str, str]


def start(name: str, command: Sequence[str], *, timeout: float) -> Worker:
  """Starts a worker.

  Args:
    name: Name of the engine.
    command: Command to run in the root of the repository.
    timeout: Deadline of an answer, in seconds.

  Raises:
    Failed: If there is no such program.
  """
  log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the worker lives)
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
    Failed: If the worker reports an error, ends, or takes too long.
  """
  try:
    worker.process.stdin.write(json.dumps(request) + "\n")
    worker.process.stdin.flush()
    ready, _, _ = select.select([worker.process.stdout], [], [], worker.timeout)
    line = worker.process.stdout.readline() if ready else None
  except BrokenPipeError:
    line = ""
  if line is None:
    raise Failed(f"{worker.name}: no answer within {worker.timeout:g} s; raise --timeout or ask for less")
  if not line:
    raise Failed(f"{worker.name}: the worker ended with status {worker.process.wait()}: {_last_line(worker.log)}")
  answer = json.loads(line)
  if "error" in answer:
    raise Failed(f"{worker.name}: {' '.join(answer['error'].split())}")
  return answer


def _last_line(log: IO[str]) -> str:
  log.seek(0)
  lines = [line.strip() for line in log.read().splitlines() if line.strip()]
  return lines[-1] if lines else "it printed nothing"


def stop(worker: Worker) -> None:
  """Ends a worker in any state."""
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


def take_turns(
  commands: dict[str, Sequence[str]],
  job: dict[str, Any],
  *,
  repeats: int,
  timeout: float,
  warm: int = 1,
  seed: int = 0,
) -> Turns:
  """Loads and compiles every engine, then times them one after the other, repeatedly.

  Args:
    commands: Command of each engine's worker.
    job: Job of all engines.
    repeats: Number of timed runs of each engine.
    timeout: Deadline of an answer, in seconds.
    warm: Number of runs of each engine that are not timed; the first one compiles.
    seed: Seed of the first timed run.
  """
  workers, ready, runs, failed = {}, {}, {}, {}
  say = lambda text: print(text, file=sys.stderr, flush=True)
  try:
    for name, command in commands.items():
      try:
        workers[name] = start(name, command, timeout=timeout)
        ready[name], runs[name] = ask(workers[name], {"job": job, "warm": warm}), []
        say(f"{name}: ready in {ready[name]['load_seconds'] + ready[name]['warm_seconds']:.1f} s")
      except Failed as error:
        failed[name] = str(error)
    for repeat in range(repeats):
      for name in [name for name in runs if name not in failed]:
        try:
          runs[name].append(ask(workers[name], {"run": seed + repeat}))
          last = runs[name][-1]
          say(f"{repeat + 1}/{repeats} {name}: {last['tokens'] / last['seconds']:,.0f} tokens/s")
        except Failed as error:
          failed[name] = str(error)
  finally:
    for worker in workers.values():
      stop(worker)
  done = lambda answers: {name: answer for name, answer in answers.items() if name not in failed}
  return Turns(done(ready), done(runs), failed)
