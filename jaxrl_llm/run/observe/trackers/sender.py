"""What the process of one tracker does: it follows the rows of a run and sends each of them once.

`metrics.jsonl` stays the source of truth. The file `trackers/NAME.sent` has a line for each step
that was sent. A resumed run repeats the steps after its checkpoint, and those that were sent are
not sent again, so that no step is missing or there twice.
"""

import json
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from jaxrl_llm import report
from jaxrl_llm.messages import MissingPackageError
from jaxrl_llm.run.observe.trackers.entry import FOLDER, Tracker, numbers
from jaxrl_llm.workdir.metrics import read_rows, reproducible
from jaxrl_llm.workdir.metrics.row_file import Row

Key = tuple[str, str, int]
"""Kind of what was sent ("metrics" or "samples"), phase and step."""


class Tail:
  """Reads the rows that are appended to a file, without those of an incomplete last line."""

  def __init__(self, path: Path):
    self._path, self._offset = path, 0

  def read(self) -> list[Row]:
    """Returns the rows since the last call."""
    try:
      with open(self._path, "rb") as file:
        if file.seek(0, 2) < self._offset:
          self._offset = 0  # The file was replaced by a shorter one.
        file.seek(self._offset)
        data = file.read()
    except FileNotFoundError:
      return []
    data = data[: data.rfind(b"\n") + 1]
    self._offset += len(data)
    return [row for line in data.splitlines() if (row := _row(line))]


def _row(line: bytes) -> Row | None:
  try:
    row = json.loads(line)
  except ValueError:
    return None
  return row if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("phase"), str) else None


class Ledger:
  """The steps that were sent, with a checksum of what a repeated run has again."""

  def __init__(self, path: Path):
    self._sent: dict[Key, str] = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
      match line.split(" "):
        case [kind, phase, step, checksum] if step.isdecimal():
          self._sent[kind, phase, int(step)] = checksum
    self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (open as long as the process)
    self.differing: list[Key] = []

  def is_new(self, key: Key, row: Row) -> bool:
    """Returns whether a step is to be sent; notes one that was sent with other numbers."""
    if key not in self._sent:
      return True
    if self._sent[key] != checksum(row):
      self.differing.append(key)
    return False

  def add(self, key: Key, row: Row) -> None:
    """Notes that a step was sent."""
    self._sent[key] = checksum(row)
    self._file.write(" ".join(map(str, (*key, self._sent[key]))) + "\n")


def checksum(row: Row) -> str:
  """Returns a checksum of a row without what the clock or the machine decides."""
  return f"{zlib.crc32(json.dumps(reproducible(row), sort_keys=True).encode()):08x}"


def send_rows(workdir: Path, name: str, tracker: Tracker, wait: Callable[[], bool]) -> list[str]:
  """Sends the rows of a run until it ends, then its figure and page.

  Args:
    workdir: Folder of the run.
    name: Name of the tracker.
    tracker: The tracker, open.
    wait: Function that waits a moment and returns whether the run goes on.

  Returns:
    Lines that the user should know.
  """
  ledger = Ledger(workdir / FOLDER / f"{name}.sent")
  metrics, samples = Tail(workdir / "metrics.jsonl"), Tail(workdir / "samples.jsonl")
  tables: dict[tuple[str, int], list[Row]] = {}
  goes_on = True
  while goes_on:
    goes_on = wait()
    for row in metrics.read():
      if ledger.is_new(key := ("metrics", row["phase"], row["step"]), row):
        tracker.metrics(row["phase"], row["step"], numbers(row))
        ledger.add(key, row)
    rows = samples.read()
    # A table is complete once a whole round has brought no further row of it.
    growing = {(row["phase"], row["step"]) for row in rows} if goes_on else set()
    for row in rows:
      tables.setdefault((row["phase"], row["step"]), []).append(row)
    for place in [place for place in tables if place not in growing]:
      row = {"step": place[1], "phase": place[0], "samples": tables[place]}
      if ledger.is_new(key := ("samples", *place), row):
        tracker.samples(*place, tables[place])
        ledger.add(key, row)
      del tables[place]
  notes = _send_files(workdir, tracker)
  if ledger.differing:
    (_, phase, step), number = ledger.differing[0], len(ledger.differing)
    notes.append(
      f"{number} steps were sent before the run was resumed and repeated with other numbers, the first at {phase} step {step}: "
      "the tracker shows the first ones, metrics.jsonl holds those of the run"
    )
  return notes


def _send_files(workdir: Path, tracker: Tracker) -> list[str]:
  """Sends the learning curves and the page of the report, as far as there are any."""
  page, notes = workdir / "report.html", []
  with tempfile.TemporaryDirectory() as folder:
    figure: Path | None = Path(folder) / "learning_curves.png"
    try:
      figure = report.write_figure(workdir, figure) if read_rows(workdir / "metrics.jsonl") else None
    except MissingPackageError as error:
      figure, notes = None, [f"no picture of the learning curves: {error}"]
    tracker.files(figure, page if page.exists() else None)
  return notes
