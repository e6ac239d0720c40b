"""Execution of programs on this machine, through the launcher.

A program runs in namespaces, in bubblewrap, in a container, or with limits alone.
"""

import contextlib
import io
import marshal
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any, NamedTuple

from jaxrl_llm.rewards.sandbox import containers, launcher
from jaxrl_llm.rewards.sandbox.program import MAIN, STACK_BYTES, Execution, Program, Sandbox

_SETUP_SECONDS = 20.0  # From the start of the launcher to that of the program, on a busy machine.
_CONTAINER_SECONDS = 5.0
_END_SECONDS = 2.0  # Time for a launcher to exit after its program has ended, before it is killed.
_ENVIRONMENT = {
  "HOME": launcher.HOME,
  "LANG": "C.UTF-8",
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
  "PATH": "/usr/local/bin:/usr/bin:/bin",
  "PYTHONDONTWRITEBYTECODE": "1",
}
_SYSTEM = ("/bin", "/etc/ld.so.cache", "/lib", "/lib32", "/lib64", "/nix/store", "/usr")
_LAUNCHER = str(pathlib.Path(launcher.__file__).resolve())


class _Running(NamedTuple):
  """A program that is running in a sandbox.

  Attributes:
    process: Launcher of the program.
    status: Read end of the pipe of the launcher's status lines.
    started_at: Monotonic time at which the launcher was started, in seconds.
    clean_up: Function `(ended) -> error` that removes temporary files and containers. `ended` says
      whether the launcher reported the end of the program.
  """

  process: subprocess.Popen
  status: IO[bytes]
  started_at: float
  clean_up: Callable[[bool], str | None]


def interpreter() -> str:
  """Returns the path of this Python interpreter outside its virtual environment, for programs."""
  return os.path.realpath(sys.executable)


def _visible_paths() -> list[str]:
  """Returns the readable paths: the libraries of the system and the folder of the interpreter."""
  prefix = os.path.realpath(sys.base_prefix)
  return [*_SYSTEM, *([] if f"{prefix}/".startswith("/usr/") else [prefix])]


def _launcher_spec(program: Program, sandbox: Sandbox, *, home: str) -> dict[str, Any]:
  """Returns the spec that the launcher reads; `home` is the working directory as it sees it."""
  limits = sandbox.limits
  return dict(
    argv=[interpreter(), "-I", MAIN, *program.argv],
    env={**_ENVIRONMENT, "HOME": home},
    files={str(name): str(text) for name, text in {**program.files, MAIN: program.source}.items()},
    home=home,
    visible=_visible_paths(),
    disk_bytes=limits.disk_mb << 20,
    limits=dict(
      AS=int(limits.memory_gb * 2**30),
      CORE=0,
      CPU=int(limits.timeout_s) + 2,  # In case this process is gone by then.
      FSIZE=limits.file_kb << 10,
      NOFILE=64,
      NPROC=limits.processes,
      STACK=STACK_BYTES,
    ),
  )


def _bubblewrap(sandbox: Sandbox) -> list[str]:
  size = str(sandbox.limits.disk_mb << 20)
  binds = []
  for path in filter(os.path.exists, _visible_paths()):
    binds += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
  return [
    "bwrap", "--unshare-all", "--unshare-user", "--uid", str(launcher.USER), "--gid", str(launcher.USER), "--hostname", "sandbox",
    "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--clearenv", *binds, "--ro-bind", _LAUNCHER, "/launcher.py",
    "--dev", "/dev", "--proc", "/proc", "--size", size, "--tmpfs", launcher.HOME, "--symlink", launcher.HOME, "/tmp",
    "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", launcher.HOME, "--",
  ]  # fmt: skip


def _plan(program: Program, sandbox: Sandbox) -> tuple[dict[str, Any], list[str], Callable[[bool], str | None]]:
  """Returns the launcher's spec, its command line without descriptors, and a clean-up function."""
  python = [interpreter(), "-I", "-S"]
  if sandbox.backend == "docker":
    spec, clean_up = containers.prepare_container(program, sandbox)
    return spec, [*python, _LAUNCHER, "limits"], clean_up
  if sandbox.backend == "unsafe":
    home = tempfile.mkdtemp(prefix="sandbox_")
    return (
      _launcher_spec(program, sandbox, home=home),
      [*python, _LAUNCHER, "limits"],
      lambda ended: shutil.rmtree(home, ignore_errors=True),
    )
  spec = _launcher_spec(program, sandbox, home=launcher.HOME)
  if sandbox.backend == "bubblewrap":
    return spec, [*_bubblewrap(sandbox), *python, "/launcher.py", "limits"], lambda ended: None
  return spec, [*python, _LAUNCHER, "namespaces"], lambda ended: None


def _start(
  program: Program, sandbox: Sandbox, stdin: int | IO[bytes], stdout: int | IO[bytes], stderr: IO[bytes]
) -> _Running:
  """Starts the launcher of a program, whose end `_finish` awaits. Raises OSError if it cannot."""
  spec, command, clean_up = _plan(program, sandbox)
  # Bubblewrap itself kills the launcher if this process dies.
  parent = 0 if sandbox.backend == "bubblewrap" else os.getpid()
  with tempfile.TemporaryFile() as file:
    file.write(marshal.dumps(spec))
    file.seek(0)
    status_read, status_write = os.pipe()
    try:
      process = subprocess.Popen(
        [*command, str(file.fileno()), str(status_write), str(parent)],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
        pass_fds=(file.fileno(), status_write),
        start_new_session=True,
      )
    except BaseException:
      os.close(status_read)
      clean_up(True)
      raise
    finally:
      os.close(status_write)
  return _Running(process, os.fdopen(status_read, "rb", buffering=0), time.monotonic(), clean_up)


