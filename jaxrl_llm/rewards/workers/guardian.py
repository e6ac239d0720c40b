"""The process chain of one worker: two guardians, one below the other, and the worker below both.

  python -P guardian.py JOBS_FD RESULTS_FD PARENT_PID

    pool -> outer guardian -> inner guardian -> worker.py -> processes of reward functions

The program is run by its path and imports only the standard library, so that a worker loads only
the modules of its reward functions.

A guardian computes nothing. It waits until the process above or below it ends. The outer guardian
also waits for a signal from the pool: SIGTERM, or the hang-up of the pipe of the jobs. The guardian
then kills all of its descendants and exits with the status of its child. The inner guardian acts
first, so that one of the two is alive as long as any process below them is, even if the outer one
is killed while it works. Each guardian is a child subreaper: the kernel makes it the parent of
every orphan below it, regardless of session, group and environment, and no process can escape it.

On Linux, no process below the pool survives, whichever process dies first.

- If the pool dies, or no longer needs the worker, the outer guardian tells the inner one to kill
  the processes below it, and then kills the rest.
- If the outer guardian dies, the inner one notices and kills the processes below it.
- If the inner guardian dies, the worker dies with it, and the outer one becomes the parent of the
  rest.
- If the worker dies, the inner guardian kills the processes that it left.
- A stopped guardian is continued by the death of the process above it, and by the pool.

If the kernel grants a PID namespace, the inner guardian is its first process. It cannot be
signalled from inside, and when it dies the kernel kills everything in the namespace.

These guarantees have limits:

- Without a PID namespace, reward functions run as the same user as the guardians. A function that
  kills both guardians at the same instant leaves its other processes behind. `kill -9 -1` does so,
  and kills the training too.
- Processes that fork faster than they can be listed survive for as long as they do so; the guardian
  does not give up.
- A program that runs as another user (`sudo`) cannot be killed. The guardian waits for it.
- On a kernel without lists of children (CONFIG_PROC_CHILDREN), only the process group of the worker
  can be killed.
- Other systems have no guardians.
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
# Time for the inner guardian to finish before it is killed, since it may be stopped repeatedly.
_INNER_FIRST_MS = 2000


def _library() -> ctypes.CDLL:
  return ctypes.CDLL(None, use_errno=True)


def _enter_pid_namespace() -> None:
  """Makes the next child the first process of a PID namespace.

  Changes nothing if the kernel denies it.
  """
  import resource

  flags, uid, gid = _CLONE_NEWPID, os.getuid(), os.getgid()
  if uid != 0:
    flags |= _CLONE_NEWUSER
  if _library().unshare(flags) != 0 or not flags & _CLONE_NEWUSER:
    return
  for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
    with open(f"/proc/self/{name}", "w") as file:
      file.write(text)
  # The kernel counts processes and threads for this namespace alone, so their number can be
  # limited. The limit never applies to root.
  _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
  if hard == resource.RLIM_INFINITY or hard > _MAX_TASKS:
    resource.setrlimit(resource.RLIMIT_NPROC, (_MAX_TASKS, _MAX_TASKS))


def _kill_listed() -> set[int]:
  """Kills the processes that the kernel lists below this one, and returns them.

  Dead ones are included. Each process is killed before its own children are listed. After SIGKILL
  it cannot fork, so any child missing from its list is an orphan, and thus a child of this process.
  """
  pids = [os.getpid()]
  if not os.path.exists("/proc/self") or os.readlink("/proc/self") != str(pids[0]):
    # These are process ids of another namespace, which here may belong to any process.
    return set()
  for pid in pids:
    if pid != pids[0]:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # The process is gone, or the kernel keeps no lists.
      for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children") as file:
          pids += map(int, file.read().split())
  return set(pids[1:])


def _kill_descendants(child: int) -> int:
  """Kills everything below this process, and returns the wait status of its child at the end.

  It repeats until the kernel lists nothing. No orphan is missed, since the list of this process's
  own children is complete: a child leaves it only when this process waits for it. The list is empty
  from the start if this process cannot list its descendants. This is so for the first process of a
  PID namespace, with which the kernel kills all others, and on a kernel that keeps no lists.
  """
  status, killed = int(signal.SIGKILL), set()
  while True:
    pids = _kill_listed()
    # Block only if all listed processes have been killed before and thus will end.
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
  """Waits for the end of the pool or of the inner guardian, or for a signal from the pool.

  The inner guardian waits as long as `inner_fd` is open.
  """
  # A signal only makes a pipe readable. A handler that raised could do so in places where nothing
  # catches the exception.
  word, handler_fd = os.pipe()
  os.set_blocking(handler_fd, False)
  signal.set_wakeup_fd(handler_fd)
  signal.signal(signal.SIGTERM, lambda *_: None)
  watch = select.poll()
  inner_death = os.pidfd_open(inner)  # Readable once the process is dead.
  watch.register(inner_death, select.POLLIN)
  watch.register(word, select.POLLIN)
  watch.register(jobs_fd, 0)  # Hang-up only: no process can write any more.
  with contextlib.suppress(ProcessLookupError):
    watch.register(os.pidfd_open(parent), select.POLLIN)
  if os.getppid() == parent:  # Otherwise the pool died before it could be watched.
    watch.poll()
  os.close(inner_fd)
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.kill(inner, signal.SIGCONT)
  ended = select.poll()
  ended.register(inner_death, select.POLLIN)
  ended.poll(_INNER_FIRST_MS)
  _exit_as(_kill_descendants(inner))


def _guard_inside(worker: int, outer_fd: int) -> NoReturn:
  """Waits for the end of the worker, or for the outer guardian to close `outer_fd` or die."""
  watch = select.poll()
  watch.register(os.pidfd_open(worker), select.POLLIN)  # Readable once the process is dead.
  watch.register(outer_fd, 0)
  watch.poll()
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(worker, signal.SIGKILL)  # The only means if the kernel keeps no lists.
  _exit_as(_kill_descendants(worker))


def _start_guardians(jobs_fd: int, results_fd: int, parent: int) -> None:
  """Returns in a new process, the worker, while this process and another become its guardians."""
  prctl = _library().prctl
  # Signals that the parent process ignores or blocks are inherited.
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
  prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
  prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)  # Harmless if only a thread of the pool ends.
  outer_fd, inner_fd = os.pipe()
  _enter_pid_namespace()
  if inner := os.fork():  # Safe: no imported module holds a thread or a lock yet.
    os.close(results_fd)  # The pipe must be closed when the worker dies, so that the pool sees it.
    _guard_outside(inner, inner_fd, jobs_fd, parent)
  os.close(inner_fd)
  prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
  prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
  os.setpgid(0, 0)  # Killing the process group of one guardian spares the other.
  if worker := os.fork():
    os.close(results_fd)
    _guard_inside(worker, outer_fd)
  os.close(outer_fd)
  # A subreaper notices the processes that a call leaves behind, and retires.
  prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
  prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
  os.setpgid(0, 0)


def main() -> None:
  """Becomes two guardians and a worker on Linux, and only a worker on other systems."""
  if sys.platform == "linux":
    _start_guardians(*(int(argument) for argument in sys.argv[1:]))
  # Like `python worker.py`, but with the bytecode that the pool's import of the file has cached.
  spec = importlib.util.spec_from_file_location("__main__", os.path.join(os.path.dirname(__file__), "worker.py"))
  sys.modules["__main__"] = module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)


if __name__ == "__main__":
  main()
