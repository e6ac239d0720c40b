"""Ctrl-C: once to save and to end, twice to leave at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

_interrupted = threading.Event()


@contextlib.contextmanager
def interruptible(tell: Callable[[str], None]) -> Iterator[None]:
  """What stands inside is told of a first Ctrl-C as of SIGTERM, by `preempted`; a second one raises KeyboardInterrupt wherever it is.

  `tell` gets a line that says what the first one does. All processes of a run end as they do after SIGTERM to this one. Outside the main
  thread Ctrl-C stays what it is.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return

  def once(number, frame):
    if _interrupted.is_set():
      raise KeyboardInterrupt
    _interrupted.set()
    tell("Ctrl-C: the run saves a checkpoint and ends; once more leaves at once")
    os.kill(os.getpid(), signal.SIGTERM)  # Which JAX spreads to all processes.

  _interrupted.clear()
  before = signal.signal(signal.SIGINT, once)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, before)


def interrupted() -> bool:
  """Whether this process has had its first Ctrl-C inside of `interruptible`."""
  return _interrupted.is_set()
