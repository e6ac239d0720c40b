"""Attempts at a run: starting it, killing it at a chosen moment, and reading the result."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl_llm.workdir import logs
from jaxrl_llm.workdir.metrics import read_rows, reproducible

ROOT = Path(__file__).resolve().parents[2]

_LOOK_SECONDS = 0.002
_LIMIT_SECONDS = 600.0
# Range of random kills after the first step of an attempt: some steps and a checkpoint.
_REACH_SECONDS = 1.5


class Job(NamedTuple):
  """Run that is started again and again.

  Attributes:
    flags: Flags of its command line, without the workdir.
    workdir: Workdir of the run.
    processes: Number of its processes.
    devices: Number of simulated devices of each process.
    every: Number of RL steps between checkpoints.
    cache: Folder of compiled programs, which the attempts share.
    url: Address of the workdir in a bucket, whose mirror `workdir` is; "" if there is none.
  """

  flags: tuple[str, ...]
  workdir: Path
  processes: int
  devices: int
  every: int
  cache: Path
  url: str = ""


class Ended(NamedTuple):
  """End of an attempt.

  Attributes:
    statuses: Exit statuses of its processes; a signal's number with a minus if a signal ended one.
    struck: Whether it was killed; False if it had ended before.
    seconds: Seconds from the signal until all processes were gone; 0 if it was not killed.
    step: Last RL step that it had written.
    resumed: RL step from which it resumed; None if it began anew.
  """

  statuses: tuple[int, ...]
  struck: bool
  seconds: float
  step: int
  resumed: int | None


When = Callable[[Job, Sequence[subprocess.Popen], float], bool]
"""Test of whether to strike now, called every few milliseconds with the attempt's start time."""


def attempt(
  job: Job,
  *,
  when: When | None = None,
  victims: Sequence[int] = (0,),
  kind: int = signal.SIGKILL,
  fault: str = "",
) -> Ended:
  """Starts the run, strikes it if asked to, and waits for its end.

  Args:
    job: Run to start.
    when: Test of whether to send the signal now; None to send none.
    victims: Indices of the processes to send it to.
    kind: Signal to send.
    fault: Value of `JAXRL_FAULT`.

  Raises:
    TimeoutError: If it has not ended within ten minutes. Its processes are killed.
  """
  number = logs.number(job.workdir / "logs")
  started, struck = time.monotonic(), None
  output = job.cache.with_name(f"{job.workdir.name}.out") if job.url else job.workdir.with_name(f"{job.workdir.name}.out")
  processes = _launch(job, fault, output)
  try:
    while any(process.poll() is None for process in processes):
      if time.monotonic() - started > _LIMIT_SECONDS:
        raise TimeoutError(f"attempt {number} at {job.workdir} took more than {_LIMIT_SECONDS:.0f} s; see its logs")
      # A process may have been killed by the injected fault.
      if struck is None and any(process.poll() == -signal.SIGKILL for process in processes):
        struck = time.monotonic()
      if struck is None and when is not None and when(job, processes, started):
        struck = time.monotonic()
        for index in victims:
          with contextlib.suppress(ProcessLookupError):
            processes[index].send_signal(kind)
      time.sleep(_LOOK_SECONDS)
  finally:
    for process in processes:
      if process.poll() is None:
        process.kill()
        process.wait()
  gone, statuses = time.monotonic(), tuple(process.returncode for process in processes)
  struck_at_all = struck is not None or bool(fault)
  if job.url:  # The logs of earlier attempts may have come with the mirror.
    number = max(1, logs.number(job.workdir / "logs") - 1)
  log = job.workdir / "logs" / f"attempt-{number}.log"
  seconds = gone - struck if struck is not None else 0.0
  return Ended(statuses, struck_at_all and any(statuses), seconds, last_step(job.workdir), resumed(log))


def stepping(lots: random.Random) -> When:
  """Strikes some time after the attempt's first new step is on disk."""
  seconds, first, known = lots.uniform(0, _REACH_SECONDS), None, None

  def when(job, processes, started):
    nonlocal first, known
    path = job.workdir / "metrics.jsonl"
    size = path.stat().st_size if path.exists() else 0
    # A resumed run truncates the rows after its checkpoint.
    known = size if known is None else min(known, size)
    if first is None and size > known:
      first = time.monotonic()
    return first is not None and time.monotonic() - first >= seconds

  return when


