"""Starting one worker process, talking to it without ever waiting for it, and ending it."""

import contextlib
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxrl_llm.rewards.workers import worker as protocol

_PROGRAM = str(pathlib.Path(protocol.__file__).resolve().with_name("guardian.py"))
_READ_BYTES = 1 << 16
_MAX_INBOX_BYTES = 1 << 20  # Far more than a batch of honest frames.

# A worker computes one thing at a time, and must never reach for the accelerator that the training holds.
_ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "MKL_NUM_THREADS": "1",
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
  "TOKENIZERS_PARALLELISM": "false",
}


class Reply(NamedTuple):
  """One frame of a worker: the number of the job, the value, the cause (empty for none), the detail, and whether the worker retires."""

  number: int
  value: float
  cause: str
  detail: str
  retires: bool


@dataclass
class Worker:
  """A worker process as the parent sees it.

  Attributes:
    process: the outer guardian, first of a session of its own.
    jobs_fd: written to without blocking.
    results_fd: read from without blocking.
    outbox: what the pipe did not take yet.
    inbox: the beginning of a frame.
    queue: number and deadline in seconds of each job sent and not answered, in order.
    since: when the first of them had its turn, or when the process was started.
    ready: whether the functions are built.
  """

  process: subprocess.Popen
  jobs_fd: int
  results_fd: int
  since: float
  outbox: bytearray = field(default_factory=bytearray)
  inbox: bytearray = field(default_factory=bytearray)
  queue: deque[tuple[int, float]] = field(default_factory=deque)
  ready: bool = False


def start(functions: Sequence[tuple[str, Any, tuple[str, ...]]], *, memory_gb: float | None) -> Worker:
  """Starts a worker; returns before it is ready.

  Args:
    functions: import path, settings and further imports of each reward function.
    memory_gb: address space of the worker, in GiB; None sets no limit.
  """
  jobs_read, jobs_write = os.pipe()
  results_read, results_write = os.pipe()
  try:
    process = subprocess.Popen(
      [sys.executable, "-P", *(["-B"] if sys.dont_write_bytecode else []), _PROGRAM,
       str(jobs_read), str(results_write), str(os.getpid())],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,  # Nobody reads what a reward function prints, so that none can flood us.
      stderr=subprocess.DEVNULL,
      env={**os.environ, **_ENVIRONMENT},
      pass_fds=(jobs_read, results_write),
      start_new_session=True,  # Control-C is ours to handle, and the group can be killed as one.
    )  # fmt: skip
  except BaseException:
    os.close(jobs_write)
    os.close(results_read)
    raise
  finally:
    os.close(jobs_read)
    os.close(results_write)
  os.set_blocking(jobs_write, False)
  os.set_blocking(results_read, False)
  worker = Worker(process, jobs_write, results_read, time.monotonic())
  send(worker, dict(path=[path or os.getcwd() for path in sys.path], memory_bytes=None if memory_gb is None else int(memory_gb * 2**30)))
  send(worker, list(functions))
  return worker


def send(worker: Worker, message: Any) -> None:
  """Queues a message and writes what the pipe takes now; `flush` writes the rest."""
  data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
  worker.outbox += len(data).to_bytes(8, "little") + data
  flush(worker)


def flush(worker: Worker) -> None:
  """Writes what the pipe takes without blocking."""
  try:
    while worker.outbox:
      del worker.outbox[: os.write(worker.jobs_fd, memoryview(worker.outbox)[:_READ_BYTES].tobytes())]
  except BlockingIOError:
    return
  except BrokenPipeError:  # It is dead; reading says so too, and says what it still answered.
    worker.outbox.clear()


def read(worker: Worker) -> tuple[list[Reply], bool, bool]:
  """What the worker has answered since the last look, without waiting for more.

  Returns:
    The replies; whether the pipe has ended; whether it holds something that no worker of ours writes.
  """
  ended = False
  while len(worker.inbox) < _MAX_INBOX_BYTES:
    try:
      data = os.read(worker.results_fd, _READ_BYTES)
    except BlockingIOError:
      break
    if not data:
      ended = True
      break
    worker.inbox += data
  replies, at, size = [], 0, protocol.FRAME.size
  while len(worker.inbox) - at >= size:
    number, value, cause, retires, length = protocol.FRAME.unpack_from(worker.inbox, at)
    if cause >= len(protocol.CAUSES) or length > 4 * protocol.MAX_DETAIL_CHARS or not abs(value) <= protocol.LARGEST:
      return replies, ended, True
    if len(worker.inbox) - at < size + length:
      break
    detail = worker.inbox[at + size : at + size + length].decode("utf-8", "replace")[: protocol.MAX_DETAIL_CHARS]
    replies.append(Reply(number, value, protocol.CAUSES[cause], detail, bool(retires)))
    at += size + length
  del worker.inbox[:at]
  return replies, ended, False


def end(worker: Worker) -> None:
  """Closes our side and tells the guardian to kill; `reap` has to follow, some time."""
  os.close(worker.jobs_fd)
  os.close(worker.results_fd)
  with contextlib.suppress(ProcessLookupError):
    # SIGCONT, in case a reward function has stopped its guardian.
    for number in (signal.SIGTERM, signal.SIGCONT) if sys.platform == "linux" else (signal.SIGKILL,):
      worker.process.send_signal(number)


def reap(worker: Worker, *, wait_s: float) -> bool:
  """Returns whether an ended worker is gone, after at most `wait_s` seconds.

  A guardian that takes longer is left to its work: killing it would free what it has yet to kill.
  """
  try:
    worker.process.wait(wait_s)
  except subprocess.TimeoutExpired:
    return False
  return True


def epitaph(worker: Worker) -> str:
  """How a worker that closed its pipe by itself came to its end, in one line."""
  try:
    code = worker.process.wait(0.5)
  except subprocess.TimeoutExpired:
    return "its worker closed its pipe"
  code = 128 - code if code < 0 else code
  if code > 128:
    with contextlib.suppress(ValueError):
      return f"its worker was killed by {signal.Signals(code - 128).name}"
  return f"its worker exited with status {code}"
