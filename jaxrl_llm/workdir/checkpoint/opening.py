"""The checkpoints of a run: where they are, which of them stay, and the save that is under way."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

from jaxrl_llm.workdir.checkpoint import manifest
from jaxrl_llm.workdir.checkpoint.retention import Retention

_CLOSE_SECONDS = 60.0


class SaveFailedError(RuntimeError):
  """The last save of a run failed, so what it came to is not on disk."""


class Checkpoints:
  """The checkpoints of a run; `open_checkpoints` makes it.

  Attributes:
    directory: where they are.
    retention: which of them stay.
    asynchronous: whether they are written while the run goes on.
    newest: number of the newest one, None where there is none.
    bytes: that it takes on the disk; 0 where nobody knows.
    failure: why the last save failed; None where it did not.
    untold: lines on saves that have failed since `failures` was asked.
    last_try: when the last save began, as `time.monotonic` counts.
  """

  def __init__(self, directory: Path, retention: Retention, *, asynchronous: bool):
    self.directory, self.retention, self.asynchronous = directory, retention, asynchronous
    self.newest: int | None = max(manifest.whole_steps(directory), default=None)
    self.bytes = 0
    self.failure: str | None = None
    self.untold: list[str] = []
    self.last_try = time.monotonic()
    self._thread: threading.Thread | None = None
    self._error: BaseException | None = None

  def latest_step(self) -> int | None:
    """Number of the newest checkpoint, once the save that is under way is done."""
    finish(self)
    return self.newest

  def close(self) -> None:
    """Waits for the save that is under way; where other processes take part, which may be gone, for a minute at the most."""
    if self._thread is not None:
      self._thread.join(None if jax.process_count() == 1 else _CLOSE_SECONDS)

  def run(self, work: Callable[[], None]) -> None:
    """Runs the last stages of a save: here, or in a thread that `finish` waits for."""
    if not self.asynchronous:
      return work()

    def guarded() -> None:
      try:
        work()
      except BaseException as error:  # `finish` raises it.
        self._error = error

    self._thread = threading.Thread(target=guarded, name="checkpoint")
    self._thread.start()

  def join(self) -> None:
    """Waits for that thread.

    Raises:
      BaseException: what ended it, beyond a save that failed.
    """
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    if (error := self._error) is not None:
      self._error = None
      raise error


def open_checkpoints(
  directory: Path, *, keep: int = 2, keep_best: int = 0, keep_every_hours: float | None = None, asynchronous: bool | None = False
) -> Checkpoints:
  """The checkpoints of a run. Touches nothing.

  Args:
    directory: need not be there.
    keep: how many of the newest steps stay on disk.
    keep_best: how many of those with the highest held-out accuracy stay.
    keep_every_hours: one step for each such stretch of time stays for good.
    asynchronous: write while the run goes on; None is yes on accelerators, no on CPU, where the run would compete with the writing.
  """
  is_async = jax.default_backend() != "cpu" if asynchronous is None else asynchronous
  return Checkpoints(directory.absolute(), Retention(keep, keep_best, keep_every_hours), asynchronous=is_async)


def finish(checkpoints: Checkpoints) -> None:
  """Waits for the save that is under way, if one is: its checkpoint is whole then, or `checkpoints.failure` says why not."""
  checkpoints.join()


def failures(checkpoints: Checkpoints) -> list[str]:
  """A line for each save that has failed since this was asked; waits for nothing."""
  found = []
  while checkpoints.untold:
    found.append(checkpoints.untold.pop(0))
  return found
