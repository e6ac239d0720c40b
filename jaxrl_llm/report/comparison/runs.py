"""What a comparison reads of each run's folder, and which folders it looks into."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config.fields import flatten
from jaxrl_llm.report import data
from jaxrl_llm.report.data import is_number, read_object
from jaxrl_llm.workdir import metrics

MARKS = ("config.json", "metrics.jsonl", "summary.json")
"""A folder with one of these is a run's."""

MAX_DEPTH = 3
"""Levels below a folder, such as that of a sweep, in which its runs are looked for."""

_TRAINING = ("rl", "reward_model")


class RunRecord(NamedTuple):
  """One run, as its files tell it.

  Attributes:
    path: its folder.
    name: how the page calls it.
    config: flat, by dotted name; empty where there is none.
    summary: as in `summary.json`; empty where there is none.
    rows: of `metrics.jsonl`.
    state: "finished", "not finished", "failed", or "unknown" where nothing says it.
    status: the same in the run's own words.
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
    """The config's seed; None where it is not known."""
    return self.config.get("seed")

  @property
  def is_complete(self) -> bool:
    """Whether its last numbers are its result: it finished, or nothing says that it did not."""
    return self.state in ("finished", "unknown")

  @property
  def num_steps(self) -> int | None:
    """Steps of RL, or of a reward model, so far; None where nothing says it."""
    return max((row["step"] for row in self.rows if row["phase"] in _TRAINING), default=self.summary.get("num_steps"))


def find(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
  """Finds the runs in folders of runs or of sweeps, each once and in the order given; and writes a line for every path that adds none."""
  found: dict[Path, Path] = {}
  problems = []
  for path in map(Path, paths):
    if not path.is_dir():
      problems.append(f"{path}: found {'a file' if path.exists() else 'nothing'}, expected the folder of a run or of a sweep; left out")
      continue
    runs = [path] if is_run(path) else sorted(_below(path, MAX_DEPTH), key=_natural)
    if not runs:
      problems.append(f"{path}: no run in it (none of {', '.join(MARKS)}, down to {MAX_DEPTH} levels); left out")
    repeated = [run for run in runs if run.resolve() in found]
    if repeated:
      problems.append(f"{path}: {'' if runs == [path] else f'{len(repeated)} of its runs '}given more than once, counted once")
    for run in runs:
      found.setdefault(run.resolve(), run)
  return list(found.values()), problems


def is_run(path: Path) -> bool:
  """Whether a folder is a run's."""
  return any((path / name).is_file() for name in MARKS)


def _below(path: Path, depth: int) -> Iterable[Path]:
  for child in path.iterdir():
    if child.is_dir() and not child.name.startswith("."):
      if is_run(child):
        yield child
      elif depth > 1:
        yield from _below(child, depth - 1)


def _natural(path: Path) -> list[str | int]:
  """So that trial-10 comes after trial-9."""
  return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", str(path)))]


def read(paths: Sequence[Path]) -> tuple[list[RunRecord], list[str]]:
  """Reads the runs in these folders; and writes a line for every file that is missing or cannot be read."""
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
      problems.append(f"{name}: {broken} lines of metrics.jsonl are not rows; left out")
    flat = flatten(config)
    records.append(RunRecord(path, name, flat, summary, rows, *_state(flat, summary, rows)))
  return records, problems


def _names(paths: Sequence[Path]) -> list[str]:
  """The shortest ends of the paths that tell the runs apart."""
  parts = [path.resolve().parts for path in paths]
  for length in range(1, max(map(len, parts), default=1) + 1):
    names = ["/".join(x[-length:]) for x in parts]
    if len(set(names)) == len(names):
      return names
  return [str(path) for path in paths]


def _state(config: Mapping[str, Any], summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
  status = summary.get("status")
  last = max((row["step"] for row in rows if row["phase"] in _TRAINING), default=0)
  planned = config.get("num_steps")
  where = f"step {last:,} of {planned:,}" if is_number(planned) else f"step {last:,}"
  if status == "finished":
    return "finished", "finished"
  if isinstance(status, str) and status != "running":
    return "failed", f"{status}, {where}"
  if status is None and not is_number(planned):
    return "unknown", f"no summary, {where}"
  if status is None and last >= planned:
    return "finished", f"no summary, {where}"
  # A run that was killed has had no chance to say so: its files look like those of one that goes on.
  return "not finished", f"running or killed, {where}"


AXES = {"step": "RL step", "tokens": "generated tokens", "seconds": "seconds in RL steps"}
"""What a curve can be drawn against."""


def series(run: RunRecord, name: str, phase: str, axis: str = "step") -> tuple[np.ndarray, np.ndarray]:
  """A metric of a run, against steps, the tokens generated so far, or the time spent in RL steps so far.

  Tokens are those of the responses in the batches that were trained on, prompts left out; time leaves out warm start, evaluations and
  checkpoints, so that runs are compared by what they learn with.

  Args:
    run: Run to look at.
    name: Name of the metric.
    phase: Phase whose rows it stands in.
    axis: Key of `AXES`.

  Returns:
    x and y, both as long as the metric has finite numbers; empty where the run has no such axis.
  """
  found = data.series((row for row in run.rows if row["phase"] == phase), name)
  steps, values = (np.array(column, np.float64) for column in found)
  if axis == "step" or not len(steps):
    return steps, values
  known, totals = _progress(run.rows, axis)
  if phase not in ("rl", "eval") or len(known) < 2:
    return steps[:0], values[:0]
  inside = steps <= known[-1]
  return np.interp(steps[inside], known, totals), values[inside]


def _progress(rows: Sequence[Mapping[str, Any]], axis: str) -> tuple[np.ndarray, np.ndarray]:
  """RL steps, from 0, and what had been spent by their ends."""
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
