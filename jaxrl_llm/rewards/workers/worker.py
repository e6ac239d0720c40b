"""The program of a worker, which reads jobs, calls reward functions and answers in frames.

  python -P worker.py JOBS_FD RESULTS_FD

The frames have a fixed form, so that the parent process never unpickles data from a worker.
`guardian.py` runs this file by its path, in a process below its own. Until the reward functions are
built, this program imports only the standard library.
"""

import contextlib
import importlib
import os
import pickle
import pkgutil
import signal
import struct
import sys
from array import array
from collections.abc import Callable
from types import ModuleType
from typing import Any, BinaryIO

# The protocol between the pool and a worker. Only the parent reports the last two causes.
CAUSES = ("", "raised", "wrong_type", "not_finite", "timeout", "memory", "died", "flooded")
# Job number, value, index of the cause, whether this worker retires, bytes of detail.
FRAME = struct.Struct("<QdBBH")
READY = 2**64 - 1  # Job number of the frame that reports that the functions are built.
MAX_DETAIL_CHARS = 300
LARGEST = 3.4028234663852886e38  # Largest float32, the type to which rewards are converted.


def judge(value: Any) -> tuple[float, str, str]:
  """Converts the result of a reward function to (number, cause, detail).

  The cause is empty if the result is one finite number.

  Example:
    >>> judge(1), judge(None)
    ((1.0, '', ''), (0.0, 'wrong_type', 'it returned NoneType, expected one finite number'))
    >>> judge(float("nan"))
    (0.0, 'not_finite', 'it returned nan, expected one finite number')
  """
  kind = type(value)
  if kind not in (float, int, bool):
    shape = getattr(value, "shape", None) if kind.__module__ == "numpy" else None
    if shape != () or value.dtype.kind not in "biuf":
      shape = "" if shape is None else f" of shape {shape}"
      return 0.0, "wrong_type", f"it returned {kind.__name__[:80]}{shape}, expected one finite number"
  try:
    number = float(value)
  except OverflowError:  # An integer beyond float64.
    number = float("inf")
  if not abs(number) <= LARGEST:
    return 0.0, "not_finite", f"it returned {number}, expected one finite number"
  return number, "", ""


def describe_error(error: BaseException) -> str:
  """Describes an exception in one line, even if converting it to text raises another one."""
  try:
    message = str(error)
  except BaseException as second:
    message = f"(its text cannot be shown: {type(second).__name__})"
  return " ".join(f"{type(error).__name__}: {message[: 4 * MAX_DETAIL_CHARS]}".split())[:MAX_DETAIL_CHARS]


def call(function: Callable[..., Any], job: tuple, types: ModuleType) -> tuple[float, str, str]:
  """Calls a reward function and returns the number, the cause and the detail, as in `judge`.

  Any exception becomes a cause, even `SystemExit`.

  Args:
    function: Reward function.
    job: Text, token ids as bytes, number of tokens, whether the response stopped, its turns as
      plain tuples, and the pickled example.
    types: Module `jaxrl_llm.text_types`, which this program can import only after it has received
      the parent's path.
  """
  text, ids, num_tokens, stopped, turns, example = job
  try:
    tokens = array("q")
    tokens.frombytes(ids)
    # Unpickled for each job, so that a function that modifies its example affects no other job.
    completion = types.Completion(text, tuple(tokens), num_tokens, stopped, tuple(types.Turn(*turn) for turn in turns))
    return judge(function(completion, pickle.loads(example)))
  except MemoryError as error:
    return 0.0, "memory", describe_error(error)
  except TimeoutError as error:  # The function has a deadline of its own.
    return 0.0, "timeout", describe_error(error)
  except BaseException as error:
    return 0.0, "raised", describe_error(error)


def frame(number: int, value: float = 0.0, cause: str = "", detail: str = "", *, retires: bool = False) -> bytes:
  """Packs a message to the parent.

  Example:
    >>> FRAME.unpack(frame(7, 0.5))
    (7, 0.5, 0, 0, 0)
  """
  shown = detail.encode("utf-8", "replace")[: 4 * MAX_DETAIL_CHARS]
  return FRAME.pack(number, value, CAUSES.index(cause), retires, len(shown)) + shown


def _has_children() -> bool:
  """Returns whether this process has children, without reaping any."""
  try:
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
  except ChildProcessError:
    return False
  return True


def _message(jobs: BinaryIO) -> Any:
  try:
    return pickle.load(jobs)
  except EOFError:
    os._exit(0)  # The parent has no more jobs.


def _write(fd: int, data: bytes) -> None:
  while data:
    data = data[os.write(fd, data) :]


def _lower_limits(memory_bytes: int | None) -> None:
  import resource

  for kind, limit in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0)):
    _, hard = resource.getrlimit(kind)
    if limit is not None and (hard == resource.RLIM_INFINITY or limit < hard):
      resource.setrlimit(kind, (limit, limit))
  with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
    file.write("500")  # When memory runs out, the kernel kills a worker rather than the training.


def serve(jobs_fd: int, results_fd: int) -> None:
  """Builds the reward functions, reports it, and answers jobs until the pipe is closed.

  The first two messages hold the setup and the functions. Messages are pickles, and answers are
  frames.
  """
  jobs = os.fdopen(jobs_fd, "rb", closefd=False)
  setup = _message(jobs)
  sys.path[:] = setup["path"]
  functions, target = [], ""
  try:
    types = importlib.import_module("jaxrl_llm.text_types")
    _lower_limits(setup["memory_bytes"])
    for target, settings, imports in _message(jobs):
      function = pkgutil.resolve_name(target)
      functions.append(function if settings is None else function(**settings))
      for name in imports:
        importlib.import_module(name)
  except BaseException as error:
    _write(results_fd, frame(READY, cause="raised", detail=f"{target}: {describe_error(error)}"))
    os._exit(1)
  _write(results_fd, frame(READY))
  pipes = [os.fstat(fd).st_ino for fd in (jobs_fd, results_fd)]
  had_children, num_threads = _has_children(), len(sys._current_frames())
  while True:
    for number, index, *job in _message(jobs):
      value, cause, detail = call(functions[index], job, types)
      # An alarm left behind by the function would hit the next job.
      signal.setitimer(signal.ITIMER_REAL, 0)
      if [os.fstat(fd).st_ino for fd in (jobs_fd, results_fd)] != pipes:
        # The function closed or replaced the pipes. Exiting now charges the failure to its job.
        os._exit(1)
      retires = len(sys._current_frames()) > num_threads or (not had_children and _has_children())
      _write(results_fd, frame(number, value, cause, detail, retires=retires))
      if retires:  # Threads or processes left running would slow or kill the next job.
        os._exit(0)


if __name__ == "__main__":
  serve(int(sys.argv[1]), int(sys.argv[2]))