def saving(lots: random.Random) -> When:
  """Strikes shortly after a checkpoint begins to be written."""
  seconds, first, known = lots.uniform(0, 0.05), None, None

  def when(job, processes, started):
    nonlocal first, known
    folder = job.workdir / "checkpoints"
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if known is None or not rows_grow(job, started):
      known = names
    if first is None and names - known:
      first = time.monotonic()
    return first is not None and time.monotonic() - first >= seconds

  return when


def rows_grow(job: Job, started: float) -> bool:
  """Returns whether the attempt has written anything.

  Before that, checkpoint folders come and go while it cleans up.
  """
  path = job.workdir / "metrics.jsonl"
  return path.exists() and path.stat().st_mtime > time.time() - (time.monotonic() - started)


def environment(job: Job, fault: str = "") -> dict[str, str]:
  """Returns the environment of a run's processes; `fault` is the value of `JAXRL_FAULT`."""
  return dict(os.environ) | {
    "XLA_FLAGS": f"--xla_force_host_platform_device_count={job.devices}",
    "JAX_COMPILATION_CACHE_DIR": str(job.cache),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAXRL_FAULT": fault,
    "JAXRL_LLM_WARM_STARTS": "off",  # Kills within the warm start must find one.
  }


def _launch(job: Job, fault: str, output: Path) -> list[subprocess.Popen]:
  command = [sys.executable, "-m", "jaxrl_llm.main", *job.flags, f"--workdir={job.url or job.workdir}"]
  return launch(command, job.processes, environment(job, fault), output)


def launch(command: Sequence[str], count: int, settings: Mapping[str, str], output: Path) -> list[subprocess.Popen]:
  """Starts processes that belong together.

  Args:
    command: Command of each.
    count: Number of processes.
    settings: Their environment.
    output: Path of what each prints, without its number.
  """
  address, processes = f"127.0.0.1:{_free_port()}", []
  for index in range(count):
    joined = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)} if count > 1 else {}
    with open(f"{output}.{index}", "a") as file:
      processes.append(subprocess.Popen(command, cwd=ROOT, env={**settings, **joined}, stdout=file, stderr=subprocess.STDOUT))
  return processes


def _free_port() -> int:
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


def rows(workdir: Path) -> list[dict[str, Any]]:
  """Reads the complete rows of the run's metrics."""
  return read_rows(workdir / "metrics.jsonl")


def last_step(workdir: Path) -> int:
  """Returns the last RL step in the run's metrics, or 0 if there is none."""
  return max((row["step"] for row in rows(workdir) if row["phase"] == "rl"), default=0)


def resumed(log: Path) -> int | None:
  """Returns the RL step from which an attempt with this log resumed; None if it began anew."""
  if not log.exists():
    return None
  steps = re.findall(r"resumed .* RL step (\d+)", log.read_text(encoding="utf-8"))
  return int(steps[-1]) if steps else None


def fingerprints(workdir: Path, varies: tuple[str, ...] = ()) -> list[str]:
  """Returns a line for each row of the run's metrics, without what was measured on the machine.

  Numbers have the shortest form that gives the same bits. `varies` has prefixes of further metrics
  to leave out.
  """
  return [
    json.dumps({name: x for name, x in reproducible(row).items() if not name.startswith(varies)}, sort_keys=True)
    for row in rows(workdir)
  ]


def final_arrays(workdir: Path) -> Mapping[str, np.ndarray]:
  """Reads the arrays of the run's last checkpoint, by path."""
  step = max(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal())
  folder = (workdir / "checkpoints" / str(step) / "arrays").absolute()
  with ocp.PyTreeCheckpointer() as reading:
    leaves = reading.metadata(folder).item_metadata.tree
    # Restored as NumPy arrays, whatever devices they were on.
    on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), leaves)
    restored = reading.restore(folder, restore_args=on_host)
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(restored)}


def mismatches(golden: Path, other: Path, *, varies: tuple[str, ...] = ()) -> int:
  """Counts the differences between two finished runs, in any bit.

  It compares the rows of the metrics, the samples and the arrays. Rows and arrays that only one run
  has count as well. `varies` has prefixes of further
  metrics that are not compared.
  """
  ours, theirs = fingerprints(other, varies), fingerprints(golden, varies)
  count = abs(len(ours) - len(theirs)) + sum(a != b for a, b in zip(ours, theirs, strict=False))
  count += (golden / "samples.jsonl").read_bytes() != (other / "samples.jsonl").read_bytes()
  arrays, expected = final_arrays(other), final_arrays(golden)
  count += len(arrays.keys() ^ expected.keys())
  return count + sum(arrays[name].tobytes() != expected[name].tobytes() for name in arrays.keys() & expected.keys())
