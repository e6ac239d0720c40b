"""Handling of full disks: how they are recognised, and writes that may be skipped."""

import errno
import functools
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def write_if_room(path: Path, write: Callable[[], Any]) -> bool:
  """Writes a file unless the disk is full, which causes one warning per file.

  It is for files that are written again later.

  Args:
    path: Path of the file.
    write: Function that writes the file by way of PATH.tmp, which is removed if it fails.

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
