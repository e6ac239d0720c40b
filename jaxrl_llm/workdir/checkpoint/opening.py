"""The checkpoints of a run: where they are, which of them stay, and the save that is under way."""

import time
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.workdir.checkpoint import manifest

_CLOSE_SECONDS = 60.0


class SaveFailedError(RuntimeError):
  """The last save of a run failed, so what it came to is not on disk."""


class Checkpoints:
  """The checkpoints of a run; `open_checkpoints` makes it.

  Attributes:
    directory: where they are.
    retention: which of them stay: the arguments of `retention.kept`.
    asynchronous: whether they are written while the run goes on.
    newest: number of the newest one, None where there is none.
    bytes: that it takes on the disk; 0 where nobody knows.
    failure: why the last save failed; None where it did not.
    untold: lines on saves that have failed since `failures` was asked.
    last_try: when the last save began, as `time.monotonic` counts.
  """

  def __init__(self, directory: Path, retention: Mapping[str, Any], *, asynchronous: bool):
    self.directory, self.retention, self.asynchronous = directory, retention, asynchronous
    self.newest: int | None = max(manifest.whole_steps(directory), default=None)
    self.bytes = 0
    self.failure: str | None = None
    self.untold: list[str] = []
    self.last_try = time.monotonic()
    self._saving: futures.Future | None = None

  def latest_step(self) -> int | None:
    """Number of the newest checkpoint, once the save that is under way is done."""
    finish(self)
    return self.newest

  def close(self) -> None:
    """Waits for the save that is under way; where other processes take part, which may be gone, for a minute at the most."""
    if self._saving is not None:
      futures.wait([self._saving], None if jax.process_count() == 1 else _CLOSE_SECONDS)

  def run(self, work: Callable[[], None]) -> None:
    """Runs the last stages of a save: here, or in a thread that `finish` waits for."""
    if not self.asynchronous:
      return work()
    thread = futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    self._saving = thread.submit(work)
    thread.shutdown(wait=False)

  def join(self) -> None:
    """Waits for that thread, and raises what ended it beyond a save that failed."""
    if self._saving is not None:
      futures.wait([self._saving])
      saving, self._saving = self._saving, None
      saving.result()


def open_checkpoints(
  directory: Path, *, keep: int = 2, keep_best: int = 0, keep_every_hours: float | None = None, asynchronous: bool | None = False
) -> Checkpoints:
  """The checkpoints of a run, in a folder that need not exist. Touches nothing.

  Args:
    directory: where they are.
    keep: how many of the newest steps stay on disk.
    keep_best: how many of those with the highest held-out accuracy stay.
    keep_every_hours: one step for each such stretch of time stays for good.
    asynchronous: write while the run goes on; None is yes on accelerators, no on CPU, where the run would compete with the writing.
  """
  is_async = jax.default_backend() != "cpu" if asynchronous is None else asynchronous
  retention = dict(newest=keep, best=keep_best, every_hours=keep_every_hours)
  return Checkpoints(directory.absolute(), retention, asynchronous=is_async)


def finish(checkpoints: Checkpoints) -> None:
  """Waits for the save that is under way, if one is: its checkpoint is whole then, or `checkpoints.failure` says why not."""
  checkpoints.join()


def failures(checkpoints: Checkpoints) -> list[str]:
  """A line for each save that has failed since this was asked; waits for nothing."""
  return [checkpoints.untold.pop(0) for _ in range(len(checkpoints.untold))]
