"""Worker: one engine in a process of its own, with a JSON object per line on stdin and stdout.

  parent: {"job": {...}, "warm": 2}
  worker: {"about": ..., "loaded_bytes": ..., "warm": [...], ...} once it is loaded and compiled
  parent: {"run": seed}
  worker: {"seconds": ..., "tokens": ..., "peak_bytes": ..., ...} and the results of the run
  parent: {"stop": true}
  worker: ends

Every error is returned as {"error": "..."}. The module needs NumPy and nothing of `jaxrl_llm`,
because peers have interpreters of their own.
"""

import gc
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.benchmarks.engines.job import Job

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")
_RESET_PEAK = "5"

WARM_SEED = 10**6


class Generated(NamedTuple):
  """Results of one generation of a sampler.

  Attributes:
    lengths: Number of tokens of each response, including the stop token.
    mean_logprob: Mean log-probability of all drawn tokens, as reported by the engine. Engines that
      sample from the same distribution must agree on it.
  """

  lengths: Sequence[int]
  mean_logprob: float

  @property
  def tokens(self) -> int:
    """Number of drawn tokens."""
    return int(np.sum(self.lengths))


class Stepped(NamedTuple):
  """Results of one update.

  Attributes:
    tokens: Number of real tokens; a prompt counts once for each of its responses.
    loss: Loss before the update.
    grad_norm: Global norm of the gradient, before clipping.
  """

  tokens: int
  loss: float
  grad_norm: float


class Engine(NamedTuple):
  """Loaded engine.

  Attributes:
    about: Versions and settings, for the report.
    run: Function `(seed) -> results` of one generation or one update, which returns when every
      result is on the host.
  """

  about: str
  run: Callable[[int], Generated | Stepped]


def status_bytes(field: str) -> int | None:
  """Reads a size of this process from Linux's status, such as VmRSS or VmHWM; None elsewhere."""
  if not _STATUS.exists():
    return None
  for line in _STATUS.read_text().splitlines():
    if line.startswith(f"{field}:"):
      return int(line.split()[1]) * 1024
  return None


def resident_bytes() -> int | None:
  """Returns the memory that this process holds now, or None if the system does not report it."""
  return status_bytes("VmRSS")


def reset_peak() -> bool:
  """Resets the peak of the memory; returns False if the system does not allow it."""
  try:
    _CLEAR_REFS.write_text(_RESET_PEAK)
  except OSError:
    return False
  return True


def peak_bytes() -> int:
  """Returns the peak of the memory since the last reset, or else since the process's start."""
  peak = status_bytes("VmHWM")
  if peak is not None:
    return peak
  import resource

  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else peak * 1024


def serve(load: Callable[[Any], Engine], job_type: type[NamedTuple] = Job) -> None:
  """Answers the parent until it says stop or goes away.

  Args:
    load: Function that reads the weights and everything else that a run needs.
    job_type: Type of the job that is passed to `load`.
  """
  requests, answers = sys.stdin, os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
  # The output of libraries must not appear between the answers.
  os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
  engine = None
  for line in requests:
    request = json.loads(line)
    if "stop" in request:
      return
    try:
      if "job" in request:
        fields = {
          name: tuple(value) if isinstance(value, list) else value for name, value in request["job"].items()
        }
        engine, answer = _load(load, job_type(**fields), request.get("warm", 1))
      else:
        answer = _run(engine, request["run"])
    except Exception as error:  # The parent reports the engine; the traceback is in the log.
      traceback.print_exc()
      answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers)


def _load(load: Callable[[Any], Engine], job: Any, num_warm: int) -> tuple[Engine, dict[str, Any]]:
  started = time.perf_counter()
  engine = load(job)
  gc.collect()
  loaded, loaded_bytes = time.perf_counter(), resident_bytes()
  warm = [_plain(engine.run(WARM_SEED + seed)) for seed in range(num_warm)]
  seconds = dict(load_seconds=loaded - started, warm_seconds=time.perf_counter() - loaded)
  return engine, dict(about=engine.about, loaded_bytes=loaded_bytes, warm=warm, **seconds)


def _run(engine: Engine, seed: int) -> dict[str, Any]:
  gc.collect()
  idle_bytes, was_reset = resident_bytes(), reset_peak()
  started, started_cpu = time.perf_counter(), time.process_time()
  results = engine.run(seed)
  # The CPU time of all cores together. Other programs disturb it less than the wall time.
  seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
  memory = dict(idle_bytes=idle_bytes, peak_bytes=peak_bytes(), peak_was_reset=was_reset)
  return _plain(results) | dict(seconds=seconds, cpu_seconds=cpu_seconds, **memory)


def _plain(results: Generated | Stepped) -> dict[str, Any]:
  """Converts results to plain Python values for JSON."""
  return {name: np.asarray(value).tolist() for name, value in (results._asdict() | {"tokens": results.tokens}).items()}
