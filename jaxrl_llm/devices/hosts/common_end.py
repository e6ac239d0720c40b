"""The common end of all processes of a run when one of them fails."""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import NoReturn

import jax

from jaxrl_llm.devices.hosts.exchange import run_state
from jaxrl_llm.messages import one_line

_WATCH_SECONDS = 0.5
_GRACE_SECONDS = 3.0  # Lets each process report an error that all of them meet.
_END_SECONDS = 10.0
_START_AGAIN = 42
_FAILED, _ENDED = "jaxrl_llm/failed", "jaxrl_llm/ended"

_may_end = threading.Lock()


@contextlib.contextmanager
def together(plain: Mapping[type[BaseException], int]) -> Iterator[None]:
  """Ends all processes of a run when an exception leaves the block in one of them.

  The message names the process that failed. In a run of several processes this never returns after
  an exception: the others may be waiting for the process in a computation that nothing can
  interrupt, and the exchange between them ends only with the processes themselves. In a run of one
  process the exception propagates as usual.

  Args:
    plain: Exit status of each exception that needs no stack trace; the status of all others is 1.
  """
  state = run_state()
  if state.num_processes == 1:
    yield
    return
  is_over = threading.Event()
  watching = threading.Thread(target=_watch, args=[is_over], daemon=True)
  watching.start()
  try:
    yield
    # A thread that is inside the exchange when Python ends would abort the process.
    is_over.set()
    watching.join()
  except BaseException as error:  # Ctrl-C as well.
    status = next((status for kind, status in plain.items() if isinstance(error, kind)), None)
    # If another process has failed, this exception is only a computation that broke without it.
    if status is None and (first := _failure()) is not None:
      _end_with(first)
    if status is None:
      traceback.print_exc()
    lines = str(error).splitlines() if status is not None and str(error) else [one_line(error, limit=300)]
    message = "\n".join(f"error: process {state.process_id} of {state.num_processes}: {line}" for line in lines)
    # An error means that another process was first, or that the coordinator is gone.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      state.client.key_value_set(_FAILED, message)
    if not _may_end.acquire(blocking=False):  # The watching thread is ending this process.
      threading.Event().wait()
    print(message, file=sys.stderr, flush=True)
    _end_together(1 if status is None else status)


def _watch(is_over: threading.Event) -> None:
  """Ends this process some time after another has failed, unless all is over before."""
  while (message := _failure()) is None:
    if is_over.wait(_WATCH_SECONDS):
      return
  time.sleep(_GRACE_SECONDS)
  _end_with(message)


def _failure() -> str | None:
  """Returns the message of the first process that failed, or None if none has."""
  try:
    return run_state().client.key_value_try_get(_FAILED)
  except jax.errors.JaxRuntimeError:
    return None


def _end_with(message: str) -> NoReturn:
  state = run_state()
  if not _may_end.acquire(blocking=False):  # The other thread is ending this process.
    threading.Event().wait()
  print(message, f"error: process {state.process_id} of {state.num_processes}: ends with it", sep="\n", file=sys.stderr, flush=True)
  _end_together(1)


def _end_together(status: int) -> NoReturn:
  """Ends this process once all others are about to end.

  A process that ended earlier would seem lost to those that still compute with it.
  """
  state, until = run_state(), time.monotonic() + _END_SECONDS
  # An error means that the coordinator, process 0, is gone.
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    state.client.key_value_set(f"{_ENDED}/{state.process_id}", "", allow_overwrite=True)
    while len(gone := {int(key.rsplit("/", 1)[1]) for key, _ in state.client.key_value_dir_get(_ENDED)}) < state.num_processes:
      if time.monotonic() > until:
        missing = sorted(set(range(state.num_processes)) - gone)
        # The missing processes are the cause of the failure here, so a launcher should start all
        # processes again.
        status = _START_AGAIN if status == 1 else status
        end(f"error: process {', '.join(map(str, missing))} of {state.num_processes} did not answer: killed, or cut off", status)
      time.sleep(0.05)
    # The others have yet to read that all have arrived.
    time.sleep(0.5 if state.process_id == 0 else 0)
  end("", status)


@contextlib.contextmanager
def limited(message: str, seconds: float) -> Iterator[None]:
  """Ends the process if the block takes longer than a number of seconds."""
  timer = threading.Timer(seconds, end, (f"error: {message}", 2))
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def end(message: str, status: int) -> NoReturn:
  """Ends this process at once, and prints a message unless it is empty.

  Threads that wait for other processes cannot delay it.
  """
  if message:
    print(message, file=sys.stderr)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)
