"""The entry of a run in a tracker: its name, its place, and what a tracker can take."""

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxrl_llm.config.fields import flatten
from jaxrl_llm.report.data import read_object
from jaxrl_llm.workdir.metrics.row_file import RESERVED, Row

FOLDER = "trackers"
"""Folder of a workdir with all that trackers keep there."""

PROJECT = "jaxrl_llm"
"""Name of the runs' project in each tracker, unless a variable of the tracker names another one."""

COLUMNS = ("prompt", "response", "answer", "reward", "advantage", "num_tokens", "stopped", "level")
"""Columns of a table of sample rollouts."""


class TrackerEntry(NamedTuple):
  """The entry of a run in one tracker.

  Attributes:
    id: Random name, kept in the workdir, by which a resumed run goes on in the same entry.
    name: Name to show, that of the workdir.
    config: Values of the config by dotted path, of JSON's types.
    folder: Folder for what the tracker writes locally.
  """

  id: str
  name: str
  config: dict[str, Any]
  folder: Path


@runtime_checkable
class Tracker(Protocol):
  """What a run hands to a tracker."""

  def metrics(self, phase: str, step: int, numbers: Mapping[str, float]) -> None:
    """Shows the numbers of a step of a phase, by their names in the tracker."""

  def samples(self, phase: str, step: int, rows: Sequence[Row]) -> None:
    """Shows sample rollouts as a table, with `COLUMNS`."""

  def files(self, figure: Path | None, report: Path | None) -> None:
    """Shows the learning curves, a picture, and keeps the page of the report."""

  def close(self) -> None:
    """Ends what this process writes; the entry can be opened again."""


def open_record(workdir: Path, tracker: str) -> TrackerEntry:
  """Returns the entry of a run in a tracker, with a new id if there is none yet."""
  folder = workdir / FOLDER
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f"{tracker}.json"
  record = read_object(path)
  if "id" not in record:
    record["id"] = secrets.token_hex(8)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record) + "\n", encoding="utf-8")
    temporary.replace(path)
  return TrackerEntry(record["id"], workdir.resolve().name, flatten(read_object(workdir / "config.json")), folder)


def numbers(row: Row) -> dict[str, float]:
  """Returns the numbers of a row of `metrics.jsonl`, by their names in a tracker.

  Metrics of RL steps and evaluations keep verl's names. Phases count their own steps and share
  names, so that those of another phase begin with its name.

  Example:
    >>> numbers({"step": 1, "phase": "rl", "actor/loss": 0.5, "note": "x", "kl": None, "nonfinite": {"kl": "nan"}})
    {'actor/loss': 0.5, 'kl': nan}
    >>> numbers({"step": 1, "phase": "warm_start", "actor/loss": 2}), numbers({"step": 2, "phase": "eval", "timing_s/eval": 1.5})
    ({'warm_start/actor/loss': 2.0}, {'eval/timing_s/eval': 1.5})
  """
  phase = row["phase"]
  values = {name: float(x) for name, x in row.items() if isinstance(x, int | float) and name not in RESERVED}
  values |= {name: float(x) for name, x in row.get("nonfinite", {}).items()}
  prefix = "" if phase == "rl" else f"{phase}/"
  return {name if name.startswith(prefix) else f"{prefix}{name}": x for name, x in values.items()}


def cells(row: Row) -> list[Any]:
  """Returns the cells of a sample in the order of `COLUMNS`: texts and finite numbers."""
  values = [row.get(name) for name in COLUMNS]
  return [x if isinstance(x, str | bool | int) or (isinstance(x, float) and math.isfinite(x)) else str(x or "") for x in values]
