"""The log of each attempt at a run: what a person watching it saw, with the time of day, and how it ended.

`WORKDIR/logs/attempt-K.log` is process 0's, `attempt-K.process-I.log` those of the others; an attempt that failed before it could train
has one as well.
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
  """Whole lines to a file, or to none, each with the time; what cannot be written is let go: a log must not end a run."""

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
  """A stream whose whole lines go to a log as well."""

  def __init__(self, stream: io.TextIOBase, log: Log):
    self._stream, self._log, self._rest = stream, log, ""

  def write(self, text: str) -> int:
    self._stream.write(text)
    *lines, self._rest = (self._rest + text).split("\n")
    if lines:
      self._log.write("\n".join(lines))
    return len(text)

  def flush(self) -> None:
    self._stream.flush()

  def isatty(self) -> bool:
    return self._stream.isatty()

  def fileno(self) -> int:
    return self._stream.fileno()

  @property
  def encoding(self) -> str:
    return self._stream.encoding


def number(folder: Path) -> int:
  """The number of the next attempt, from 1, by the logs in a folder, which may be missing."""
  found = [int(match[1]) for path in folder.glob("attempt-*.log") if (match := _NAME.fullmatch(path.name))]
  return max(found, default=0) + 1


@contextlib.contextmanager
def logged(folder: Path, attempt: int, *, process: int, command: str) -> Iterator[Log]:
  """Writes down what this process writes to standard error, and what is given to the log, until it ends.

  Args:
    folder: of the logs; made if it is missing.
    attempt: its number.
    process: index of this process among those of the run.
    command: what the user typed.
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
