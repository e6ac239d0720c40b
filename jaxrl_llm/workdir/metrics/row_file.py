"""A file of rows that a kill at any moment leaves readable, and that a full disk does not spoil."""

import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxrl_llm.workdir import disk

Row = dict[str, Any]

RESERVED = ("step", "phase", "nonfinite")
"""Names in a row that are no metric's."""

_log = logging.getLogger(__name__)


def read_rows(path: str | os.PathLike) -> list[Row]:
  """Rows of a `.jsonl` file, also while a run is writing it.

  Args:
    path: the file. One that is missing has no rows.

  Returns:
    The rows in the order of the file. A torn last line is left out; any other line that is not a row is left out with a warning.
  """
  return [row for _, row in read_lines(Path(path))]


class RowFile:
  """An append-only file of JSON rows that a kill at any moment leaves readable."""

  def __init__(self, path: Path):
    path.parent.mkdir(parents=True, exist_ok=True)
    self.path = path
    self.pending: list[Row] = []
    lines = read_lines(path)
    self.phase_steps: dict[str, int] = {}
    self._count(row for _, row in lines)
    if path.exists() and path.stat().st_size != sum(len(line) for line, _ in lines):
      _replace(path, lines)  # A torn line must go before the next row is glued to it.
    self._fd = self._open()

  def append(self, rows: list[Row]) -> None:
    """Appends all rows, after those that have been waiting for room; where there is none, they wait as well."""
    waited, together = len(self.pending), self.pending + rows
    try:
      self._write(together)
    except OSError as error:
      if not disk.is_full(error):
        raise
      self.pending = together
      self._count(rows)
      if not waited:
        _log.warning("%s: the disk is full; its rows wait in memory for room", self.path)
      return
    if waited:
      _log.warning("%s: there is room again; %d rows that waited for it are written", self.path, waited)
    self.pending = []
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

  def truncate(self, keep: Callable[[Row], bool]) -> int:
    """Removes rows; returns how many."""
    lines = read_lines(self.path)
    kept = [(line, row) for line, row in lines if keep(row)]
    if len(kept) < len(lines):
      _replace(self.path, kept)
      os.close(self._fd)
      self._fd = self._open()
      self.phase_steps = {}
      self._count(row for _, row in kept)
    return len(lines) - len(kept)

  def close(self) -> None:
    """Writes what waits, where there is room now, and closes the file."""
    if self._fd >= 0:
      if self.pending:
        self.append([])
      if self.pending:
        _log.warning("%s: lacks its last %d rows, for want of room", self.path, len(self.pending))
      os.close(self._fd)
      self._fd = -1

  def _open(self) -> int:
    return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

  def _count(self, rows: Iterable[Row]) -> None:
    for row in rows:
      self.phase_steps[row["phase"]] = max(row["step"], self.phase_steps.get(row["phase"], row["step"]))


class NoFile:
  """In the place of a `RowFile`: counts rows."""

  def __init__(self):
    self.phase_steps: dict[str, int] = {}
    self.pending: list[Row] = []

  def append(self, rows: list[Row]) -> None:
    """Counts them."""
    for row in rows:
      self.phase_steps[row["phase"]] = max(row["step"], self.phase_steps.get(row["phase"], row["step"]))

  def truncate(self, keep: Callable[[Row], bool]) -> int:
    """Begins to count anew."""
    del keep
    self.phase_steps = {}
    return 0

  def close(self) -> None:
    """Nothing is open."""


def read_lines(path: Path) -> list[tuple[bytes, Row]]:
  """Whole lines that are rows, each with the bytes that it was read from."""
  if not path.exists():
    return []
  lines = path.read_bytes().splitlines(keepends=True)
  if lines and not lines[-1].endswith(b"\n"):
    lines.pop()  # Torn by a kill, or half written this moment.
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
    _log.warning("%s: left out %d lines that are not rows, the first at line %d", path, len(bad), bad[0])
  return rows


def _replace(path: Path, lines: list[tuple[bytes, Row]]) -> None:
  """Replaces the file in one step: a kill leaves the old file or the new one."""
  temporary = path.with_name(path.name + ".tmp")
  with open(temporary, "wb") as file:
    file.write(b"".join(line for line, _ in lines))
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)
  folder = os.open(path.parent, os.O_RDONLY)
  try:
    os.fsync(folder)  # The new name itself must reach the disk.
  finally:
    os.close(folder)
