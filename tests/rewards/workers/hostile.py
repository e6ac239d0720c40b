"""Reward functions for the tests of the pool; `act` does what the text says to its own process."""

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

from jaxrl_llm.text_types import Completion, Turn

# Usual limit of open files. The descriptors of a worker's pipes may be as high as the number of
# files that its parent has open.
NUM_FILES = 1024


class Unshowable(Exception):
  def __str__(self):
    raise ValueError("no text")


class Unpicklable:
  def __reduce__(self):
    raise TypeError("stays here")


def fork(count, *, leave_session=False):
  for _ in range(count):
    if os.fork() == 0:
      if leave_session:
        os.setsid()
      time.sleep(600)


def close_and_reopen():
  os.closerange(0, NUM_FILES)
  for _ in range(NUM_FILES):
    os.open(os.devnull, os.O_RDWR)


def close_jobs():
  os.close(int(sys.argv[1]))
  return 1.0


def kill_parents():
  fork(5, leave_session=True)
  os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)
  time.sleep(600)


def kill_guardian():
  """Kills its guardian, after making sure that this process and others do not die with it."""
  fork(5, leave_session=True)
  ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG.
  os.kill(os.getppid(), signal.SIGKILL)
  time.sleep(600)


def stop_guardians():
  parent = os.getppid()
  with open(f"/proc/{parent}/stat") as file:
    grandparent = int(file.read().rpartition(")")[2].split()[1])
  fork(5, leave_session=True)
  for pid in (grandparent, parent):
    # The id of a grandparent outside the PID namespace is 0, which means this process group.
    os.kill(pid, signal.SIGSTOP)
  time.sleep(600)


def run_away():
  """Moves on from process to process: each forks the next, in a session of its own, and exits."""
  until = time.monotonic() + 20  # Limits the damage if the test has a bug.
  for _ in range(8):
    if os.fork() == 0:
      while time.monotonic() < until:
        if os.fork():
          os._exit(0)
        os.setsid()
      os._exit(0)
  time.sleep(600)


def block_signals():
  signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.NSIG))
  for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
      signal.signal(number, signal.SIG_IGN)
  time.sleep(600)


def shout():
  while True:
    print("x" * 10_000)
    print("y" * 10_000, file=sys.stderr)


def raise_(error):
  raise error


def stay(seconds, value):
  threading.Thread(target=time.sleep, args=(seconds,), daemon=True).start()
  return value


def leave_process(value):
  """Leaves behind a process that, like a daemon, is not a child of this one."""
  child = os.fork()
  if child == 0:
    os.setsid()
    if os.fork() == 0:
      time.sleep(600)
    os._exit(0)
  os.waitpid(child, 0)
  return value


def leave_alarm(value):
  signal.setitimer(signal.ITIMER_REAL, 0.05)
  return value


def write_to_all_pipes():
  for fd in range(3, NUM_FILES):
    try:
      os.write(fd, b"1.0 is what this deserves " * 10)
    except OSError:
      continue
  return 1.0


# In a PID namespace, the inner guardian is the first process and cannot be killed from inside.
# Without one, it dies.
UNSURE = "unsure"
DEEDS = {
  "fine": (lambda: 0.5, None),
  "true": (lambda: True, None),
  "numpy": (lambda: np.float32(0.25), None),
  "zero_dimensional": (lambda: np.array(0.75), None),
  "sleep": (lambda: time.sleep(600), "timeout"),
  "nap": (lambda: time.sleep(0.1) or 0.5, None),
  "hold_gil": (lambda: 9**9**9, "timeout"),
  "exit": (lambda: os._exit(0), "died"),
  "segfault": (lambda: ctypes.string_at(0), "died"),
  "abort": (os.abort, "died"),
  "allocate": (lambda: bytearray(64 << 30), "memory"),
  "nan": (lambda: math.nan, "not_finite"),
  "infinite": (lambda: math.inf, "not_finite"),
  "too_large": (lambda: 1e39, "not_finite"),
  "huge_integer": (lambda: 10**400, "not_finite"),
  "none": (lambda: None, "wrong_type"),
  "text": (lambda: "1.0" * 10**6, "wrong_type"),
  "array": (lambda: np.ones(3), "wrong_type"),
  "complex": (lambda: 1j, "wrong_type"),
  "unpicklable": (Unpicklable, "wrong_type"),
  "raise": (lambda: raise_(ValueError("x" * 10**6)), "raised"),
  "unshowable": (lambda: raise_(Unshowable()), "raised"),
  "interrupt": (lambda: raise_(KeyboardInterrupt()), "raised"),
  "system_exit": (lambda: sys.exit(0), "raised"),
  "base_exception": (lambda: raise_(BaseException("base")), "raised"),
  "recursion": (lambda: (f := lambda n: f(n + 1) + 1)(0), "raised"),
  "close": (close_and_reopen, "died"),
  "close_jobs": (close_jobs, "died"),
  "kill_group": (lambda: os.killpg(0, signal.SIGKILL), UNSURE),
  "kill_parents": (kill_parents, UNSURE),
  "kill_guardian": (kill_guardian, UNSURE),
  "stop_guardians": (stop_guardians, "timeout"),
  "block_signals": (block_signals, "timeout"),
  "stop": (lambda: os.kill(os.getpid(), signal.SIGSTOP) or time.sleep(600), "timeout"),
  "shout": (shout, "timeout"),
  "fork": (lambda: fork(50) or time.sleep(600), "timeout"),
  "fork_away": (lambda: fork(5, leave_session=True) or time.sleep(600), "timeout"),
  "run_away": (run_away, "timeout"),
  "stay": (lambda: stay(600, 0.5), None),
  "leave_process": (lambda: leave_process(0.5), None),
  "leave_alarm": (lambda: leave_alarm(0.5), None),
  "write_to_all_pipes": (write_to_all_pipes, "flooded"),
  "start_program": (lambda: float(subprocess.run(["true"], check=False).returncode), None),
}
"""Deeds by name, each with the cause of its failure; None if it does not fail."""


def act(completion, example):
  """Does what the first word of the text says."""
  deed, _ = DEEDS[completion.text.split()[0]]
  return deed()


def rewards_of_turns(completion, example):
  """Returns the sum of the turns' rewards, or -1 if the types are not those of the package."""
  del example
  if type(completion) is not Completion or any(type(turn) is not Turn for turn in completion.turns):
    return -1
  return sum(turn.reward for turn in completion.turns)


def count_characters(completion, example):
  return len(completion.text)


def first_character(completion, example):
  return ord(completion.text[0])


def count_tokens(completion, example):
  return sum(completion.token_ids) + completion.num_tokens + completion.stopped


def spoil_example(completion, example):
  example["uses"].append(1)
  return len(example["uses"])


def loaded(completion, example):
  return float(completion.text in sys.modules)


def num_threads(completion, example):
  return len(os.listdir("/proc/self/task"))


_calls = []


def times_called(completion, example):
  _calls.append(1)
  return len(_calls)


def scaled(factor):
  return lambda completion, example: factor * len(completion.text)


def cannot_be_built():
  raise FileNotFoundError("no such vocabulary")
