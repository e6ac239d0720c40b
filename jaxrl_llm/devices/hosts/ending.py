"""How all processes of a run end when one does."""

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
_GRACE_SECONDS = 3.0  # An error that all processes find is better told by each of them than by one for the others.
_END_SECONDS = 10.0
_START_AGAIN = 42
_FAILED, _ENDED = "jaxrl_llm/failed", "jaxrl_llm/ended"

_may_end = threading.Lock()


@contextlib.contextmanager
def together(plain: Mapping[type[BaseException], int]) -> Iterator[None]:
  """Runs what stands inside; an exception that leaves it in one process ends all, with a message that names the process.

  Where there are several, the process does not come back from it: the others may be waiting for it in a computation that nothing can
  interrupt, and the exchange between them ends only with them. In a run of one process the exception goes on as usual.

  Args:
    plain: exceptions that need no stack trace, with the status that each exits with; that of all others is 1.
  """
  state = run_state()
  if state.num_processes == 1:
    yield
    return
  threading.Thread(target=_watch, daemon=True).start()
  try:
    yield
  except BaseException as error:  # Ctrl-C as well.
    status = next((status for kind, status in plain.items() if isinstance(error, kind)), None)
    if status is None and (first := _failure()) is not None:  # What breaks here then is the computation with that process.
      _end_with(first)
    if status is None:
      traceback.print_exc()
    lines = str(error).splitlines() if status is not None and str(error) else [one_line(error, limit=300)]
    message = "\n".join(f"error: process {state.process_id} of {state.num_processes}: {line}" for line in lines)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # Another process was first, or the coordinator is gone.
      state.client.key_value_set(_FAILED, message)
    if not _may_end.acquire(blocking=False):  # Another process was, and this one is ending already.
      threading.Event().wait()
    print(message, file=sys.stderr, flush=True)
    _end_together(1 if status is None else status)


def _watch() -> None:
  """Ends this process some time after another has failed."""
  while (message := _failure()) is None:
    time.sleep(_WATCH_SECONDS)
  time.sleep(_GRACE_SECONDS)
  _end_with(message)


def _failure() -> str | None:
  """What the first process said that failed; None where none has."""
  try:
    return run_state().client.key_value_try_get(_FAILED)
  except jax.errors.JaxRuntimeError:
    return None


def _end_with(message: str) -> NoReturn:
  state = run_state()
  if not _may_end.acquire(blocking=False):  # The other thread of this process ends it.
    threading.Event().wait()
  print(message, f"error: process {state.process_id} of {state.num_processes}: ends with it", sep="\n", file=sys.stderr, flush=True)
  _end_together(1)


def _end_together(status: int) -> NoReturn:
  """Ends this process once all others are about to: whoever went first would seem lost to those that still compute with it."""
  state, until = run_state(), time.monotonic() + _END_SECONDS
  with contextlib.suppress(jax.errors.JaxRuntimeError):  # The coordinator, which is process 0, is gone.
    state.client.key_value_set(f"{_ENDED}/{state.process_id}", "", allow_overwrite=True)
    while len(gone := {int(key.rsplit("/", 1)[1]) for key, _ in state.client.key_value_dir_get(_ENDED)}) < state.num_processes:
      if time.monotonic() > until:
        missing = sorted(set(range(state.num_processes)) - gone)
        # What broke here then broke because of them: launchers are to start all of it again.
        status = _START_AGAIN if status == 1 else status
        end(f"error: process {', '.join(map(str, missing))} of {state.num_processes} did not answer: killed, or cut off", status)
      time.sleep(0.05)
    time.sleep(0.5 if state.process_id == 0 else 0)  # The others have yet to read that all are there.
  end("", status)


@contextlib.contextmanager
def limited(message: str, seconds: float) -> Iterator[None]:
  """Ends the process when what stands inside takes longer."""
  timer = threading.Timer(seconds, end, (f"error: {message}", 2))
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def end(message: str, status: int) -> NoReturn:
  """Ends this process at once, with a message unless it is empty; threads that wait for other processes cannot hold it up."""
  if message:
    print(message, file=sys.stderr)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)
