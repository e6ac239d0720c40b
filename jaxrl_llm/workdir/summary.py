"""Measurements and summary of a run: wall time by phase, metrics of a step, and `summary.json`."""

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.workdir import disk, machine, source
from jaxrl_llm.workdir.record import Record, utc_now


class Clock:
  """A clock of the wall time by phase. `lap` measures a phase and books it for the summary."""

  def __init__(self):
    self._last = time.perf_counter()
    self._booked: dict[str, float] = {}

  def lap(self, name: str) -> dict[str, float]:
    """Returns the seconds since the last lap, as a metric, and books them under a phase."""
    now = time.perf_counter()
    seconds, self._last = now - self._last, now
    self._booked[name] = self._booked.get(name, 0.0) + seconds
    return {f"timing_s/{name}": seconds}

  def settle(self, totals: dict[str, float]) -> None:
    """Adds the seconds booked since the last call to the totals by phase of all attempts."""
    for name, seconds in self._booked.items():
      totals[name] = totals.get(name, 0.0) + seconds
    self._booked = {}


def peak_memory_gb() -> float:
  """Returns the peak memory so far, in GB.

  It is that of the fullest local device if the backend reports it, and otherwise that of the
  process.
  """
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  device_peak = max((s.get("peak_bytes_in_use", 0) for s in stats), default=0)
  if device_peak:
    return device_peak / 1e9
  # getrusage counts bytes on macOS and KiB elsewhere.
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def to_floats(metrics: dict[str, jax.Array]) -> dict[str, float]:
  """Copies metrics to the host."""
  return {name: float(value) for name, value in jax.device_get(metrics).items()}


def combine(updates: list[dict[str, float]]) -> dict[str, float]:
  """Combines the metrics of a step's updates in one row.

  Maxima and minima stay extremes, skipped updates are added up, and everything else is averaged.

  Sampler and learner hold the same weights only before the first update, and not even then if the
  sampler lags. Metrics that compare the sampler with the current policy, such as `rollout_corr/kl`,
  are therefore taken from the first update. The weights of a correction, `rollout_corr/rollout_is*`
  and `rollout_rs*`, compare the sampler with the old policy and are valid at every update.
  """
  row = {}
  for name in updates[0]:
    values = [metrics[name] for metrics in updates]
    if name.startswith("rollout_corr/") and not name.startswith(("rollout_corr/rollout_is", "rollout_corr/rollout_rs")):
      row[name] = values[0]
    elif name == "train/skipped":
      row["train/skipped_steps"] = sum(values)
    else:
      fold = max if name.endswith("/max") else min if name.endswith("/min") else np.mean
      row[name] = float(fold(values))
  return row


def step_performance(row: Mapping[str, Any], tokens: int) -> dict[str, Any]:
  """Returns time, throughput and memory of an RL step.

  `perf/learner_idle` is the fraction of the step that the learner waited for rollouts (verl's
  `trainer/idle_ratio`).

  Args:
    row: Metrics of the step with its `timing_s/*`.
    tokens: Number of tokens in all its sequences, prompts included.

  Example:
    >>> step_performance({"timing_s/rollout": 1.0, "timing_s/update": 3.0}, 8)["perf/learner_idle"]
    0.25
  """
  seconds = sum(value for name, value in row.items() if name.startswith("timing_s/"))
  return {
    "timing_s/step": seconds,
    "perf/total_num_tokens": tokens,
    "perf/throughput": tokens / seconds,
    "perf/learner_idle": row.get("timing_s/rollout", 0.0) / seconds,
    "perf/max_memory_allocated_gb": peak_memory_gb(),
  }


def write_summary(workdir: Path | None, record: Record, *, objective: str, num_params: int, status: str) -> dict[str, Any]:
  """Writes `summary.json` by one rename, unless the disk is full, and returns the summary.

  Args:
    workdir: Folder of the run; None in a process that leaves the writing to another one.
    record: Record of the run, after `Clock.settle`.
    objective: Name of the objective.
    num_params: Number of weights of the policy.
    status: "running", "finished", or the reason why the run stopped.
  """
  seconds = record.seconds
  summary = {
    "status": status,
    "objective": objective,
    "accuracy_start": record.accuracy_start,
    "accuracy_final": record.accuracy_final,
    "num_steps": record.rl_steps,
    "warm_start_steps": record.warm_steps,
    "tokens": record.tokens,
    "num_params": num_params,
    "wall_seconds": sum(seconds.values()),
    "warm_start_seconds": seconds.get("warm_start", 0.0),
    "rl_seconds": sum(seconds.get(phase, 0.0) for phase in ("weight_sync", "rollout", "reward", "old_logprobs", "advantages", "update")),
    "seconds": dict(seconds),
    "peak_memory_gb": record.peak_memory_gb,
    "predicted_memory_gb": record.predicted_memory_gb,
    "base": record.base,
    "teacher": record.teacher,
    "data": record.data,
    "data_fingerprint": record.data_fingerprint,
    "skipped_steps": record.skipped_steps,
    "failed_saves": record.failed_saves,
    "alarms": (record.alarms or {}).get("counts", {}),  # Number of times that each has begun.
    "attempts": record.attempts,
    "resumed_at": record.resumed_at,
    "command": record.command,
    "branched_from": record.branched_from,
    "started": record.started,
    "finished": utc_now() if status != "running" else None,
    "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}, {os.cpu_count()} host cores",
    "processes": jax.process_count(),
    "processor": machine.processor_name(),
    "environment": machine.numeric_variables(os.environ),
    "versions": machine.versions(),
    "source_sha256": source.source_digest(),
  }
  if workdir is not None:
    disk.write_if_room(workdir / "summary.json", lambda: write_json(workdir / "summary.json", summary))
  return summary


def write_json(path: Path, value: Any) -> None:
  """Writes JSON by one rename."""
  disk.replace(path, json.dumps(value, indent=2) + "\n")
