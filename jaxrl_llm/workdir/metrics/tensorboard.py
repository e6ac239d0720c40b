"""TensorBoard event files, a view of the rows in `metrics.jsonl`."""

import re
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxrl_llm.messages import MissingPackageError
from jaxrl_llm.workdir import disk
from jaxrl_llm.workdir.metrics.row_file import RESERVED, Row


class TensorBoard:
  """Event files with one folder per phase, which can always be rebuilt from the rows.

  The caller's own thread writes them. tensorboardX's `SummaryWriter` writes through a thread and a
  queue of ten events. A full disk ends the thread, and the next row that finds the queue full would
  block for ever, and the run with it. Its `EventsWriter` has neither, but leaves its file open if
  the last flush fails.
  """

  def __init__(self, folder: Path):
    try:
      # Lazy: the import is slow, and runs without events do not need it.
      from tensorboardX.proto import event_pb2, summary_pb2
      from tensorboardX.record_writer import RecordWriter
    except ImportError as error:
      raise MissingPackageError(
        "TensorBoard event files need tensorboardX: pip install tensorboardX, or set config.log.tensorboard = False"
      ) from error
    self._open, self._events, self._summaries = RecordWriter, event_pb2, summary_pb2
    self._folder = folder
    self._files: dict[str, Any] = {}
    self.is_lost = False  # Whether the files lack rows and must be rebuilt.

  def rebuild(self, rows: Iterable[Row]) -> None:
    """Rebuilds the files from the first row. On a full disk, they stay lost until the next row."""
    self.close()
    shutil.rmtree(self._folder, ignore_errors=True)
    self._write(rows)

  def add(self, row: Row) -> None:
    """Adds a row and flushes it, unless a full disk has already cost rows."""
    if not self.is_lost:
      self._write([row])

  def _write(self, rows: Iterable[Row]) -> None:
    try:
      written = {self._append(row) for row in rows}
      for file in written:
        file.flush()
    except OSError as error:
      if not disk.is_full(error):
        raise
      self.is_lost = True

  def _append(self, row: Row) -> Any:
    """Appends a row to the file of its phase. Returns the file, which is still to be flushed."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name not in RESERVED}
    numbers |= {name: float(value) for name, value in row.get("nonfinite", {}).items()}
    # One event holds the whole row: an event per number makes a rebuild three times slower.
    values = [self._summaries.Summary.Value(tag=_tag(name), simple_value=value) for name, value in numbers.items()]
    file = self._file(row["phase"])
    file.write(self._event(row["step"], summary=self._summaries.Summary(value=values)))
    return file

  def _file(self, phase: str) -> Any:
    """Returns the open file of a phase, with the header that TensorBoard expects."""
    if phase not in self._files:
      (self._folder / phase).mkdir(parents=True, exist_ok=True)
      self._files[phase] = file = self._open(str(self._folder / phase / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"))
      file.write(self._event(0, file_version="brain.Event:2"))
      # A TensorBoard that was open before a restart drops the points in its memory at this mark.
      file.write(self._event(0, session_log=self._events.SessionLog(status=self._events.SessionLog.START)))
    return self._files[phase]

  def _event(self, step: int, **content: Any) -> bytes:
    return self._events.Event(wall_time=time.time(), step=step, **content).SerializeToString()

  def close(self) -> None:
    """Closes the files. The next row opens new ones."""
    for file in self._files.values():
      try:
        file.close()
      except OSError as error:  # The next writer rebuilds what is lost here from the rows.
        if not disk.is_full(error):
          raise
    self._files, self.is_lost = {}, False


def _tag(name: str) -> str:
  """Replaces characters that TensorBoard does not allow: `eval/pass@4` becomes `eval/pass_4`."""
  return re.sub(r"[^-/\w.]", "_", name)
