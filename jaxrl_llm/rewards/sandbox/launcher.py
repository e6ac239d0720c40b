"""A standalone launcher of one program, under limits and, on request, in namespaces of its own.

  python -I -S launcher.py namespaces|limits SPEC_FD STATUS_FD PARENT_PID

It imports only the standard library. It reads the marshalled spec of the program from SPEC_FD, and
writes status lines to STATUS_FD: `first` and the process to kill, `started`, `ended` with exit
status and seconds, or `error` and an error of the launcher. Its standard streams are those of the
program, which gets no other descriptor.

In `namespaces`, the program is a process without capabilities. Its user owns nothing outside; if
the launcher is root, it is the unprivileged user 65534. The program has a PID namespace that dies
as a whole, no network except an idle loopback device, a root of read-only bind mounts, and one
small writable folder in memory.
"""

import contextlib
import ctypes
import marshal
import os
import resource
import signal
import sys
import time

HOME = "/sandbox"  # Working directory of the program, and the only place to which it can write.
USER = 1000  # User of the program, inside the namespaces.
_OUTER_USER = 65534  # User of the program, outside, if the launcher may choose it.

_CLONE_NEW = dict(NS=0x00020000, CGROUP=0x02000000, UTS=0x04000000, IPC=0x08000000, USER=0x10000000, PID=0x20000000, NET=0x40000000)
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_DEVICES = ("full", "null", "random", "urandom", "zero")
# The first usable one is taken, in the mount namespace of the launcher.
_MOUNT_POINTS = ("/mnt", "/srv", "/media", "/opt", "/var/tmp", "/tmp")

_library = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, call: str) -> None:
  if result == -1:
    error = ctypes.get_errno()
    raise OSError(error, f"{call}: {os.strerror(error)}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
  result = _library.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), data.encode())
  _checked(result, f"mount of {source} on {target}")


def _write(path: str, text: str) -> None:
  with open(path, "w") as file:
    file.write(text)


def _unshare() -> bool:
  """Leaves the namespaces of the caller; the next child is the first of its PID namespace.

  Returns:
    Whether this process is root inside and may become `USER`, which is an unprivileged user
    outside. If not, it is `USER` already.
  """
  unshared_read, unshared_write = os.pipe()
  pid, helper = os.getpid(), 0
  if os.geteuid() == 0:  # Only a process outside the namespace can map a second user.
    helper = os.fork()
    if not helper:
      os.close(unshared_write)
      try:
        os.read(unshared_read, 1)
        for name in ("uid_map", "gid_map"):
          _write(f"/proc/{pid}/{name}", f"0 0 1\n{USER} {_OUTER_USER} 1\n")
      except OSError:
        os._exit(1)
      os._exit(0)
  uid, gid = os.geteuid(), os.getegid()
  _checked(_library.unshare(sum(_CLONE_NEW.values())), "unshare")
  os.close(unshared_write)
  os.close(unshared_read)
  mapped = helper != 0 and os.waitpid(helper, 0)[1] == 0
  if not mapped:
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{USER} {uid} 1")
    _write("/proc/self/gid_map", f"{USER} {gid} 1")
  # Without nested namespaces, a program can attack less of the kernel.
  with contextlib.suppress(OSError):
    _write("/proc/sys/user/max_user_namespaces", "0")
  return mapped


def _read_only(target: str) -> None:
  # The constants of `mount_setattr` have the same values as these two flags.
  attributes = (ctypes.c_uint64 * 4)(_MS_RDONLY | _MS_NOSUID, 0, 0, 0)
  if _library.syscall(_MOUNT_SETATTR, -100, target.encode(), _AT_RECURSIVE, ctypes.byref(attributes), 32) == -1:
    # Only the real root may clear these flags.
    kept = os.statvfs(target).f_flag & (_MS_NODEV | _MS_NOEXEC)
    _mount("none", target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | kept)


def _bind(source: str, target: str) -> None:
  if os.path.isdir(source):
    os.makedirs(target, exist_ok=True)
  else:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    _write(target, "")
  _mount(source, target, None, _MS_BIND | _MS_REC)