def _finish(running: _Running, *, timeout_s: float) -> dict[str, Any]:
  """Waits for a program, kills it `timeout_s` after its start, and leaves none of its processes.

  Returns:
    The status lines of the launcher, with `status` and `seconds` if the program ended by itself,
    `timeout` and `seconds` if it did not, and `error` if it was never started.
  """
  report: dict[str, Any] = {}
  until, line = running.started_at + _SETUP_SECONDS, b""
  try:
    while "ended" not in report and "error" not in report:
      ready, _, _ = select.select([running.status], [], [], max(0.0, until - time.monotonic()))
      if not ready or not (data := os.read(running.status.fileno(), 4096)):
        break
      *lines, line = (line + data).split(b"\n")
      for text in lines:
        word, _, rest = text.decode("utf-8", "replace").partition(" ")
        report[word] = rest
        if "started" in report and "since" not in report:
          report["since"] = time.monotonic()
          until = report["since"] + timeout_s
  finally:
    # Only the launcher itself is running, or bubblewrap, whose program dies with it.
    if not {"ended", "error", "first"} & set(report):
      with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGKILL)
    _kill(running, int(report["first"]) if "first" in report and "ended" not in report else None)
    running.status.close()
    if problem := running.clean_up("ended" in report):
      report["error"] = problem
  if "ended" in report:
    status, seconds = report["ended"].split()
    report |= dict(status=int(status), seconds=float(seconds))
  elif "error" not in report:
    overdue = time.monotonic() >= until
    if "since" not in report:
      report["error"] = (
        "its launcher "
        f"{'took more than 20 s' if overdue else f'ended with status {running.process.returncode}'}"
      )
    report["timeout"] = overdue
    report["seconds"] = time.monotonic() - report.get("since", running.started_at)
  return report


def _kill(running: _Running, first: int | None) -> None:
  """Kills a program and its launcher.

  `first` is the first process of the PID namespace, whose other processes die with it, or of the
  session. It is None if there is none, or the launcher has waited for it and is ending.
  """
  if first is not None and running.process.poll() is None:
    for kill in (os.killpg, os.kill):
      with contextlib.suppress(ProcessLookupError):
        kill(first, signal.SIGKILL)
  with contextlib.suppress(subprocess.TimeoutExpired):
    running.process.wait(_END_SECONDS)
  with contextlib.suppress(ProcessLookupError):
    os.killpg(running.process.pid, signal.SIGKILL)
  running.process.wait()


def _time_limit_s(sandbox: Sandbox) -> float:
  """Returns the time limit of a program, in seconds, including the creation of a container."""
  return sandbox.limits.timeout_s + (_CONTAINER_SECONDS if sandbox.backend == "docker" else 0.0)


def execute(program: Program, sandbox: Sandbox) -> Execution:
  """Runs a program and waits for it.

  The streams are files, so that nothing has to read the output while the program runs.
  """
  with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
    given.write(program.stdin.encode("utf-8", "surrogatepass"))
    given.seek(0)
    # The files have no name, and the program may open /dev/stdin as another user.
    for file in (given, out, err):
      os.fchmod(file.fileno(), 0o666)
    try:
      report = _finish(_start(program, sandbox, given, out, err), timeout_s=_time_limit_s(sandbox))
    except OSError as error:
      return Execution("refused", cause=f"{type(error).__name__}: {error}")
    return _execution_of(report, out, err, limit=sandbox.limits.file_kb << 10)


def execute_pair(asking: Program, answering: Program, sandbox: Sandbox) -> Execution:
  """Runs two programs in separate sandboxes, with the output of each as the input of the other.

  Args:
    asking: Program that ends the conversation. It reports to this process on its standard error.
    answering: Program that is killed when the other one has ended.
    sandbox: Sandbox of each program.

  Returns:
    The execution of `asking`. It is refused if either program was.
  """
  with tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as nowhere:
    questions, ask = os.pipe()
    answers, answer = os.pipe()
    ends = contextlib.ExitStack()
    for fd in (questions, ask, answers, answer):
      ends.callback(os.close, fd)
    running = []
    try:
      with ends:
        running.append(_start(answering, sandbox, questions, answer, nowhere))
        running.append(_start(asking, sandbox, answers, ask, err))
      report = _finish(running.pop(), timeout_s=_time_limit_s(sandbox))
    except OSError as error:
      return Execution("refused", cause=f"{type(error).__name__}: {error}")
    finally:
      other_reports = [_finish(other, timeout_s=0.0) for other in running]
    if any("error" in other for other in other_reports):
      return Execution("refused", cause=other_reports[0]["error"])
    return _execution_of(report, io.BytesIO(), err, limit=sandbox.limits.file_kb << 10)


def _execution_of(report: dict[str, Any], out: io.BufferedIOBase, err: io.BufferedIOBase, *, limit: int) -> Execution:
  """Converts a report of `_finish` to an `Execution`, with at most `limit` bytes of each stream."""
  for file in (out, err):
    file.seek(0)
  printed = [file.read(limit) for file in (out, err)]
  stdout, stderr = (data.decode("utf-8", "replace") for data in printed)
  if "error" in report:
    return Execution("refused", stdout, stderr, cause=" ".join(f"{report['error']} {stderr[-200:]}".split()))
  code, seconds = report.get("status"), report["seconds"]
  if code == 0:
    return Execution("finished", stdout, stderr, 0, seconds)
  cause = "exit" if code is None or code > 0 else "signal"
  if max(map(len, printed)) >= limit:
    cause = "output"
  elif report.get("timeout") or code == -signal.SIGXCPU:
    cause = "timeout"
  elif stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
    cause = "memory"
  return Execution("failed", stdout, stderr, code, seconds, cause)
