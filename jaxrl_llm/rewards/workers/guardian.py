"""The program of one worker: two guardians, one below the other, and the worker below both.

  python -P guardian.py JOBS_FD RESULTS_FD PARENT_PID

    pool -> outer guardian -> inner guardian -> worker.py -> whatever reward functions start

It is run by its path and imports the standard library alone, so that a worker loads nothing but what its reward functions load. A guardian
computes nothing. It waits for the end of the process above it or of the process below it, and the outer one for the pool's word as well
(SIGTERM, or the hang-up of the jobs' pipe); then it kills all of its descendants and exits as its child did. The outer one lets the inner
one go first, so that one of them is alive as long as anything below them is, even if the outer one is killed in the midst of its work. A
guardian is a child subreaper: the kernel hands it every orphan below it, whatever its session, group or environment, and no process can
leave it otherwise.

What is promised on Linux: nothing below the pool survives, whichever process dies first.

- The pool dies, or is done with the worker: the outer guardian tells the inner one to kill what is below it, and kills what is left.
- The outer guardian dies: the inner one notices and kills what is below it.
- The inner guardian dies: the worker dies with it and the outer one is handed the rest.
- The worker dies: the inner guardian kills what it left.
- A guardian that was stopped is continued by the death of the process above it, and by the pool.

Where the kernel grants a PID namespace, the inner guardian is its first process: it cannot be signalled from inside, and the kernel itself
kills everything in the namespace with it.

What is not promised: without a PID namespace, reward functions share a user with everything here, so one that kills both guardians in the
same instant, as `kill -9 -1` does (to the training too), leaves its other processes behind. So does one that forks faster than it can be
listed, for as long as it does: the guardian does not give up. A program that runs as another user (`sudo`) cannot be killed, but is waited
for. On a kernel without lists of children (CONFIG_PROC_CHILDREN), only the worker's process group can be killed. Other systems have no
guardians.
"""

import contextlib
import ctypes
import importlib.util
import os
import select
import signal
import sys
from typing import NoReturn

_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MAX_TASKS = 512
_INNER_FIRST_MS = 2000  # What the inner guardian has for its work before it is killed: it may be stopped again and again.


def _library() -> ctypes.CDLL:
  return ctypes.CDLL(None, use_errno=True)


def _enter_pid_namespace() -> None:
  """Lets the next child be the first process of a PID namespace; changes nothing where that is denied."""
  import resource

  flags, uid, gid = _CLONE_NEWPID, os.getuid(), os.getgid()
  if uid != 0:
    flags |= _CLONE_NEWUSER
  if _library().unshare(flags) != 0 or not flags & _CLONE_NEWUSER:
    return
  for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
    with open(f"/proc/self/{name}", "w") as file:
      file.write(text)
  # Processes and threads can be bounded because the kernel counts them for this namespace alone; root is never bound.
  _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
  if hard == resource.RLIM_INFINITY or hard > _MAX_TASKS:
    resource.setrlimit(resource.RLIMIT_NPROC, (_MAX_TASKS, _MAX_TASKS))


def _kill_listed() -> set[int]:
  """Kills what the kernel lists below this process, dead ones included, and returns it.

  Each is killed before its own children are listed: once SIGKILL has been sent, it can fork no more, so a child that its list lacks is an
  orphan and this process's own.
  """
  pids = [os.getpid()]
  if not os.path.exists("/proc/self") or os.readlink("/proc/self") != str(pids[0]):
    return set()  # The numbers of another namespace, which here may be those of any process.
  for pid in pids:
    if pid != pids[0]:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # It has gone, or the kernel keeps no lists.
      for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children") as file:
          pids += map(int, file.read().split())
  return set(pids[1:])


