"""A watchdog that reports a stalled run and ends it.

A launcher can then restart the run from its last checkpoint.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxrl_llm.devices import hosts
from jaxrl_llm.messages import RESTART

SAVE = "checkpoint"
"""Phase of a checkpoint, which the end after SIGTERM never cuts short."""

_LOOK_SECONDS = 0.25
_ASK_SECONDS = 1.0  # Interval between checks for a SIGTERM; one process answers all.


class Watchdog:
  """A watchdog that ends this process when a phase exceeds its timeout.

  It is a context manager and is active only inside its block. It prints the phase, its step, what
  it waits for, and the stacks of all threads, and writes them to `stacks-PID.txt` in the folder. It
  also ends a process that was asked to stop but does not reach a place where it can: a machine that
  is being stopped does not wait for a long phase.

  Args:
    seconds: Timeout of a phase, in seconds; inf waits forever.
    stop_seconds: Seconds from SIGTERM to the end of the process in any phase but a save; inf waits.
    folder: Folder of the stacks, created if missing; None writes none.
    told_to_end: Function that returns whether there was a SIGTERM; see `hosts.told_to_end`.
    leave: Function that ends the process; a test may pass its own.
  """

  def __init__(
    self,
    seconds: float,
    *,
    stop_seconds: float,
    folder: Path | None,
    told_to_end: Callable[[], bool] = hosts.told_to_end,
    leave: Callable[[int], None] = os._exit,
  ):
    self._seconds, self._stop_seconds, self._folder = seconds, stop_seconds, folder
    self._told_to_end, self._leave = told_to_end, leave
    self._now: tuple[str, int, float, Callable[[], str] | None] | None = None
    self._asked = self._told = float("inf")
    self._over = threading.Event()

  def look_at(self, phase: str, step: int, waits_for: Callable[[], str] | None = None) -> None:
    """Restarts the timer, for a phase of a step.

    `waits_for` says in a few words what the phase waits for. It is called from another thread,
    after the timeout.
    """
    self._now = phase, step, time.monotonic(), waits_for

  def __enter__(self) -> "Watchdog":
    """Starts watching."""
    self._asked = time.monotonic()
    threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
    return self

  def __exit__(self, *_) -> None:
    """Stops watching."""
    self._over.set()

  def _watch(self) -> None:
    while not self._over.wait(_LOOK_SECONDS):
      now, moment = self._now, time.monotonic()
      if now is None:
        continue
      if moment - now[2] > self._seconds:
        return self._end(*now)
      if self._told == float("inf") and moment - self._asked > _ASK_SECONDS:
        self._asked, self._told = moment, moment if self._told_to_end() else self._told
      if moment - self._told > self._stop_seconds and now[0] != SAVE:
        return self._stop(*now[:2])

  def _stop(self, phase: str, step: int) -> None:
    print(
      f"error: stopped in the phase {phase} of step {step}, {self._stop_seconds:g} s after SIGTERM "
      "(watchdog.stop_seconds), without saving; the same command resumes from the last checkpoint",
      file=sys.stderr, flush=True,
    )  # fmt: skip
    self._leave(RESTART)

  def _end(self, phase: str, step: int, since: float, waits_for: Callable[[], str] | None) -> None:
    waited = time.monotonic() - since
    pending = f"; waiting for {_asked(waits_for)}" if waits_for is not None else ""
    where = ""
    if self._folder is not None:
      path = self._folder / f"stacks-{os.getpid()}.txt"
      where = f"; the stacks of all threads are in {path}"
      try:
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
          file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {phase} of step {step}{pending}\n")
          file.flush()
          faulthandler.dump_traceback(file, all_threads=True)
      except OSError as error:  # The disk may be what the run is waiting for.
        where = f"; the stacks could not be written to {path} ({error.strerror})"
    print(
      f"error: the phase {phase} of step {step} has taken {waited:.0f} s, more than config.watchdog.seconds={self._seconds:g}"
      f"{pending}{where}; the same command resumes from the last checkpoint",
      file=sys.stderr, flush=True,
    )  # fmt: skip
    faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
    self._leave(RESTART)


def _asked(waits_for: Callable[[], str]) -> str:
  try:
    return waits_for()
  # It reads what another thread is changing; the stacks matter more than its answer.
  except Exception as error:
    return f"something that cannot be determined ({type(error).__name__})"
