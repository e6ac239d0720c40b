"""The folder of a run: which run owns it, and whether this run may continue in it."""

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config import changes as changes_lib
from jaxrl_llm.config import renamed
from jaxrl_llm.config.fields import flatten, table_of, unread_defaults
from jaxrl_llm.config.fork import fork_of
from jaxrl_llm.workdir import disk

MARKER, _LOCK = "config.json", ".lock"
_HALF = (f"{MARKER}.tmp", "config.tmp")  # The second is that of earlier versions.
CHANGES = "config_changes.jsonl"
_locked: dict[Path, Any] = {}  # Open files: closing one releases its lock.


class WorkdirError(Exception):
  """A folder that this run must not write to."""


def check_claim(workdir: Path, config: Mapping[str, Any], *, allow_changes: bool = False) -> None:
  """Refuses a folder that holds anything but this run. Changes nothing.

  Args:
    workdir: Folder of the run, which may be missing.
    config: Resolved config.
    allow_changes: Whether the config may differ from that of the run in the folder. Fields that can
      never change are refused in either case.

  Raises:
    WorkdirError: If the folder cannot be read, holds something else, or holds a run with another
      config.
  """
  marker = workdir / MARKER
  try:
    if marker.exists():
      return _refuse_changes(marker, config, allow_changes)
    # Another process of this run may be claiming the folder at this moment.
    strangers = sorted(path.name for path in workdir.iterdir() if path.name not in (MARKER, *_HALF, _LOCK)) if workdir.exists() else []
  except OSError as error:
    raise _unusable(workdir, error) from error
  if strangers:
    shown = ", ".join(strangers[:3]) + (", ..." if len(strangers) > 3 else "")
    raise WorkdirError(f"--workdir={workdir}: found {shown} but no {MARKER}, expected an empty folder or a run; choose another")


def claim(workdir: Path, config: Mapping[str, Any], *, allow_changes: bool = False) -> bool:
  """Claims the folder for this run, unless this run has claimed it before.

  Args:
    workdir: Folder of the run, which is created if it is missing and marked with `config.json`.
    config: Resolved config.
    allow_changes: Whether the config may differ from that of the run in the folder (see
      `check_claim`).

  Returns:
    Whether the claim is new. `release` undoes a new claim.

  Raises:
    WorkdirError: If the folder cannot be written, holds something else, or holds a run with another
      config.
  """
  check_claim(workdir, config, allow_changes=allow_changes)
  if (workdir / MARKER).exists():
    return False
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    disk.replace(workdir / MARKER, json.dumps(config, indent=2) + "\n")
  except OSError as error:
    raise _unusable(workdir, error) from error
  return True


def expect(workdir: Path, *, seconds: float = 30.0) -> None:
  """Waits until this process sees the folder that process 0 has claimed.

  A network file system may take a while to show it.

  Raises:
    WorkdirError: If the folder does not appear in time.
  """
  until = time.monotonic() + seconds
  while not (workdir / MARKER).exists():
    if time.monotonic() > until:
      raise WorkdirError(
        f"--workdir={workdir}: this process does not see the run of process 0; expected a folder that all processes share"
      )
    time.sleep(0.1)


def lock(workdir: Path) -> None:
  """Locks a claimed folder against other runs.

  The lock lasts until `unlock`, or until this process ends for any reason.

  Raises:
    WorkdirError: If another process writes to the folder.

  Note:
    The lock is advisory (`flock`). Nothing is locked on Windows, or on a file system without locks.
  """
  file = open(workdir / _LOCK, "a+")  # noqa: SIM115 (stays open while it is locked)
  try:
    is_locked = disk.lock(file)
  except OSError:  # There are no locks.
    file.close()
    return
  if not is_locked:
    file.seek(0)
    owner = file.read().strip() or "another process"
    file.close()
    raise WorkdirError(f"--workdir={workdir}: {owner} is writing there; wait until it ends, stop it, or choose another")
  file.truncate(0)
  file.write(f"process {os.getpid()} on {socket.gethostname()}")
  file.flush()
  _locked[workdir.absolute()] = file


def unlock(workdir: Path) -> None:
  """Releases the lock of this process on a folder, if there is one."""
  if (file := _locked.pop(workdir.absolute(), None)) is not None:
    file.close()


def release(workdir: Path) -> None:
  """Undoes a new `claim` on a folder, or a new branch, in which no training has begun."""
  unlock(workdir)
  if fork_of(workdir) is not None:  # All in it was copied.
    return shutil.rmtree(workdir, ignore_errors=True)
  (workdir / _LOCK).unlink(missing_ok=True)
  shutil.rmtree(workdir / "logs", ignore_errors=True)
  (workdir / MARKER).unlink(missing_ok=True)
  with contextlib.suppress(OSError):  # Not empty: the other files belong to the user.
    workdir.rmdir()


