"""Judgements by the content hash of their question, in memory and in a file that survives kills."""

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm.rewards.rubric.prompt import Scores

_log = logging.getLogger(__name__)


class Judgements:
  """Judgements that are given once and then kept.

  The folder has one file for each process of a run, to which only that process appends, one JSON
  object a line. All are read at the start; that of the own process prevails. A torn line, which a
  kill or a full disk leaves, is ignored. There are no texts in it, only hashes and scores.

  Args:
    folder: Folder of the files, created if missing; None keeps judgements in memory.
    process: Index of this process.

  Raises:
    ValueError: If the folder cannot be read or written.

  Example:
    >>> judgements = Judgements(None)
    >>> judgements.add("0a1b", (1.0, 4.0))
    (1.0, 4.0)
    >>> judgements.get("0a1b"), judgements.get("ffff")
    ((1.0, 4.0), None)
  """

  def __init__(self, folder: Path | None = None, *, process: int = 0):
    self._scores: dict[str, Scores] = {}
    self._lock, self._fd, self._torn, self._full = threading.Lock(), -1, False, False
    if folder is None:
      return
    self._path = folder / f"process-{process}.jsonl"
    try:
      folder.mkdir(parents=True, exist_ok=True)
      for path in sorted(folder.glob("process-*.jsonl"), key=lambda path: (path == self._path, path)):
        self._scores |= _rows(path.read_bytes())
      self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
      size = os.fstat(self._fd).st_size
      self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
    except OSError as error:
      raise ValueError(f"{folder}: found no folder for judgements that can be used ({error.strerror or error})") from error

  def get(self, key: str) -> Scores | None:
    """Returns the scores under a key; None if there are none."""
    return self._scores.get(key)

  def add(self, key: str, scores: Scores) -> Scores:
    """Keeps scores in memory, and in the file unless it cannot be written.

    Returns:
      The scores that are kept: those of another judge that asked the same question, if there are
      any.
    """
    line = json.dumps({"key": key, "scores": scores}).encode() + b"\n"
    with self._lock:
      if (known := self._scores.get(key)) is not None and len(known) == len(scores):
        return known
      if self._fd >= 0:
        # After half a line, a new one begins.
        data = b"\n" * self._torn + line
        try:
          written = os.write(self._fd, data)
          self._torn, problem = written < len(data), "the disk is full" if written < len(data) else None
        except OSError as error:
          problem = error.strerror or str(error)
        if problem and not self._full:
          _log.warning("%s: %s; judgements stay in memory, and a resumed run asks for them again", self._path, problem)
        self._full = self._full or problem is not None
      self._scores[key] = scores
    return scores

  def sync(self) -> None:
    """Waits until the file is on the disk."""
    with self._lock:
      if self._fd >= 0:
        try:
          os.fsync(self._fd)
        except OSError as error:
          _log.warning("%s: %s", self._path, error.strerror or error)

  def close(self) -> None:
    """Closes the file."""
    with self._lock:
      if self._fd >= 0:
        os.close(self._fd)
      self._fd = -1


def _rows(data: bytes) -> Iterator[tuple[str, Scores]]:
  for line in data.splitlines():
    try:
      row = json.loads(line)
      yield str(row["key"]), tuple(float(score) for score in row["scores"])
    except (ValueError, TypeError, LookupError, RecursionError):
      continue  # Torn.
