"""Statuses of a sweep's trials, from the launcher's record of processes and from the workdirs."""

import csv
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.launch.rows import varying
from experiments.launch.trial import Trial
from jaxrl_llm.messages import MissingPackageError
from jaxrl_llm.workdir import claim
from jaxrl_llm.workdir.bucket.copies import localize

FINISHED, FAILED, WAITING, RUNNING, STOPPED = "finished", "failed", "waiting", "running", "stopped"
_EVENTS = "attempts.jsonl"
_TAIL = 2**21  # Bytes that are read from the end of a long metrics.jsonl.


class Status(NamedTuple):
  """Status of a trial.

  Attributes:
    state: State, "waiting" | "running" | "finished" | "failed" | "stopped". A stopped trial was
      killed, preempted or interrupted, and a relaunch continues it.
    attempts: Number of processes started for the trial so far, in all launches.
    step: Number of RL steps done.
    num_steps: Number of RL steps planned; None until the run has written its config.
    accuracy_start: Held-out accuracy after the warm start; None before it is measured.
    accuracy: Newest held-out accuracy; the final one if the trial has finished.
    seconds: Wall time of all attempts, in s.
    error: Reason why the trial failed or stopped, in one line.
  """

  state: str
  attempts: int = 0
  step: int = 0
  num_steps: int | None = None
  accuracy_start: float | None = None
  accuracy: float | None = None
  seconds: float = 0.0
  error: str = ""


def note(folder: Path, row_id: str, event: str, **more: Any) -> None:
  """Appends an event to the record of attempts.

  The events are "started", and "ended" with `code`, `seconds` and `error`.
  """
  line = json.dumps({"id": row_id, "event": event, "time": round(time.time(), 3), **more})
  with open(folder / _EVENTS, "a", encoding="utf-8") as file:
    file.write(line + "\n")


def attempts(folder: Path) -> dict[str, list[dict[str, Any]]]:
  """Reads the record of attempts, by row; a torn last line is ignored."""
  events: dict[str, list[dict[str, Any]]] = {}
  path = folder / _EVENTS
  for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
    try:
      event = json.loads(line)
      events.setdefault(event["id"], []).append(event)
    except (ValueError, KeyError, TypeError):
      continue
  return events


def look(trial: Trial, events: Sequence[Mapping[str, Any]], *, is_running: bool = False) -> Status:
  """Determines the status of a trial.

  Args:
    trial: Trial whose workdir is read.
    events: Events of the trial in the record of attempts.
    is_running: Whether a process of this launcher runs the trial.
  """
  workdir = _folder(trial.workdir)
  seconds, error, state = 0.0, "", WAITING
  started = None
  for event in events:
    if event["event"] == "started":
      started = event["time"]
    elif event["event"] == "ended":
      seconds, started = seconds + event.get("seconds", 0.0), None
      unwell = event.get("code", 0) > 0 and event["code"] not in (42, 130) and not event.get("was_stopped")
      error, state = event.get("error", ""), FAILED if unwell else STOPPED
  if is_running:
    state, error = RUNNING, ""
    seconds += time.time() - started if started else 0.0
  elif started is not None:
    state, error = STOPPED, "the launcher was killed"
  summary = _read(workdir / "summary.json")
  if claim.is_finished(workdir) and not is_running:
    state, error = FINISHED, ""
  progress = _progress(workdir / "metrics.jsonl")
  return Status(
    state=state,
    attempts=sum(event["event"] == "started" for event in events),
    step=progress["step"],
    num_steps=(_read(workdir / "config.json") or {}).get("num_steps"),
    accuracy_start=summary.get("accuracy_start", progress["accuracy_start"]),
    accuracy=summary.get("accuracy_final", progress["accuracy"]) if state == FINISHED else progress["accuracy"],
    seconds=seconds,
    error=error,
  )


def _folder(workdir: str) -> Path:
  """Returns the folder of a trial, or a copy if it is in a bucket and has begun."""
  try:
    return localize(workdir, checkpoints=False)
  except (MissingPackageError, ValueError):
    return Path(workdir)


def _progress(path: Path) -> dict[str, Any]:
  """Reads the newest step and the accuracies from a run's metrics."""
  progress: dict[str, Any] = {"step": 0, "accuracy_start": None, "accuracy": None}
  try:
    with open(path, "rb") as file:
      skipped = max(os.path.getsize(path) - _TAIL, 0)
      file.seek(skipped)
      lines = file.read().split(b"\n")
  except OSError:
    return progress
  for line in lines:
    try:
      row = json.loads(line)
      phase, step = row["phase"], row["step"]
    except (ValueError, KeyError, TypeError):
      continue
    if phase == "rl":
      progress["step"] = max(progress["step"], step)
    elif phase == "eval":
      progress["accuracy"] = row.get("eval/accuracy", progress["accuracy"])
      if progress["accuracy_start"] is None and not skipped:
        progress["accuracy_start"] = progress["accuracy"]
  return progress


def _read(path: Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_bytes())
  except (OSError, ValueError):
    return {}
  return value if isinstance(value, dict) else {}


def write_csv(trials: Sequence[Trial], statuses: Sequence[Status], path: Path) -> None:
  """Writes `summary.csv`, one row per trial, atomically; `value_in` reads a cell."""
  fields = varying([trial.row for trial in trials])
  out = io.StringIO()
  writer = csv.writer(out, lineterminator="\n")
  writer.writerow(
    ["id", *fields, "state", "attempts", "steps", "accuracy_start", "accuracy_final", "seconds", "workdir", "error"]
  )
  for trial, at in zip(trials, statuses, strict=True):
    overrides = trial.row.overrides
    final = at.accuracy if at.state == FINISHED else None
    numbers = ["" if x is None else x for x in (at.attempts, at.step, at.accuracy_start, final, round(at.seconds, 3))]
    settings = [cell(overrides[field]) if field in overrides else "" for field in fields]
    writer.writerow([trial.row.id, *settings, at.state, *numbers, trial.workdir, at.error])
  temporary = path.with_suffix(".csv.tmp")
  temporary.write_text(out.getvalue(), encoding="utf-8")
  os.replace(temporary, path)


def cell(value: Any) -> str:
  """Formats an override for `summary.csv`: as JSON, but without quotes if it is a plain word.

  Example:
    >>> [cell(x) for x in ("sapo", "1", 1e-4, (1, 2), None, True)]
    ['sapo', '"1"', '0.0001', '[1, 2]', 'null', 'true']
  """
  if isinstance(value, str) and value and value_in(value) == value:
    return value
  return json.dumps(value)


def value_in(text: str) -> Any:
  """Reads an override from a cell of `summary.csv`; tuples become lists.

  The result is also None if the row has no such override.

  Example:
    >>> [value_in(x) for x in ("sapo", '"1"', "0.0001", "[1, 2]", "null", "true", "")]
    ['sapo', '1', 0.0001, [1, 2], None, True, None]
  """
  try:
    return json.loads(text) if text else None
  except ValueError:
    return text