def _unusable(workdir: Path, error: OSError) -> WorkdirError:
  return WorkdirError(f"--workdir={workdir}: {error.strerror or error}; expected a folder that can be written")


def changes(workdir: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
  """Returns the fields in which a resolved config differs from that of the run in a folder.

  Each field comes with its old and its new value. Without a run in the folder, there are none.
  """
  marker = workdir / MARKER
  return changes_lib.differences(*_both(marker, config)) if marker.exists() else {}


def describe_changes(workdir: Path, config: Mapping[str, Any], *, number: int | None = None) -> list[str]:
  """Returns a line for each of the `changes`, and one if they move the learning rate.

  Args:
    workdir: Folder of a run.
    config: Resolved config.
    number: Number of the checkpoint after which the config applies; None is the newest in the
      folder.
  """
  if not (changed := changes(workdir, config)):
    return []
  from jaxrl_llm.learner.schedules import rate_change

  if number is None:
    number, _ = changes_lib.written_on(workdir) or (0, None)
  rate = rate_change(*_both(workdir / MARKER, config), number)
  return [f"config.{field}: {was!r} -> {now!r}" for field, (was, now) in changed.items()] + ([] if rate is None else [rate])


def change(workdir: Path, config: Mapping[str, Any], *, attempt: int) -> str | None:
  """Replaces the config of the run in a folder.

  The previous config stays as `config.N.json`, and `config_changes.jsonl` records the changes.

  Args:
    workdir: Folder of the run, claimed and locked.
    config: Resolved config. Nothing happens if it equals the present one.
    attempt: Number of the current attempt.

  Returns:
    Name of the file with the previous config, for `change_back`; None if nothing changed.
  """
  if not (changed := changes(workdir, config)):
    return None
  kept = next(path for n in range(1, 10_000) if not (path := workdir / f"config.{n}.json").exists())
  try:
    shutil.copyfile(workdir / MARKER, kept)
    disk.replace(workdir / MARKER, json.dumps(config, indent=2) + "\n")
    with open(workdir / CHANGES, "a", encoding="utf-8") as file:
      file.write(json.dumps({"attempt": attempt, "before": kept.name, "changes": {f: list(pair) for f, pair in changed.items()}}) + "\n")
  except OSError as error:
    raise _unusable(workdir, error) from error
  return kept.name


def change_back(workdir: Path, kept: str) -> None:
  """Undoes `change` for a run that could not start."""
  (workdir / kept).replace(workdir / MARKER)
  lines = (workdir / CHANGES).read_text(encoding="utf-8").splitlines(keepends=True)[:-1]
  (workdir / CHANGES).write_text("".join(lines), encoding="utf-8")
  if not lines:
    (workdir / CHANGES).unlink()


def _both(marker: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the fields of the saved config and of the new one, flattened."""
  try:
    saved = json.loads(marker.read_text())
    if not isinstance(saved, dict):
      raise ValueError(f"found a {type(saved).__name__}, expected an object")
  except ValueError as error:
    raise WorkdirError(f"{marker} is not the config of a run ({error}); choose another --workdir") from error
  saved = renamed.current(saved)
  # Earlier versions kept what nothing reads. Through JSON, which turns tuples into lists.
  old = flatten(saved) | unread_defaults(saved, table_of(saved))
  return json.loads(json.dumps(old)), flatten(json.loads(json.dumps(renamed.current(config))))


def recorded_config(workdir: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
  """Returns the config of a workdir's run as it was recorded, in the fields of its version.

  The result is None if it means something else than `config`, or there is none.
  """
  marker = workdir / MARKER
  if not marker.is_file() or changes_lib.differences(*_both(marker, config)):
    return None
  return json.loads(marker.read_text())


def _refuse_changes(marker: Path, config: Mapping[str, Any], allow_changes: bool) -> None:
  old, new = _both(marker, config)
  changed = changes_lib.differences(old, new)
  if changed and not allow_changes:
    lines = [f"{field}: {was!r} -> {now!r}" for field, (was, now) in changed.items()]
    shown = "; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" if len(lines) > 5 else "")
    gone = "".join(f"; {renamed.hint(field)}" for field in changed if field in renamed.RENAMED)
    raise WorkdirError(
      f"--workdir={marker.parent} holds a run with another config ({shown}); choose another --workdir, restore these values, "
      f"or pass --allow_config_change to continue with the new ones{gone}"
    )
  if changed and (lines := list(changes_lib.refusals(old, new))):
    raise WorkdirError("\n".join(lines))


def is_finished(workdir: Path) -> bool:
  """Returns whether the folder holds a finished run."""
  try:
    return json.loads((workdir / "summary.json").read_text()).get("status") == "finished"
  except (OSError, ValueError, AttributeError):
    return False
