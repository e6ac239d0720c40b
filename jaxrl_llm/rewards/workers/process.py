"""One worker process as seen from the parent: its start, its messages and its end.

Sending and reading messages never blocks.
"""

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
_MAX_INBOX_BYTES = 1 << 20  # Far more than a batch of well-formed frames.

# A worker computes one thing at a time, and must never use the accelerators of the training.
_ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "MKL_NUM_THREADS": "1",
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
  "TOKENIZERS_PARALLELISM": "false",
}


class Reply(NamedTuple):
  """One frame from a worker.

  Attributes:
    number: Number of the job.
    value: Reward; 0 if the call failed.
    cause: Cause of the failure; empty if the call did not fail.
    detail: Description of the failure in one line.
    retires: Whether the worker exits after this frame.
  """

  number: int
  value: float
  cause: str
  detail: str
  retires: bool


@dataclass
class Worker:
  """A worker process as seen from the parent.

  Attributes:
    process: Outer guardian, the leader of a session of its own.
    jobs_fd: Non-blocking write end of the pipe of the jobs.
    results_fd: Non-blocking read end of the pipe of the answers.
    since: Monotonic time in seconds at which the first job in the queue started, or at which the
      process was started.
    outbox: Bytes that the pipe has not taken yet.
    inbox: Bytes of an incomplete frame.
    queue: Number and time limit in seconds of each job in flight, in order.
    ready: Whether the functions are built.
  """

  process: subprocess.Popen
  jobs_fd: int
  results_fd: int
  since: float
  outbox: bytearray = field(default_factory=bytearray)
  inbox: bytearray = field(default_factory=bytearray)
  queue: deque[tuple[int, float]] = field(default_factory=deque)
  ready: bool = False


def start_worker(functions: Sequence[tuple[str, Any, tuple[str, ...]]], *, memory_gb: float | None) -> Worker:
  """Starts a worker without waiting until it is ready.

  Args:
    functions: Import path, settings and further imports of each reward function.
    memory_gb: Address space limit of the worker, in GiB. None sets no limit.
  """
  jobs_read, jobs_write = os.pipe()
  results_read, results_write = os.pipe()
  try:
    process = subprocess.Popen(
      [sys.executable, "-P", *(["-B"] if sys.dont_write_bytecode else []), _PROGRAM,
       str(jobs_read), str(results_write), str(os.getpid())],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,  # Output of reward functions cannot flood the parent.
      stderr=subprocess.DEVNULL,
      env={**os.environ, **_ENVIRONMENT},
      pass_fds=(jobs_read, results_write),
      # Only the parent gets Control-C, and the process group can be killed as a whole.
      start_new_session=True,
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
  """Queues a message and writes as much as the pipe takes now; `flush` writes the rest."""
  worker.outbox += pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
  flush(worker)


def flush(worker: Worker) -> None:
  """Writes as much of the outbox as the pipe takes without blocking."""
  try:
    while worker.outbox:
      del worker.outbox[: os.write(worker.jobs_fd, memoryview(worker.outbox)[:_READ_BYTES].tobytes())]
  except BlockingIOError:
    return
  except BrokenPipeError:  # The worker is dead. `read_replies` reports that, with its last answers.
    worker.outbox.clear()


def read_replies(worker: Worker) -> tuple[list[Reply], bool, bool]:
  """Reads the answers that have arrived, without waiting for more.

  Returns:
    The replies, whether the pipe was closed, and whether it holds malformed frames, which a worker
    never writes by itself.
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


def end_worker(worker: Worker) -> None:
  """Closes the parent's ends of the pipes and tells the guardian to kill the worker.

  Call `reap` at some later time.
  """
  os.close(worker.jobs_fd)
  os.close(worker.results_fd)
  with contextlib.suppress(ProcessLookupError):
    # SIGCONT continues a guardian that a reward function has stopped.
    for number in (signal.SIGTERM, signal.SIGCONT) if sys.platform == "linux" else (signal.SIGKILL,):
      worker.process.send_signal(number)


def reap(worker: Worker, *, wait_s: float) -> bool:
  """Returns whether a worker passed to `end_worker` is gone, after at most `wait_s` seconds.

  A guardian that takes longer continues its work. Killing it would leave behind the processes that
  it has not killed yet.
  """
  try:
    worker.process.wait(wait_s)
  except subprocess.TimeoutExpired:
    return False
  return True


def describe_exit(worker: Worker) -> str:
  """Describes in one line how a worker that closed its pipe by itself ended."""
  try:
    code = worker.process.wait(0.5)
  except subprocess.TimeoutExpired:
    return "its worker closed its pipe"
  code = 128 - code if code < 0 else code
  if code > 128:
    with contextlib.suppress(ValueError):
      return f"its worker was killed by {signal.Signals(code - 128).name}"
  return f"its worker exited with status {code}"
