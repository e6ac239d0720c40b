"""The checkpoints of a run: their folder, their retention, and the save in flight."""

import time
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.workdir.checkpoint import manifest

_CLOSE_SECONDS = 60.0


class SaveFailedError(RuntimeError):
  """The failure of the last save of a run, whose final state is therefore not on disk."""


class Checkpoints:
  """The checkpoints of a run, as made by `open_checkpoints`.

  Attributes:
    directory: Folder of the checkpoints.
    retention: Keyword arguments of `retention.kept`, which selects the checkpoints to keep.
    asynchronous: Whether checkpoints are written while the run continues.
    newest: Number of the newest checkpoint; None if there is none.
    bytes: Size of the newest checkpoint on disk; 0 if unknown.
    failure: Reason why the last save failed; None if it succeeded.
    untold: Messages about saves that have failed since the last call of `failures`.
    last: Number after which no checkpoint is saved; None for no such limit.
    last_try: Start of the last save, in seconds of `time.monotonic`.
  """

  def __init__(self, directory: Path, retention: Mapping[str, Any], *, asynchronous: bool):
    self.directory, self.retention, self.asynchronous = directory, retention, asynchronous
    self.newest: int | None = max(manifest.whole_steps(directory), default=None)
    self.bytes = 0
    self.failure: str | None = None
    self.untold: list[str] = []
    self.last: int | None = None
    self.last_try = time.monotonic()
    self._saving: futures.Future | None = None

  def latest_step(self) -> int | None:
    """Waits for the save in flight. Returns the number of the newest checkpoint, or None."""
    finish(self)
    return self.newest

  def close(self) -> None:
    """Waits for the save in flight.

    With several processes it waits for a minute at most, because the others may be gone.
    """
    if self._saving is not None:
      futures.wait([self._saving], None if jax.process_count() == 1 else _CLOSE_SECONDS)

  def run(self, work: Callable[[], None]) -> None:
    """Runs the last stages of a save, either here or in a thread that `finish` waits for."""
    if not self.asynchronous:
      return work()
    thread = futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    self._saving = thread.submit(work)
    thread.shutdown(wait=False)


def open_checkpoints(
  directory: Path, *, keep: int = 2, keep_best: int = 0, keep_every_hours: float | None = None, asynchronous: bool | None = False
) -> Checkpoints:
  """Opens the checkpoints of a run, in a folder that need not exist. Writes nothing.

  Args:
    directory: Folder of the checkpoints.
    keep: Number of newest steps to keep.
    keep_best: Number of steps with the highest held-out accuracy to keep.
    keep_every_hours: Interval in hours of the steps to keep for good; None keeps none.
    asynchronous: Whether to write while the run continues. None means True on accelerators and
      False on CPU, where the run would compete with the writing.
  """
  is_async = jax.default_backend() != "cpu" if asynchronous is None else asynchronous
  retention = dict(newest=keep, best=keep_best, every_hours=keep_every_hours)
  return Checkpoints(directory.absolute(), retention, asynchronous=is_async)


def finish(checkpoints: Checkpoints) -> None:
  """Waits for the save in flight, if there is one.

  Afterwards, its checkpoint is complete or `checkpoints.failure` gives the reason. An error that is
  no failed save is raised.
  """
  if checkpoints._saving is not None:
    futures.wait([checkpoints._saving])
    saving, checkpoints._saving = checkpoints._saving, None
    saving.result()


def failures(checkpoints: Checkpoints) -> list[str]:
  """Returns a message for each save that has failed since the last call. Waits for nothing."""
  return [checkpoints.untold.pop(0) for _ in range(len(checkpoints.untold))]