def _build_root(spec: dict) -> None:
  """Builds the root of the program.

  It holds the visible paths (read-only), devices without content, the processes of the namespace,
  and a folder in memory.
  """
  paths = [path for path in spec["visible"] if os.path.exists(path)]
  root = next(at for at in _MOUNT_POINTS if os.path.isdir(at) and not any(f"{path}/".startswith(f"{at}/") for path in paths))
  _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
  _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=0755")
  for path in paths:
    if os.path.islink(path):  # On most systems, /lib is a link to usr/lib.
      os.symlink(os.readlink(path), root + path)
    else:
      _bind(path, root + path)
      _read_only(root + path)
  for name in _DEVICES:
    _bind(f"/dev/{name}", f"{root}/dev/{name}")
  for i, name in enumerate(("stdin", "stdout", "stderr")):
    os.symlink(f"/proc/self/fd/{i}", f"{root}/dev/{name}")
  for path in (f"{root}/proc", root + HOME):
    os.mkdir(path)
  for data in ("subset=pid", ""):
    # If a container hides parts of /proc, there is none inside. Programs hardly ever need it.
    with contextlib.suppress(OSError):
      _mount("proc", f"{root}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, data)
      break
  space = f"size={spec['disk_bytes']},nr_inodes=4096,mode=0700,uid={USER},gid={USER}"
  _mount("tmpfs", root + HOME, "tmpfs", _MS_NOSUID | _MS_NODEV, space)
  os.symlink(HOME, f"{root}/tmp")
  os.chdir(root)
  _checked(_library.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
  _checked(_library.umount2(b".", _MNT_DETACH), "umount of the old root")
  os.chdir("/")
  _mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
  _library.sethostname(b"sandbox", 7)


def _become_program(spec: dict, user: int | None) -> None:
  """Turns this process into the program; never returns."""
  os.setsid()
  if user is not None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
  for name, value in spec["limits"].items():
    kind = getattr(resource, f"RLIMIT_{name}")
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))
  _library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
  # A change of user clears this setting, so it comes last.
  _library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
  for number in range(1, signal.NSIG):
    with contextlib.suppress(OSError, ValueError):
      signal.signal(number, signal.SIG_DFL)
  os.closerange(3, 65536)
  os.execve(spec["argv"][0], spec["argv"], spec["env"])


def _run(spec: dict, user: int | None, report, *, alone: bool) -> None:
  """Writes the files of the program, runs it, and reports its start and its end."""
  os.chdir(spec["home"])
  for name, text in spec["files"].items():
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
      file.write(text)
    if user is not None:
      os.chown(name, user, user)
  report("started")
  started = time.monotonic()
  child = os.fork()
  if not child:
    try:
      _become_program(spec, user)
    except BaseException as error:
      report("error", f"{type(error).__name__}: {error}")
    os._exit(127)
  if not alone:  # Without a PID namespace, the session of the program can be killed.
    report("first", child)
  while (waited := os.wait())[0] != child:
    pass  # Orphans are reaped here too.
  with contextlib.suppress(ProcessLookupError):  # Kill processes that stayed in its session.
    os.killpg(child, signal.SIGKILL)
  report("ended", os.waitstatus_to_exitcode(waited[1]), time.monotonic() - started)


def main() -> None:
  """Reads the spec of a program and runs it."""
  mode, (spec_fd, status_fd, parent) = sys.argv[1], (int(argument) for argument in sys.argv[2:5])

  def report(*words) -> None:
    os.write(status_fd, (" ".join(" ".join(map(str, words)).split())[:500] + "\n").encode("utf-8", "replace"))

  with contextlib.suppress(OSError):  # When memory runs out, the kernel kills this process first.
    _write("/proc/self/oom_score_adj", "1000")
  try:
    _library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The program may inspect neither this process nor its descriptors.
    _library.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if parent and os.getppid() != parent:
      os._exit(1)
    with open(spec_fd, "rb") as file:
      spec = marshal.load(file)
    user = None
    if mode == "namespaces":
      # This process must own its files in /proc until the users are mapped.
      _library.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
      alive, watched = os.pipe()
      user = USER if _unshare() else None
      child = os.fork()
      if child:
        os.close(alive)
        report("first", child)
        os.waitpid(child, 0)  # Its whole PID namespace is gone when this returns.
        os._exit(0)
      os.close(watched)
      _library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
      _library.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
      os.set_blocking(alive, False)
      with contextlib.suppress(BlockingIOError):
        if not os.read(alive, 1):  # The outer process is gone and could not end this one any more.
          os._exit(1)
      _build_root(spec)
    _run(spec, user, report, alone=mode == "namespaces" or not parent)
    os._exit(0)
  except BaseException as error:
    report("error", f"{type(error).__name__}: {error}")
    os._exit(1)


if __name__ == "__main__":
  main()
