"""A disk without room: how it shows, and what can do without."""

import errno
import functools
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
"""Of a system call: no space on the device, beyond the limit of a file's size, beyond a user's quota."""

_log = logging.getLogger(__name__)


def is_full(error: BaseException) -> bool:
  """Whether an error says that there is no room to write.

  Example:
    >>> is_full(OSError(errno.ENOSPC, "No space left on device")), is_full(FileNotFoundError())
    (True, False)
  """
  return isinstance(error, OSError) and error.errno in FULL


def free_bytes(path: Path) -> int:
  """Bytes that can still be written to the file system of a folder, or of the nearest one above it that exists."""
  while not path.exists() and path != path.parent:
    path = path.parent
  return shutil.disk_usage(path).free


def write_if_room(path: Path, write: Callable[[], Any]) -> bool:
  """Writes a file that is written again later; a full disk is passed over, with one warning for each file.

  Args:
    path: of the file.
    write: writes it by way of PATH.tmp, of which nothing stays where it fails.

  Returns:
    Whether it was written.
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
  _log.warning("%s: the disk is full; the run goes on, and tries again when it next writes it", path)
