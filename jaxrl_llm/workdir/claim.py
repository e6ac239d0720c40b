"""The folder of a run: whose it is, and whether this run may go on in it."""

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
from jaxrl_llm.config.fields import flatten

try:
  import fcntl
except ImportError:  # Windows.
  fcntl = None

_MARKER, _HALF, _LOCK = "config.json", "config.tmp", ".lock"
_CHANGES = "config_changes.jsonl"
_locked: dict[Path, Any] = {}  # Open files: closing one gives its lock back.


class WorkdirError(Exception):
  """A folder that this run must not write to."""


def check(workdir: Path, config: Mapping[str, Any], *, allow_changes: bool = False) -> None:
  """Refuses a folder that holds something else, and changes nothing.

  Args:
    workdir: may be missing.
    config: the resolved config.
    allow_changes: whether the run there may have had another config; what can never change is refused all the same.

  Raises:
    WorkdirError: see `claim`.
  """
  marker = workdir / _MARKER
  try:
    if marker.exists():
      return _refuse_changes(marker, config, allow_changes)
    # Another process of this run may be about to claim it.
    strangers = sorted(path.name for path in workdir.iterdir() if path.name not in (_MARKER, _HALF, _LOCK)) if workdir.exists() else []
  except OSError as error:
    raise _unusable(workdir, error) from error
  if strangers:
    shown = ", ".join(strangers[:3]) + (", ..." if len(strangers) > 3 else "")
    raise WorkdirError(f"--workdir={workdir}: found {shown} but no {_MARKER}, expected an empty folder or a run; choose another")


def claim(workdir: Path, config: Mapping[str, Any], *, allow_changes: bool = False) -> bool:
  """Makes the folder this run's, or finds that it already is.

  Args:
    workdir: made if it is missing; `config.json` marks it.
    config: the resolved config.
    allow_changes: see `check`.

  Returns:
    Whether the folder is new to us; `release` undoes that.

  Raises:
    WorkdirError: it cannot be written, holds something else, or holds a run of another config.
  """
  check(workdir, config, allow_changes=allow_changes)
  if (workdir / _MARKER).exists():
    return False
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / _HALF).write_text(json.dumps(config, indent=2) + "\n")
    (workdir / _HALF).replace(workdir / _MARKER)
  except OSError as error:
    raise _unusable(workdir, error) from error
  return True


def expect(workdir: Path, *, seconds: float = 30.0) -> None:
  """Waits until this process sees the folder that process 0 has claimed, as a network's file system may take a while to show it.

  Raises:
    WorkdirError: it does not appear in time.
  """
  until = time.monotonic() + seconds
  while not (workdir / _MARKER).exists():
    if time.monotonic() > until:
      raise WorkdirError(f"--workdir={workdir}: this process does not see the run of process 0; expected a folder that all share")
    time.sleep(0.1)


def lock(workdir: Path) -> None:
  """Keeps every other run out of a claimed folder until `unlock`, or until this process ends, however it ends.

  Raises:
    WorkdirError: another process writes there.

  Note:
    An advisory lock of the operating system (`flock`); where a file system has none, or on Windows, nothing is locked.
  """
  if fcntl is None:
    return
  file = open(workdir / _LOCK, "a+")  # noqa: SIM115 (open as long as it is locked)
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    file.seek(0)
    who = file.read().strip() or "another process"
    file.close()
    raise WorkdirError(f"--workdir={workdir}: {who} is writing there; wait until it ends, stop it, or choose another") from error
  except OSError:  # No locks on this file system.
    file.close()
    return
  file.truncate(0)
  file.write(f"process {os.getpid()} on {socket.gethostname()}")
  file.flush()
  _locked[workdir.absolute()] = file


def unlock(workdir: Path) -> None:
  """Lets other runs in again; nothing happens where this process has no lock."""
  if (file := _locked.pop(workdir.absolute(), None)) is not None:
    file.close()


