"""Files that others may read, on disks that may be full: whole writes, locks, and free room."""

import errno
import functools
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
"""Error numbers for a full device, a file above the size limit, and an exceeded quota of a user."""

_log = logging.getLogger(__name__)


def is_full(error: BaseException) -> bool:
  """Returns whether an error says that there is no room to write.

  Example:
    >>> is_full(OSError(errno.ENOSPC, "No space left on device")), is_full(FileNotFoundError())
    (True, False)
  """
  return isinstance(error, OSError) and error.errno in FULL


def free_bytes(path: Path) -> int:
  """Returns the free bytes of the file system that holds a path, which need not exist yet."""
  while not path.exists() and path != path.parent:
    path = path.parent
  return shutil.disk_usage(path).free


def replace(path: Path, data: bytes | str, *, synced: bool = False) -> None:
  """Writes a file by one rename of PATH.tmp, so that a kill leaves the old file or the new one.

  Args:
    path: Path of the file.
    data: Content; text is written in UTF-8.
    synced: Whether content and name are on the disk (fsync) before the return.
  """
  temporary = path.with_name(path.name + ".tmp")
  with open(temporary, "wb") as file:
    file.write(data.encode() if isinstance(data, str) else data)
    if synced:
      file.flush()
      os.fsync(file.fileno())
  os.replace(temporary, path)
  if synced:
    sync_names(path.parent)


def sync_names(folder: Path) -> None:
  """Brings new names in a folder to the disk."""
  opened = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(opened)
  finally:
    os.close(opened)


def lock(file: IO[str]) -> bool:
  """Locks an open file (`flock`), and returns whether it did: another process may have it.

  Raises:
    OSError: If the file system has no locks, or the platform, as on Windows.
  """
  try:
    import fcntl
  except ImportError as error:
    raise OSError(errno.ENOSYS, "no file locks on this platform") from error
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True


def write_if_room(path: Path, write: Callable[[], Any]) -> bool:
  """Writes a file unless the disk is full, which causes one warning per file.

  It is for files that are written again later.

  Args:
    path: Path of the file.
    write: Function that writes the file as `replace` does, whose PATH.tmp is removed if it fails.

  Returns:
    Whether the file was written.
  """
  try:
    write()
  except OSError as error:
    if not is_full(error):
      raise
    path.with_name(path.name + ".tmp").unlink(missing_ok=True)
    _warn_once(path)
    return False
  return True


@functools.cache
def _warn_once(path: Path) -> None:
  _log.warning("%s: the disk is full; the run continues and tries again at the next write", path)
