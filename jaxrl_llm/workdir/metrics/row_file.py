"""A file of rows that stays readable after a kill at any moment, and on a full disk."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.workdir import disk

Row = dict[str, Any]

RESERVED = ("step", "phase", "nonfinite")
"""Names in a row that no metric may have."""

MEASURED = (
  "timing_s/", "perf/throughput", "perf/compiles", "perf/recompiles", "perf/max_memory_allocated_gb", "perf/learner_idle",
  "perf/reward_overlap_s", "samplers/",
)  # fmt: skip
"""Prefixes of the metrics that depend on the clock, the machine or the process."""

_log = logging.getLogger(__name__)


def reproducible(row: Mapping[str, Any]) -> Row:
  """Returns a row without what was measured on the machine: all that a repeated run has again.

  Example:
    >>> reproducible({"step": 1, "actor/loss": 0.5, "timing_s/update": 0.1})
    {'step': 1, 'actor/loss': 0.5}
  """
  return {name: value for name, value in row.items() if not name.startswith(MEASURED)}


def read_rows(path: str | os.PathLike) -> list[Row]:
  """Reads the rows of a `.jsonl` file, even while a run is writing it.

  A missing file has no rows. A torn last line is dropped silently. Any other line that is not a row
  is dropped with a warning.
  """
  return [row for _, row in read_lines(Path(path))]


class RowFile:
  """An append-only file of JSON rows.

  Without a path it only counts them, in a process that leaves the writing to another one.
  """

  def __init__(self, path: Path | None):
    self.path, self._fd = path, -1
    self.pending: list[Row] = []
    self.phase_steps: dict[str, int] = {}
    if path is None:
      return
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = read_lines(path)
    self._count(row for _, row in lines)
    if path.exists() and path.stat().st_size != sum(len(line) for line, _ in lines):
      _rewrite(path, lines)  # Otherwise the next row would continue the torn line.
    self._fd = self._open()

  def append(self, rows: list[Row]) -> None:
    """Appends rows after those that wait for room. If there is still no room, all of them wait."""
    waited, together = len(self.pending), self.pending + rows
    try:
      if self.path is not None:
        self._write(together)
    except OSError as error:
      if not disk.is_full(error):
        raise
      self.pending = together
      if not waited:
        _log.warning("%s: the disk is full; rows wait in memory until there is room", self.path)
    else:
      self.pending = []
      if waited:
        _log.warning("%s: there is room again; %d waiting rows were written", self.path, waited)
    self._count(rows)

  def _write(self, rows: list[Row]) -> None:
    data = b"".join(json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows)
    size = os.fstat(self._fd).st_size
    try:
      while data:
        data = data[os.write(self._fd, data) :]
      os.fsync(self._fd)
    except OSError:
      os.ftruncate(self._fd, size)
      raise

  def truncate(self, keep: Callable[[Row], bool]) -> bool:
    """Removes the rows for which `keep(row)` is false. Returns whether there were any."""
    if self.path is None:
      self.phase_steps = {}
      return False
    lines = read_lines(self.path)
    kept = [(line, row) for line, row in lines if keep(row)]
    if len(kept) == len(lines):
      return False
    _rewrite(self.path, kept)
    os.close(self._fd)
    self._fd = self._open()
    self.phase_steps = {}
    self._count(row for _, row in kept)
    return True

  def close(self) -> None:
    """Writes the waiting rows, if there is room now, and closes the file."""
    if self._fd >= 0:
      if self.pending:
        self.append([])
      if self.pending:
        _log.warning("%s: the last %d rows are missing because the disk is full", self.path, len(self.pending))
      os.close(self._fd)
      self._fd = -1

  def _open(self) -> int:
    return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

  def _count(self, rows: Iterable[Row]) -> None:
    for row in rows:
      self.phase_steps[row["phase"]] = max(row["step"], self.phase_steps.get(row["phase"], row["step"]))


def read_lines(path: Path) -> list[tuple[bytes, Row]]:
  """Reads the complete lines that are rows. Returns each with its bytes."""
  if not path.exists():
    return []
  lines = path.read_bytes().splitlines(keepends=True)
  if lines and not lines[-1].endswith(b"\n"):
    lines.pop()  # Torn by a kill, or being written at this moment.
  rows, bad = [], []
  for number, line in enumerate(lines, 1):
    try:
      row = json.loads(line)
    except ValueError:
      row = None
    if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("phase"), str):
      rows.append((line, row))
    else:
      bad.append(number)
  if bad:
    _log.warning("%s: dropped %d lines that are not rows, the first at line %d", path, len(bad), bad[0])
  return rows


def _rewrite(path: Path, lines: list[tuple[bytes, Row]]) -> None:
  disk.replace(path, b"".join(line for line, _ in lines), synced=True)