def release(workdir: Path) -> None:
  """Undoes `claim` on a folder that was new and in which nothing has begun."""
  unlock(workdir)
  (workdir / _LOCK).unlink(missing_ok=True)
  shutil.rmtree(workdir / "logs", ignore_errors=True)
  (workdir / _MARKER).unlink(missing_ok=True)
  with contextlib.suppress(OSError):  # Not empty: it is somebody's.
    workdir.rmdir()


def _unusable(workdir: Path, error: OSError) -> WorkdirError:
  return WorkdirError(f"--workdir={workdir}: {error.strerror or error}; expected a folder that can be written")


def changes(workdir: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
  """The fields in which a resolved config differs from that of the run in a folder, with both values; none where there is no run."""
  marker = workdir / _MARKER
  return changes_lib.differences(*_both(marker, config)) if marker.exists() else {}


def change(workdir: Path, config: Mapping[str, Any], *, attempt: int) -> str | None:
  """Makes a config that of the run in a folder: the one before stays as `config.N.json`, and `config_changes.jsonl` says what changed.

  Args:
    workdir: claimed and locked.
    config: the resolved config; nothing happens if it equals the one there.
    attempt: number of the current attempt.

  Returns:
    The name of the file with the config before, for `change_back`; None where nothing changed.
  """
  if not (changed := changes(workdir, config)):
    return None
  kept = next(path for n in range(1, 10_000) if not (path := workdir / f"config.{n}.json").exists())
  try:
    shutil.copyfile(workdir / _MARKER, kept)
    (workdir / _HALF).write_text(json.dumps(config, indent=2) + "\n")
    (workdir / _HALF).replace(workdir / _MARKER)
    with open(workdir / _CHANGES, "a", encoding="utf-8") as file:
      file.write(json.dumps({"attempt": attempt, "before": kept.name, "changes": {f: list(pair) for f, pair in changed.items()}}) + "\n")
  except OSError as error:
    raise _unusable(workdir, error) from error
  return kept.name


def change_back(workdir: Path, kept: str) -> None:
  """Undoes `change`, for a run that could not start."""
  (workdir / kept).replace(workdir / _MARKER)
  lines = (workdir / _CHANGES).read_text(encoding="utf-8").splitlines(keepends=True)[:-1]
  (workdir / _CHANGES).write_text("".join(lines), encoding="utf-8")
  if not lines:
    (workdir / _CHANGES).unlink()


def _both(marker: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """The fields of the run's config and of this one."""
  try:
    saved = json.loads(marker.read_text())
    if not isinstance(saved, dict):
      raise ValueError(f"found a {type(saved).__name__}, expected an object")
  except ValueError as error:
    raise WorkdirError(f"{marker} is not the config of a run ({error}); choose another --workdir") from error
  return flatten(saved), flatten(json.loads(json.dumps(config)))  # Through JSON, where a tuple is a list.


def _refuse_changes(marker: Path, config: Mapping[str, Any], allow_changes: bool) -> None:
  old, new = _both(marker, config)
  found = changes_lib.differences(old, new)
  if found and not allow_changes:
    changed = [f"{field}: {was!r} -> {now!r}" for field, (was, now) in found.items()]
    shown = "; ".join(changed[:5]) + (f"; and {len(changed) - 5} more" if len(changed) > 5 else "")
    raise WorkdirError(
      f"--workdir={marker.parent} holds a run with another config ({shown}); choose another --workdir or set these back; "
      "--allow_config_change goes on with them"
    )
  if found and (lines := list(changes_lib.refusals(old, new))):
    raise WorkdirError("\n".join(lines))


def is_finished(workdir: Path) -> bool:
  """Whether the folder holds a run that came to its end."""
  try:
    return json.loads((workdir / "summary.json").read_text()).get("status") == "finished"
  except (OSError, ValueError, AttributeError):
    return False
