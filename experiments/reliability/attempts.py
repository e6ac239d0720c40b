"""One attempt at a run after the other: started, killed at a moment that is chosen beforehand, and read afterwards."""

import contextlib
import json
import os
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
from jaxrl_llm.workdir.metrics import read_rows

ROOT = Path(__file__).resolve().parents[2]

VARIES = ("timing_s/", "perf/throughput", "perf/compiles", "perf/max_memory_allocated_gb")
"""What depends on the clock and the machine."""

_LOOK_SECONDS = 0.002
_LIMIT_SECONDS = 600.0


class Job(NamedTuple):
  """A run that is started again and again.

  Attributes:
    flags: of its command line, without the workdir.
    workdir: of the run.
    processes: that it has.
    devices: simulated ones of each process.
    every: RL steps from one checkpoint to the next.
    cache: folder of compiled programs, so that an attempt need not compile what another has.
  """

  flags: tuple[str, ...]
  workdir: Path
  processes: int
  devices: int
  every: int
  cache: Path


class Ended(NamedTuple):
  """What became of an attempt.

  Attributes:
    statuses: of its processes; minus the signal's number for one that a signal ended.
    struck: whether it was killed; False for one that came to its end before.
    seconds: from the signal until all processes were gone; 0 where it was not killed.
    step: last RL step that it had written.
    resumed: RL step that it went on from; None where it began anew.
  """

  statuses: tuple[int, ...]
  struck: bool
  seconds: float
  step: int
  resumed: int | None


When = Callable[[Job, Sequence[subprocess.Popen], float], bool]
"""Whether to strike now: asked every few milliseconds, with the time that the attempt was started."""


def attempt(job: Job, *, when: When | None = None, victims: Sequence[int] = (0,), kind: int = signal.SIGKILL, fault: str = "") -> Ended:
  """Starts the run and waits for its end, or brings it about.

  Args:
    job: the run.
    when: to send the signal; None never.
    victims: processes that it is sent to.
    kind: of signal.
    fault: for `JAXRL_FAULT`.

  Raises:
    TimeoutError: it neither ended nor could be struck within ten minutes; its processes are killed.
  """
  number = logs.number(job.workdir / "logs")
  started, struck = time.monotonic(), None
  processes = _launch(job, fault, job.workdir.with_name(f"{job.workdir.name}.out"))
  try:
    while any(process.poll() is None for process in processes):
      if time.monotonic() - started > _LIMIT_SECONDS:
        raise TimeoutError(f"attempt {number} at {job.workdir} took more than {_LIMIT_SECONDS:.0f} s; see its logs")
      if struck is None and any(process.poll() == -signal.SIGKILL for process in processes):  # By a fault of its own.
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
  log = job.workdir / "logs" / f"attempt-{number}.log"
  seconds = gone - struck if struck is not None else 0.0
  return Ended(statuses, struck_at_all and any(statuses), seconds, last_step(job.workdir), _resumed(log))


def _launch(job: Job, fault: str, output: Path) -> list[subprocess.Popen]:
  address = f"127.0.0.1:{_free_port()}"
  command = [sys.executable, "-m", "jaxrl_llm.main", *job.flags, f"--workdir={job.workdir}"]
  found = []
  for index in range(job.processes):
    settings = dict(os.environ) | {
      "XLA_FLAGS": f"--xla_force_host_platform_device_count={job.devices}",
      "JAX_COMPILATION_CACHE_DIR": str(job.cache),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
      "JAXRL_FAULT": fault,
    }
    if job.processes > 1:
      settings |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(job.processes), "JAX_PROCESS_ID": str(index)}
    with open(f"{output}.{index}", "a") as file:
      found.append(subprocess.Popen(command, cwd=ROOT, env=settings, stdout=file, stderr=subprocess.STDOUT))
  return found


def _free_port() -> int:
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


def rows(workdir: Path) -> list[dict[str, Any]]:
  """Rows of the run's metrics that are whole."""
  return read_rows(workdir / "metrics.jsonl")


def last_step(workdir: Path) -> int:
  """Last RL step in the run's metrics; 0 where there is none."""
  return max((row["step"] for row in rows(workdir) if row["phase"] == "rl"), default=0)


def _resumed(log: Path) -> int | None:
  if not log.exists():
    return None
  found = re.findall(r"resumed .* RL step (\d+)", log.read_text(encoding="utf-8"))
  return int(found[-1]) if found else None


def fingerprints(workdir: Path) -> list[str]:
  """A line for each row of the run's metrics: its step, and every number in the shortest form that gives the same bits."""
  return [json.dumps({name: x for name, x in row.items() if not name.startswith(VARIES)}, sort_keys=True) for row in rows(workdir)]


def final_arrays(workdir: Path) -> Mapping[str, np.ndarray]:
  """The arrays of the run's last checkpoint, by path."""
  step = max(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal())
  folder = (workdir / "checkpoints" / str(step) / "arrays").absolute()
  with ocp.PyTreeCheckpointer() as reading:
    leaves = reading.metadata(folder).item_metadata.tree
    on_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), leaves)  # Whatever devices they were on.
    restored = reading.restore(folder, restore_args=on_host)
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(restored)}


def mismatches(golden: Path, other: Path) -> int:
  """How many rows of metrics, samples and arrays of two finished runs differ in any bit; rows that one lacks count."""
  ours, theirs = fingerprints(other), fingerprints(golden)
  count = abs(len(ours) - len(theirs)) + sum(a != b for a, b in zip(ours, theirs, strict=False))
  count += (golden / "samples.jsonl").read_bytes() != (other / "samples.jsonl").read_bytes()
  arrays, expected = final_arrays(other), final_arrays(golden)
  count += len(arrays.keys() ^ expected.keys())
  return count + sum(arrays[name].tobytes() != expected[name].tobytes() for name in arrays.keys() & expected.keys())
