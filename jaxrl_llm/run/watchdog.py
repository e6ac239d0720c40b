"""A run that stands still says where, and ends, so that a launcher starts it again from its last checkpoint."""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxrl_llm.devices import hosts

STUCK = 42
"""Exit status of a run that stood still: that of a preempted one, what launchers of pods take for "start it again"."""

SAVE = "checkpoint"
"""The phase of a checkpoint, which is waited for in any case."""

_LOOK_SECONDS = 0.25
_ASK_SECONDS = 1.0  # Whether the run is to end; one process answers all.


class Watchdog:
  """Ends this process when a phase takes longer than it may. A context manager; inactive outside of it.

  What is printed, and written to `stacks-PID.txt` of the folder: the phase, its step, what it waits for, and the stacks of all threads.
  It also ends a process that was told to end and does not come to a place where it can: who stops a machine waits for no long phase.

  Args:
    seconds: that a phase may take; inf is for ever.
    stop_seconds: from SIGTERM to the end, wherever the process is, unless it saves; inf waits.
    folder: of the stacks; made if it is missing.
    told_to_end: whether there was a SIGTERM, see `hosts.told_to_end`.
    leave: ends the process; a test may pass its own.
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
    """Begins to count again, for a phase of a step.

    `waits_for` says in a few words what the phase waits for; it is called from another thread, once that has taken too long.
    """
    self._now = phase, step, time.monotonic(), waits_for

  def __enter__(self) -> "Watchdog":
    """Begins to watch."""
    self._asked = time.monotonic()
    threading.Thread(target=self._watch, daemon=True, name="watchdog").start()
    return self

  def __exit__(self, *_) -> None:
    """Watches no more."""
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
      f"error: stopped by SIGTERM in the phase {phase} of step {step}, {self._stop_seconds:g} s after it (watchdog.stop_seconds), with "
      "nothing saved; the same command goes on from the last checkpoint",
      file=sys.stderr, flush=True,
    )  # fmt: skip
    self._leave(STUCK)

  def _end(self, phase: str, step: int, since: float, waits_for: Callable[[], str] | None) -> None:
    waited = time.monotonic() - since
    pending = f"; waiting for {_asked(waits_for)}" if waits_for is not None else ""
    where = ""
    if self._folder is not None:
      path = self._folder / f"stacks-{os.getpid()}.txt"
      where = f"; all stacks are in {path}"
      try:
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
          file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {phase} of step {step}{pending}\n")
          file.flush()
          faulthandler.dump_traceback(file, all_threads=True)
      except OSError as error:  # The disk may be what everything waits for.
        where = f"; the stacks could not be written to {path} ({error.strerror})"
    print(
      f"error: the phase {phase} of step {step} has taken {waited:.0f} s, more than config.watchdog.seconds={self._seconds:g}"
      f"{pending}{where}; the same command goes on from the last checkpoint",
      file=sys.stderr, flush=True,
    )  # fmt: skip
    faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
    self._leave(STUCK)


def _asked(waits_for: Callable[[], str]) -> str:
  try:
    return waits_for()
  except Exception as error:  # It looks at what another thread is changing; the stacks are worth more than its answer.
    return f"what cannot be told ({type(error).__name__})"
