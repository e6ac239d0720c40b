"""The folders of checkpoints.

A folder is written and removed under another name, so that a folder named by a number is a complete
checkpoint.
"""

import logging
import shutil
import time
from pathlib import Path

_MAKING, _REMOVING = ".saving", ".removing"
_LEFT = (f"*{_MAKING}", f"*{_REMOVING}", "*.orbax-checkpoint-tmp*", ".manifest.json.*")
_SECONDS = 5.0  # Maximum time for which the writers of a failed save may recreate their folders.
_QUIET_SECONDS = 0.3  # Time without a folder after which it counts as removed.
_log = logging.getLogger(__name__)


def scratch(directory: Path, step: int) -> Path:
  """Returns the folder in which a step is written before it is named by its number."""
  return directory / f"{step}{_MAKING}"


def make_scratch(directory: Path, step: int) -> None:
  """Creates the empty folders to which a step is written.

  Raises:
    OSError: If there is no room for the folders, or no permission.
  """
  remove(folder := scratch(directory, step))
  for name in ("arrays", "record"):
    (folder / name).mkdir(parents=True)


def delete(folder: Path) -> None:
  """Deletes a checkpoint atomically, or warns if that fails."""
  renamed = folder.with_name(folder.name + _REMOVING)
  try:
    folder.rename(renamed)
  except OSError as error:
    _log.warning("checkpoint %s cannot be deleted (%s)", folder, error)
    return
  remove(renamed)


def clear_leftovers(directory: Path) -> None:
  """Removes the leftovers of interrupted saves and deletions."""
  for pattern in _LEFT:
    for path in directory.glob(pattern):
      remove(path)


def remove(path: Path) -> None:
  """Removes a file or a folder, which may be missing."""
  if path.is_dir():
    shutil.rmtree(path, ignore_errors=True)
  else:
    path.unlink(missing_ok=True)


def remove_for_good(path: Path) -> None:
  """Removes the folder of a failed save, to which other writers may still be writing.

  Orbax reports the first failure and does not stop the other writers.
  """
  until = time.monotonic() + _SECONDS
  gone_since = None
  while gone_since is None or time.monotonic() < gone_since + _QUIET_SECONDS:
    if path.exists():
      remove(path)
      gone_since = None
      if time.monotonic() > until:
        return  # The next save or the next start removes it.
    if not path.exists() and gone_since is None:
      gone_since = time.monotonic()
    time.sleep(0.02)
