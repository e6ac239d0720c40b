"""The folders of checkpoints: made under another name, removed under another name, so that a number is a whole checkpoint or none."""

import logging
import shutil
import time
from pathlib import Path

_MAKING, _REMOVING = ".saving", ".removing"
_LEFT = (f"*{_MAKING}", f"*{_REMOVING}", "*.orbax-checkpoint-tmp*", ".manifest.json.*")
_SECONDS = 5.0  # That the rest of a save that failed may still be writing, and making the folders anew that it writes to.
_QUIET_SECONDS = 0.3
_log = logging.getLogger(__name__)


def scratch(directory: Path, step: int) -> Path:
  """Where a step is written before it has its name."""
  return directory / f"{step}{_MAKING}"


def make_scratch(directory: Path, step: int) -> None:
  """Makes the folders that a step is written to, empty.

  Raises:
    OSError: there is no room for them, or no right to.
  """
  remove(folder := scratch(directory, step))
  for name in ("arrays", "record"):
    (folder / name).mkdir(parents=True)


def delete(folder: Path) -> None:
  """Deletes a checkpoint; killed at any moment, it is there or not there. Where that fails, a warning says so."""
  renamed = folder.with_name(folder.name + _REMOVING)
  try:
    folder.rename(renamed)
  except OSError as error:
    _log.warning("checkpoint %s cannot be deleted (%s)", folder, error)
    return
  remove(renamed)


def clear_leftovers(directory: Path) -> None:
  """Removes what interrupted saves and deletions have left."""
  for pattern in _LEFT:
    for path in directory.glob(pattern):
      remove(path)


def remove(path: Path) -> None:
  """Removes a file or a folder, which may not be there."""
  if path.is_dir():
    shutil.rmtree(path, ignore_errors=True)
  else:
    path.unlink(missing_ok=True)


def remove_for_good(path: Path) -> None:
  """Removes what the rest of a failed save may still be writing to: Orbax reports the first failure, and does not end the other writers."""
  until = time.monotonic() + _SECONDS
  gone_since = None
  while gone_since is None or time.monotonic() < gone_since + _QUIET_SECONDS:
    if path.exists():
      remove(path)
      gone_since = None
      if time.monotonic() > until:
        return  # The next save, or the next start, clears it away.
    if not path.exists() and gone_since is None:
      gone_since = time.monotonic()
    time.sleep(0.02)
