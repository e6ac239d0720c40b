"""TensorBoard's event files: a view of the rows, never the truth."""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxrl_llm import disk
from jaxrl_llm.metrics.row_file import RESERVED, Row


class TensorBoard:
  """Event files, one folder per phase, always rebuildable from the rows."""

  def __init__(self, folder: Path):
    try:
      from tensorboardX import SummaryWriter  # Lazy: it takes a while, and runs without events do not need it.
      from tensorboardX.proto.summary_pb2 import Summary
    except ImportError as error:
      raise ImportError(
        "TensorBoard event files need tensorboardX: pip install tensorboardX, or set config.log.tensorboard = False"
      ) from error
    self._make, self._summary = SummaryWriter, Summary
    self._folder = folder
    self._writers: dict[str, Any] = {}
    self.is_lost = False  # Whether the files lack rows, and have to be made anew.

  def rebuild(self, rows: Iterable[Row]) -> None:
    """From the first row; not at all where the disk is full, until the next row."""
    self.close()
    shutil.rmtree(self._folder, ignore_errors=True)
    for row in rows:
      self.add(row)

  def add(self, row: Row) -> None:
    """Adds a row, unless some are lost already: to a full disk."""
    self.is_lost = self.is_lost or any(_is_dead(writer) for writer in self._writers.values())
    if self.is_lost:
      return
    try:
      self._add(row)
    except OSError as error:
      if not disk.is_full(error):
        raise
      self.is_lost = True

  def _add(self, row: Row) -> None:
    if (phase := row["phase"]) not in self._writers:
      # The purge mark makes a TensorBoard that has been watching since before a restart forget the points that it holds in memory.
      self._writers[phase] = self._make(str(self._folder / phase), purge_step=0, flush_secs=30)
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name not in RESERVED}
    numbers |= {name: float(value) for name, value in row.get("nonfinite", {}).items()}
    # One event for the whole row: `add_scalar` would write one per number, which makes a rebuild ten times slower.
    values = [self._summary.Value(tag=_tag(name), simple_value=value) for name, value in numbers.items()]
    self._writers[phase].file_writer.add_summary(self._summary(value=values), row["step"])

  def close(self) -> None:
    """Closes the files; the next row opens new ones."""
    for writer in self._writers.values():
      try:
        writer.close()
      except OSError as error:  # What is lost here, the next writer makes again from the rows.
        if not disk.is_full(error):
          raise
    self._writers, self.is_lost = {}, False


def _is_dead(writer: Any) -> bool:
  """Whether the thread behind a writer has met a full disk and is gone: the queue to it would hold up the run once it is full."""
  worker = getattr(writer.file_writer.event_writer, "_worker", None)
  return worker is not None and not worker.is_alive()


def _tag(name: str) -> str:
  """The name as TensorBoard allows it: `eval/pass@4` becomes `eval/pass_4`."""
  return re.sub(r"[^-/\w.]", "_", name)
