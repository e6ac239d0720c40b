"""The search for runs in folders, their records, and the series of their metrics."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config import renamed
from jaxrl_llm.config.fields import flatten
from jaxrl_llm.report import data
from jaxrl_llm.report.data import is_number, read_object
from jaxrl_llm.workdir import metrics, owner

MARKS = ("config.json", "metrics.jsonl", "summary.json")
"""Files of which a run's folder holds at least one."""

MAX_DEPTH = 3
"""Number of levels below a folder, such as that of a sweep, that are searched for runs."""

_TRAINING = ("rl", "reward_model")


class RunRecord(NamedTuple):
  """The files of one run.

  Attributes:
    path: Folder of the run.
    name: Name on the page.
    config: Flat config, by dotted name; empty if missing.
    summary: Content of `summary.json`; empty if missing.
    rows: Rows of `metrics.jsonl`.
    state: "finished", "not finished", "failed" or "unknown".
    status: Description of the state.
  """

  path: Path
  name: str
  config: dict[str, Any]
  summary: dict[str, Any]
  rows: list[dict[str, Any]]
  state: str
  status: str

  @property
  def seed(self) -> Any:
    """The seed of the config, or None if unknown."""
    return self.config.get("seed")

  @property
  def is_complete(self) -> bool:
    """Whether the last numbers are the result: the state is "finished" or "unknown"."""
    return self.state in ("finished", "unknown")

  @property
  def num_steps(self) -> int | None:
    """The steps of RL or of a reward model so far, or None if unknown."""
    return max((row["step"] for row in self.rows if row["phase"] in _TRAINING), default=self.summary.get("num_steps"))


def find_runs(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
  """Finds the runs in folders of runs or of sweeps, in the given order and each of them once.

  Returns:
    The folders of the runs, and a message for each path that adds no run or a repeated one.
  """
  unique: dict[Path, Path] = {}
  problems = []
  for path in map(Path, paths):
    if not path.is_dir():
      problems.append(
        f"{path}: found {'a file' if path.exists() else 'nothing'}, expected the folder of a run or of a sweep; skipped"
      )
      continue
    runs = [path] if is_run(path) else sorted(_below(path, MAX_DEPTH), key=_natural)
    if not runs:
      problems.append(f"{path}: contains no run (none of {', '.join(MARKS)}, down to {MAX_DEPTH} levels); skipped")
    repeated = [run for run in runs if run.resolve() in unique]
    if repeated:
      problems.append(f"{path}: {'' if runs == [path] else f'{len(repeated)} of its runs '}given more than once, counted once")
    for run in runs:
      unique.setdefault(run.resolve(), run)
  return list(unique.values()), problems


def is_run(path: Path) -> bool:
  """Returns whether a folder is that of a run."""
  return any((path / name).is_file() for name in MARKS)


def _below(path: Path, depth: int) -> Iterable[Path]:
  for child in path.iterdir():
    if child.is_dir() and not child.name.startswith("."):
      if is_run(child):
        yield child
      elif depth > 1:
        yield from _below(child, depth - 1)


def _natural(path: Path) -> list[str | int]:
  """Returns a sort key by which trial-10 comes after trial-9."""
  return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", str(path)))]


def read_runs(paths: Sequence[Path]) -> tuple[list[RunRecord], list[str]]:
  """Reads the runs in some folders.

  Returns:
    The records of the runs, and a message for each file that is missing or cannot be read.
  """
  names, problems, records = _names(paths), [], []
  for path, name in zip(paths, names, strict=True):
    config, summary = (read_object(path / file) for file in ("config.json", "summary.json"))
    for file, value in (("config.json", config), ("summary.json", summary)):
      if not value:
        problems.append(f"{name}: {file} {'cannot be read' if (path / file).exists() else 'is missing'}")
    rows = metrics.read_rows(path / "metrics.jsonl")
    if not rows:
      problems.append(f"{name}: metrics.jsonl {'has no rows' if (path / 'metrics.jsonl').exists() else 'is missing'}")
    elif broken := (path / "metrics.jsonl").read_bytes().count(b"\n") - len(rows):
      problems.append(f"{name}: {broken} lines of metrics.jsonl are not rows; skipped")
    flat = flatten(renamed.current(config))  # So that runs of two versions may form one arm.
    records.append(RunRecord(path, name, flat, summary, rows, *_state(flat, summary, rows, owner.is_alive(path))))
  return records, problems


def _names(paths: Sequence[Path]) -> list[str]:
  """Returns the shortest ends of the paths that distinguish the runs."""
  parts = [path.resolve().parts for path in paths]
  for length in range(1, max(map(len, parts), default=1) + 1):
    names = ["/".join(x[-length:]) for x in parts]
    if len(set(names)) == len(names):
      return names
  return [str(path) for path in paths]


def _state(
  config: Mapping[str, Any], summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], alive: bool | None
) -> tuple[str, str]:
  status = summary.get("status")
  last = max((row["step"] for row in rows if row["phase"] in _TRAINING), default=0)
  planned = config.get("num_steps")
  where = f"step {last:,} of {planned:,}" if is_number(planned) else f"step {last:,}"
  if status == "finished":
    return "finished", "finished"
  if isinstance(status, str) and status != "running":
    return "failed", f"{status}, {where}"
  if alive is not None:
    return ("not finished", f"running, {where}") if alive else ("failed", f"died, {where}")
  if status is None and not is_number(planned):
    return "unknown", f"no summary, {where}"
  if status is None and last >= planned:
    return "finished", f"no summary, {where}"
  # The files of a killed run look like those of a running one.
  return "not finished", f"running or killed, {where}"


X_AXES = {"step": "RL step", "tokens": "generated tokens", "seconds": "seconds in RL steps"}
"""Names of the x axes of a curve."""


def run_series(run: RunRecord, name: str, phase: str, axis: str = "step") -> tuple[np.ndarray, np.ndarray]:
  """Returns a metric of a run against steps, generated tokens, or the time spent in RL steps.

  Tokens are those of the responses in the training batches, without prompts. Time excludes warm
  start, evaluations and checkpoints, so that runs are compared by their cost of learning.

  Args:
    run: Record of the run.
    name: Name of the metric.
    phase: Phase of its rows.
    axis: Key of `X_AXES`.

  Returns:
    x and y, with one entry per finite number of the metric. Both are empty if the run lacks the
    axis.
  """
  columns = data.series((row for row in run.rows if row["phase"] == phase), name)
  steps, values = (np.array(column, np.float64) for column in columns)
  if axis == "step" or not len(steps):
    return steps, values
  known, totals = _progress(run.rows, axis)
  if phase not in ("rl", "eval") or len(known) < 2:
    return steps[:0], values[:0]
  inside = steps <= known[-1]
  return np.interp(steps[inside], known, totals), values[inside]


def _progress(rows: Sequence[Mapping[str, Any]], axis: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns the RL steps, from 0, and the tokens or seconds spent by their ends."""
  steps, totals = [0.0], [0.0]
  for row in rows:
    if row["phase"] != "rl":
      continue
    spent = row.get("timing_s/step") if axis == "seconds" else _generated(row)
    if is_number(spent):
      steps.append(row["step"])
      totals.append(totals[-1] + spent)
  return np.array(steps), np.array(totals)


def _generated(row: Mapping[str, Any]) -> float | None:
  total, response, prompt = (row.get(name) for name in ("perf/total_num_tokens", "response_length/mean", "prompt_length/mean"))
  if not (is_number(total) and is_number(response) and is_number(prompt)) or response + prompt <= 0:
    return None
  return total * response / (response + prompt)
