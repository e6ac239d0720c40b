"""A folder of results that runs share, each under a key of all that determines it.

A result is written under another name and appears by one rename, with the SHA-256 of each of its
files. Processes that want the same result take turns, so that one of them computes it. The results
that were used least recently are deleted first.
"""

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl_llm.messages import one_line
from jaxrl_llm.workdir import checkpoint, disk
from jaxrl_llm.workdir.checkpoint import manifest

_STEP = 0  # A result is a checkpoint with this number in a folder of its own.
_POLL_SECONDS = 0.2
_LEFT_SECONDS = 24 * 3600  # Age at which the writer of a half-written result has been killed.


class Results(NamedTuple):
  """A folder of results.

  Attributes:
    folder: Folder of the results, made when the first is written.
    max_bytes: Size above which results are deleted.
  """

  folder: Path
  max_bytes: int

  def place(self, key: str) -> Path:
    """Returns the folder of a result."""
    return self.folder / key


class DamagedError(Exception):
  """A result whose files are not as they were written. One line."""


class NotKeptError(Exception):
  """A result that was not written. One line, with the reason."""


@contextlib.contextmanager
def turn(results: Results, key: str, *, waiting: Callable[[], None]) -> Iterator[None]:
  """Takes turns with other processes that want the same result.

  Args:
    results: Folder of the results.
    key: Key of the result.
    waiting: Function called again and again while another process has its turn. It may raise; a
      `TimeoutError` ends the wait without a turn.

  Note:
    The lock is advisory (`flock`), and ends with the process that holds it. Without locks on the
    file system, two processes may compute the same result, and the first to finish keeps its own.
  """
  with contextlib.ExitStack() as stack:
    with contextlib.suppress(OSError):  # `TimeoutError` is one.
      (results.folder / "locks").mkdir(parents=True, exist_ok=True)
      file = stack.enter_context(open(results.folder / "locks" / key, "a"))
      while not disk.lock(file):
        waiting()
        time.sleep(_POLL_SECONDS)
    yield


def read(results: Results, key: str, abstract_arrays: Any) -> tuple[Any, dict[str, Any]] | None:
  """Reads a result, and marks it as used.

  Args:
    results: Folder of the results.
    key: Key of the result.
    abstract_arrays: Arrays of the result as shapes, dtypes and shardings.

  Returns:
    The arrays and the record; None if there is no such result.

  Raises:
    DamagedError: If it cannot be used.
  """
  place = results.place(key)
  if not place.is_dir():
    return None
  try:
    restored = checkpoint.restore_latest(checkpoint.open_checkpoints(place), abstract_arrays, moves=False)
  except (OSError, ValueError) as error:
    trouble = manifest.problem(place / str(_STEP)) if (place / str(_STEP)).is_dir() else None
    raise DamagedError(trouble or one_line(error, typed=False)) from error
  if restored is None:
    raise DamagedError(f"it has no {manifest.NAME}")
  with contextlib.suppress(OSError):
    os.utime(place)
  return restored


def write(results: Results, key: str, arrays: Any, record: dict[str, Any]) -> None:
  """Writes a result, unless there is one with this key, and deletes older ones beyond the size.

  Args:
    results: Folder of the results.
    key: Key of the result.
    arrays: Pytree of arrays.
    record: All else as JSON values.

  Raises:
    NotKeptError: If it was not written. Nothing of it is left.
  """
  needed = sum(x.nbytes for x in jax.tree.leaves(arrays))
  if needed > results.max_bytes:
    raise NotKeptError(f"it takes {needed / 1e9:.1f} GB, which is more than {results.max_bytes / 1e9:g} GB")
  scratch = None
  try:
    results.folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=results.folder))
    saving = checkpoint.open_checkpoints(scratch)
    checkpoint.save(saving, _STEP, arrays, record)
    checkpoint.finish(saving)
    if saving.failure is not None:
      raise NotKeptError(saving.failure)
    if not results.place(key).exists():
      with contextlib.suppress(FileExistsError):
        _rename(scratch, results.place(key))
  except OSError as error:
    raise NotKeptError(one_line(error, typed=False)) from error
  finally:
    if scratch is not None:
      shutil.rmtree(scratch, ignore_errors=True)
  prune(results, spared=key)


def delete(results: Results, key: str) -> None:
  """Deletes a result by one rename; a process that reads it finds it missing or damaged."""
  with contextlib.suppress(OSError):
    gone = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=results.folder))
    with contextlib.suppress(OSError):
      results.place(key).rename(gone / "deleted")
    shutil.rmtree(gone, ignore_errors=True)


def prune(results: Results, *, spared: str) -> None:
  """Deletes the results that were used least recently until the others fit, and old leftovers."""
  sized = []
  for place in results.folder.iterdir():
    with contextlib.suppress(OSError):
      used = place.stat().st_mtime
      if re.fullmatch(r"[0-9a-f]{64}", place.name):
        sized.append((used, sum(path.stat().st_size for path in place.rglob("*") if path.is_file()), place.name))
      elif place.name.startswith(".") and time.time() - used > _LEFT_SECONDS:
        shutil.rmtree(place, ignore_errors=True)
  total = sum(size for _, size, _ in sized)
  for _, size, key in sorted(sized):
    if total > results.max_bytes and key != spared:
      delete(results, key)
      total -= size


def _rename(source: Path, target: Path) -> None:
  """Renames a folder, unless another process was first, and brings the new name to the disk."""
  try:
    source.rename(target)
  except OSError as error:
    if target.exists():
      raise FileExistsError(target) from error
    raise
  disk.sync_names(target.parent)
