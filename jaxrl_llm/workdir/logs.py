"""The log of each attempt at a run: the lines shown to the user, their times, and the outcome.

Process 0 writes `WORKDIR/logs/attempt-K.log`, process I writes `attempt-K.process-I.log`. An
attempt that fails before it can train has a log as well.
"""

import contextlib
import io
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"attempt-(\d+)\.log")


class Log:
  """A log of whole lines, each with its time, in a file or in none.

  Lines that cannot be written are dropped, because a log must not end a run.
  """

  def __init__(self, path: Path | None):
    self.path = path

  def write(self, text: str) -> None:
    """Appends one or more lines."""
    if self.path is None:
      return
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError), open(self.path, "a", encoding="utf-8", errors="backslashreplace") as file:
      file.write("".join(f"{now} {line}\n" for line in text.splitlines()))


class _Doubled(io.TextIOBase):
  """A stream that copies its whole lines to a log."""

  def __init__(self, stream: io.TextIOBase, log: Log):
    self._stream, self._log, self._rest = stream, log, ""
    self.flush, self.isatty, self.fileno = stream.flush, stream.isatty, stream.fileno

  def write(self, text: str) -> int:
    self._stream.write(text)
    *lines, self._rest = (self._rest + text).split("\n")
    if lines:
      self._log.write("\n".join(lines))
    return len(text)

  @property
  def encoding(self) -> str:
    return self._stream.encoding


def number(folder: Path) -> int:
  """Returns the number of the next attempt, from 1, given a folder of logs that may be missing."""
  numbers = [int(match[1]) for path in folder.glob("attempt-*.log") if (match := _NAME.fullmatch(path.name))]
  return max(numbers, default=0) + 1


@contextlib.contextmanager
def logged(folder: Path, attempt: int, *, process: int, command: str) -> Iterator[Log]:
  """Opens the log of an attempt, to which the standard error of this process is copied.

  The log is complete when the context ends.

  Args:
    folder: Folder of the logs, which is created if it is missing.
    attempt: Number of the attempt.
    process: Index of this process among those of the run.
    command: Command that the user typed.
  """
  path: Path | None = folder / (f"attempt-{attempt}.log" if process == 0 else f"attempt-{attempt}.process-{process}.log")
  try:
    folder.mkdir(exist_ok=True)
    path.touch()
  except OSError:
    path = None
  log, before = Log(path), sys.stderr
  log.write(f"attempt {attempt}: {command}\nprocess {os.getpid()} on {socket.gethostname()}")
  sys.stderr = _Doubled(before, log)
  try:
    yield log
  except BaseException:
    log.write(traceback.format_exc())
    raise
  finally:
    sys.stderr = before
    log.write("ended")
