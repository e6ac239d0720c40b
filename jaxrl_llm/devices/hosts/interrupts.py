"""Ctrl-C: once to save and end, twice to exit at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

_interrupted = threading.Event()


@contextlib.contextmanager
def interruptible(tell: Callable[[str], None]) -> Iterator[None]:
  """Turns the first Ctrl-C inside the block into a SIGTERM, which `preempted` reports.

  A second one raises KeyboardInterrupt wherever the program is. All processes of a run end as they
  do after a SIGTERM to this one. Outside the main thread Ctrl-C keeps its usual effect.

  Args:
    tell: Function that shows the user a line on what the first Ctrl-C does.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return

  def once(number, frame):
    if _interrupted.is_set():
      raise KeyboardInterrupt
    _interrupted.set()
    tell("Ctrl-C: the run saves a checkpoint and ends; press it again to exit at once")
    os.kill(os.getpid(), signal.SIGTERM)  # JAX passes it on to all processes.

  _interrupted.clear()
  before = signal.signal(signal.SIGINT, once)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, before)


def interrupted() -> bool:
  """Returns whether this process has had its first Ctrl-C inside `interruptible`."""
  return _interrupted.is_set()
