"""TensorBoard's event files: a view of the rows, never the truth."""

import re
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxrl_llm.workdir import disk
from jaxrl_llm.workdir.metrics.row_file import RESERVED, Row


class TensorBoard:
  """Event files, one folder per phase, always rebuildable from the rows.

  They are written in the caller's own thread. tensorboardX's `SummaryWriter` has a thread and a queue of ten events between: a full disk
  ends the thread, and the next row to find the queue full would wait for ever, and the run with it. Its `EventsWriter` has neither, but
  leaves its file open where the last flush fails.
  """

  def __init__(self, folder: Path):
    try:
      from tensorboardX.proto import event_pb2, summary_pb2  # Lazy: it takes a while, and runs without events do not need it.
      from tensorboardX.record_writer import RecordWriter
    except ImportError as error:
      raise ImportError(
        "TensorBoard event files need tensorboardX: pip install tensorboardX, or set config.log.tensorboard = False"
      ) from error
    self._open, self._events, self._summaries = RecordWriter, event_pb2, summary_pb2
    self._folder = folder
    self._files: dict[str, Any] = {}
    self.is_lost = False  # Whether the files lack rows, and have to be made anew.

  def rebuild(self, rows: Iterable[Row]) -> None:
    """From the first row; not at all where the disk is full, until the next row."""
    self.close()
    shutil.rmtree(self._folder, ignore_errors=True)
    self._write(rows)

  def add(self, row: Row) -> None:
    """Adds a row, to be seen at once, unless some are lost already: to a full disk."""
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
    """Returns the file that it went into, of which the end is still in memory."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name not in RESERVED}
    numbers |= {name: float(value) for name, value in row.get("nonfinite", {}).items()}
    # One event for the whole row: one for each number makes a rebuild three times slower.
    values = [self._summaries.Summary.Value(tag=_tag(name), simple_value=value) for name, value in numbers.items()]
    file = self._file(row["phase"])
    file.write(self._event(row["step"], summary=self._summaries.Summary(value=values)))
    return file

  def _file(self, phase: str) -> Any:
    """The open file of a phase, with what TensorBoard wants at its head."""
    if phase not in self._files:
      (self._folder / phase).mkdir(parents=True, exist_ok=True)
      self._files[phase] = file = self._open(str(self._folder / phase / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"))
      file.write(self._event(0, file_version="brain.Event:2"))
      # This mark makes a TensorBoard that has been watching since before a restart forget the points that it holds in memory.
      file.write(self._event(0, session_log=self._events.SessionLog(status=self._events.SessionLog.START)))
    return self._files[phase]

  def _event(self, step: int, **content: Any) -> bytes:
    return self._events.Event(wall_time=time.time(), step=step, **content).SerializeToString()

  def close(self) -> None:
    """Closes the files; the next row opens new ones."""
    for file in self._files.values():
      try:
        file.close()
      except OSError as error:  # What is lost here, the next writer makes again from the rows.
        if not disk.is_full(error):
          raise
    self._files, self.is_lost = {}, False


def _tag(name: str) -> str:
  """The name as TensorBoard allows it: `eval/pass@4` becomes `eval/pass_4`."""
  return re.sub(r"[^-/\w.]", "_", name)
