"""The worker proper: it reads jobs, calls reward functions and answers with frames of fixed form.

  python -P worker.py JOBS_FD RESULTS_FD

The parent process never unpickles what a worker wrote. `guardian.py` runs this file by its path, in a process below its own, so it imports
the standard library alone until reward functions are built.
"""

import contextlib
import importlib
import os
import pickle
import signal
import struct
import sys
from array import array
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

# What the pool and a worker agree on. The last two are the parent's to say.
CAUSES = ("", "raised", "wrong_type", "not_finite", "timeout", "memory", "died", "flooded")
FRAME = struct.Struct("<QdBBH")  # Job number, value, index of the cause, whether this worker retires, bytes of detail.
READY = 2**64 - 1  # The number of the frame that says that the functions are built.
MAX_DETAIL_CHARS = 300
LARGEST = 3.4028234663852886e38  # Of float32, which is what rewards become.


def build(target: str, settings: Mapping[str, Any] | None) -> Callable[..., Any]:
  """The reward function that `package.module:name` is, or makes where it is given settings.

  Example:
    >>> build("math:hypot", None)(3, 4)
    5.0
  """
  module, _, path = target.partition(":")
  found = importlib.import_module(module)
  for name in path.split("."):
    found = getattr(found, name)
  return found if settings is None else found(**settings)


def judge(value: Any) -> tuple[float, str, str]:
  """What a reward function returned, as (number, cause, detail): the cause is empty for one finite number.

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


def describe(error: BaseException) -> str:
  """An exception in one line; survives exceptions that cannot be shown."""
  try:
    message = str(error)
  except BaseException as second:
    message = f"(its text cannot be made: {type(second).__name__})"
  return " ".join(f"{type(error).__name__}: {message[: 4 * MAX_DETAIL_CHARS]}".split())[:MAX_DETAIL_CHARS]


def call(function: Callable[..., Any], job: tuple, types: ModuleType) -> tuple[float, str, str]:
  """Calls a reward function and judges its value; whatever it raises, `SystemExit` included, becomes a cause.

  Args:
    function: the reward function.
    job: text, ids as bytes, number of tokens, whether the response stopped, its turns as plain tuples, and the example, pickled.
    types: `jaxrl_llm.text_types`, which this program can import only once it knows the parent's path.
  """
  text, ids, num_tokens, stopped, turns, example = job
  try:
    tokens = array("q")
    tokens.frombytes(ids)
    # Unpickled anew for each job, so that a function that changes its example changes nobody else's.
    completion = types.Completion(text, tuple(tokens), num_tokens, stopped, tuple(types.Turn(*turn) for turn in turns))
    return judge(function(completion, pickle.loads(example)))
  except MemoryError as error:
    return 0.0, "memory", describe(error)
  except TimeoutError as error:  # Of a function that keeps a deadline of its own.
    return 0.0, "timeout", describe(error)
  except BaseException as error:
    return 0.0, "raised", describe(error)


def frame(number: int, value: float = 0.0, cause: str = "", detail: str = "", *, retires: bool = False) -> bytes:
  """A message to the parent.

  Example:
    >>> FRAME.unpack(frame(7, 0.5))
    (7, 0.5, 0, 0, 0)
  """
  shown = detail.encode("utf-8", "replace")[: 4 * MAX_DETAIL_CHARS]
  return FRAME.pack(number, value, CAUSES.index(cause), retires, len(shown)) + shown


def _has_children() -> bool:
  """Whether this process has any; reaps none."""
  try:
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
  except ChildProcessError:
    return False
  return True


def _read(fd: int, size: int) -> bytes:
  parts = []
  while size:
    part = os.read(fd, min(size, 1 << 20))
    if not part:
      os._exit(0)  # The parent has no more jobs.
    parts.append(part)
    size -= len(part)
  return b"".join(parts)


def _message(fd: int) -> Any:
  return pickle.loads(_read(fd, int.from_bytes(_read(fd, 8), "little")))


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
    file.write("500")  # Where memory ends, the kernel takes a worker and not the training.


def serve(jobs_fd: int, results_fd: int) -> None:
  """Builds the functions that the first messages name, says so, and answers length-prefixed pickles with frames until there are no more."""
  setup = _message(jobs_fd)
  sys.path[:] = setup["path"]
  functions, target = [], ""
  try:
    types = importlib.import_module("jaxrl_llm.text_types")
    _lower_limits(setup["memory_bytes"])
    for target, settings, imports in _message(jobs_fd):
      functions.append(build(target, settings))
      for name in imports:
        importlib.import_module(name)
  except BaseException as error:
    _write(results_fd, frame(READY, cause="raised", detail=f"{target}: {describe(error)}"))
    os._exit(1)
  _write(results_fd, frame(READY))
  pipes = [os.fstat(fd).st_ino for fd in (jobs_fd, results_fd)]
  had_children, num_threads = _has_children(), len(sys._current_frames())
  while True:
    for number, index, *job in _message(jobs_fd):
      value, cause, detail = call(functions[index], job, types)
      signal.setitimer(signal.ITIMER_REAL, 0)  # An alarm that it left behind would hit the next job.
      if [os.fstat(fd).st_ino for fd in (jobs_fd, results_fd)] != pipes:
        os._exit(1)  # It closed or replaced our pipes: its own loss, while we still know whose.
      retires = len(sys._current_frames()) > num_threads or (not had_children and _has_children())
      _write(results_fd, frame(number, value, cause, detail, retires=retires))
      if retires:  # What it left running would slow or kill the next job.
        os._exit(0)


if __name__ == "__main__":
  serve(int(sys.argv[1]), int(sys.argv[2]))