def _kill_descendants(child: int) -> int:
  """Kills everything below this process, and returns the wait status of its child when nothing is left.

  It goes round until the kernel lists nothing. No orphan is missed then, since the list of this process's own children is complete: none
  leaves it but by being waited for here. The list is empty at once where this process cannot list: as the first of a PID namespace, with
  which the kernel kills all of it, or under a kernel that keeps no lists.
  """
  status, killed = int(signal.SIGKILL), set()
  while True:
    pids = _kill_listed()
    # It blocks only where all that is listed has been killed before, and so has yet to end.
    flags = 0 if pids and pids <= killed else os.WNOHANG
    with contextlib.suppress(ChildProcessError):
      while (waited := os.waitpid(-1, flags))[0]:
        status, flags = waited[1] if waited[0] == child else status, os.WNOHANG
    if not pids:
      return status
    killed = pids


def _exit_as(status: int) -> NoReturn:
  os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _guard_outside(inner: int, inner_fd: int, jobs_fd: int, parent: int) -> NoReturn:
  """Waits for the end of the pool or of the inner guardian, or for the pool's word.

  The inner guardian waits as long as `inner_fd` is open.
  """
  # A signal only makes a pipe readable: a handler that raised could do so anywhere, also where nothing catches it.
  word, handler_fd = os.pipe()
  os.set_blocking(handler_fd, False)
  signal.set_wakeup_fd(handler_fd)
  signal.signal(signal.SIGTERM, lambda *_: None)
  watch = select.poll()
  inner_death = os.pidfd_open(inner)  # Readable once it is dead.
  watch.register(inner_death, select.POLLIN)
  watch.register(word, select.POLLIN)
  watch.register(jobs_fd, 0)  # Nothing but the hang-up: no process can write any more.
  with contextlib.suppress(ProcessLookupError):
    watch.register(os.pidfd_open(parent), select.POLLIN)
  if os.getppid() == parent:  # Else it died before it could be watched.
    watch.poll()
  os.close(inner_fd)
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.kill(inner, signal.SIGCONT)
  ended = select.poll()
  ended.register(inner_death, select.POLLIN)
  ended.poll(_INNER_FIRST_MS)
  _exit_as(_kill_descendants(inner))


def _guard_inside(worker: int, outer_fd: int) -> NoReturn:
  """Waits for the end of the worker, or for the outer guardian's end or word, which hang up `outer_fd`."""
  watch = select.poll()
  watch.register(os.pidfd_open(worker), select.POLLIN)  # Readable once it is dead.
  watch.register(outer_fd, 0)
  watch.poll()
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(worker, signal.SIGKILL)  # All that can be done where the kernel keeps no lists.
  _exit_as(_kill_descendants(worker))


def _start_guardians(jobs_fd: int, results_fd: int, parent: int) -> None:
  """Returns in a new process, the worker; this one and another become its guardians."""
  prctl = _library().prctl
  signal.signal(signal.SIGTERM, signal.SIG_DFL)  # What the parent process ignores or blocks is inherited.
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
  prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
  prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)  # Harmless when a mere thread of the pool ends.
  outer_fd, inner_fd = os.pipe()
  _enter_pid_namespace()
  if inner := os.fork():  # Safe: nothing has been imported yet that could hold a thread or a lock.
    os.close(results_fd)  # The pool must see its end when the worker dies.
    _guard_outside(inner, inner_fd, jobs_fd, parent)
  os.close(inner_fd)
  prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
  prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
  os.setpgid(0, 0)  # What kills the group of one guardian spares the other.
  if worker := os.fork():
    os.close(results_fd)
    _guard_inside(worker, outer_fd)
  os.close(outer_fd)
  prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # So that it knows of what a call leaves behind, and retires.
  prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
  os.setpgid(0, 0)


def main() -> None:
  """Becomes two guardians and a worker on Linux, and only a worker elsewhere."""
  if sys.platform == "linux":
    _start_guardians(*(int(argument) for argument in sys.argv[1:]))
  # As `python worker.py` would, but from the bytecode that the pool's own import of the file has left.
  spec = importlib.util.spec_from_file_location("__main__", os.path.join(os.path.dirname(__file__), "worker.py"))
  sys.modules["__main__"] = module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)


if __name__ == "__main__":
  main()
