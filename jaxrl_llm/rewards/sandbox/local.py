"""Running a program on this machine, through the launcher: in namespaces, in bubblewrap, in a container, or with limits alone."""

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
from jaxrl_llm.rewards.sandbox.program import MAIN, Execution, Program, Sandbox

_SETUP_SECONDS = 20.0  # From the launcher's start to the program's, on a machine that is busy.
_CONTAINER_SECONDS = 5.0
_END_SECONDS = 2.0  # Of a launcher whose program has ended; it is killed after that.
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


class Run(NamedTuple):
  """A program under way: its launcher, what the launcher tells, when it was begun, and what has to be tidied afterwards."""

  process: subprocess.Popen
  told: IO[bytes]
  begun: float
  tidy: Callable[[bool], str | None]


def interpreter() -> str:
  """The Python that programs run on: this one, without its virtual environment."""
  return os.path.realpath(sys.executable)


def visible_paths() -> list[str]:
  """What a program sees of this machine, read-only: the system's libraries and the interpreter's folder."""
  prefix = os.path.realpath(sys.base_prefix)
  return [*_SYSTEM, *([] if f"{prefix}/".startswith("/usr/") else [prefix])]


def spec_of(program: Program, sandbox: Sandbox, *, home: str) -> dict[str, Any]:
  """What the launcher is told; `home` is the program's working directory, as the launcher sees it."""
  limits = sandbox.limits
  return dict(
    argv=[interpreter(), "-I", MAIN, *program.argv],
    env={**_ENVIRONMENT, "HOME": home},
    files={str(name): str(text) for name, text in {**program.files, MAIN: program.source}.items()},
    home=home,
    visible=visible_paths(),
    disk_bytes=limits.disk_mb << 20,
    limits=dict(
      AS=int(limits.memory_gb * 2**30),
      CORE=0,
      CPU=int(limits.timeout_s) + 2,  # Should we be gone.
      FSIZE=limits.file_kb << 10,
      NOFILE=64,
      NPROC=limits.processes,
    ),
  )


def _bubblewrap(sandbox: Sandbox) -> list[str]:
  size = str(sandbox.limits.disk_mb << 20)
  binds = []
  for path in filter(os.path.exists, visible_paths()):
    binds += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
  return [
    "bwrap", "--unshare-all", "--unshare-user", "--uid", str(launcher.USER), "--gid", str(launcher.USER), "--hostname", "sandbox",
    "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--clearenv", *binds, "--ro-bind", _LAUNCHER, "/launcher.py",
    "--dev", "/dev", "--proc", "/proc", "--size", size, "--tmpfs", launcher.HOME, "--symlink", launcher.HOME, "/tmp",
    "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", launcher.HOME, "--",
  ]  # fmt: skip


def _plan(program: Program, sandbox: Sandbox) -> tuple[dict[str, Any], list[str], Callable[[bool], str | None]]:
  """What the launcher is told, its command line without descriptors, and what is to be called afterwards."""
  python = [interpreter(), "-I", "-S"]
  if sandbox.backend == "docker":
    spec, tidy = containers.prepare(program, sandbox)
    return spec, [*python, _LAUNCHER, "limits"], tidy
  if sandbox.backend == "unsafe":
    home = tempfile.mkdtemp(prefix="sandbox_")
    return spec_of(program, sandbox, home=home), [*python, _LAUNCHER, "limits"], lambda ended: shutil.rmtree(home, ignore_errors=True)
  spec = spec_of(program, sandbox, home=launcher.HOME)
  if sandbox.backend == "bubblewrap":
    return spec, [*_bubblewrap(sandbox), *python, "/launcher.py", "limits"], lambda ended: None
  return spec, [*python, _LAUNCHER, "namespaces"], lambda ended: None


def begin(program: Program, sandbox: Sandbox, stdin: int | IO[bytes], stdout: int | IO[bytes], stderr: IO[bytes]) -> Run:
  """Starts the launcher of a program with these standard streams, for `finish` to wait for; an OSError where it cannot be started."""
  spec, command, tidy = _plan(program, sandbox)
  parent = 0 if sandbox.backend == "bubblewrap" else os.getpid()  # It kills the launcher itself when we die.
  with tempfile.TemporaryFile() as file:
    file.write(marshal.dumps(spec))
    file.seek(0)
    told, tell = os.pipe()
    try:
      process = subprocess.Popen(
        [*command, str(file.fileno()), str(tell), str(parent)],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
        pass_fds=(file.fileno(), tell),
        start_new_session=True,
      )
    except BaseException:
      os.close(told)
      tidy(True)
      raise
    finally:
      os.close(tell)
  return Run(process, os.fdopen(told, "rb", buffering=0), time.monotonic(), tidy)


def finish(run: Run, *, timeout_s: float) -> dict[str, Any]:
  """Waits for a run, kills it `timeout_s` seconds after the program's start, and leaves none of its processes.

  Returns:
    `status` and `seconds` where the program ended by itself; `timeout` where it did not; `error` where it never began.
  """
  told: dict[str, Any] = {}
  until, line = run.begun + _SETUP_SECONDS, b""
  try:
    while "ended" not in told and "error" not in told:
      ready, _, _ = select.select([run.told], [], [], max(0.0, until - time.monotonic()))
      if not ready or not (data := os.read(run.told.fileno(), 4096)):
        break
      *lines, line = (line + data).split(b"\n")
      for text in lines:
        word, _, rest = text.decode("utf-8", "replace").partition(" ")
        told[word] = rest
        if "started" in told and "since" not in told:
          told["since"] = time.monotonic()
          until = told["since"] + timeout_s
  finally:
    if not {"ended", "error", "first"} & set(told):  # Nobody but the launcher itself is there, or bubblewrap, which ends as it is killed.
      with contextlib.suppress(ProcessLookupError):
        os.killpg(run.process.pid, signal.SIGKILL)
    _kill(run, int(told["first"]) if "first" in told and "ended" not in told else None)
    run.told.close()
    if trouble := run.tidy("ended" in told):
      told["error"] = trouble
  if "ended" in told:
    status, seconds = told["ended"].split()
    told |= dict(status=int(status), seconds=float(seconds))
  elif "error" not in told:
    overdue = time.monotonic() >= until
    if "since" not in told:
      told["error"] = f"its launcher {'took more than 20 s' if overdue else f'ended with status {run.process.returncode}'}"
    told["timeout"] = overdue
    told["seconds"] = time.monotonic() - told.get("since", run.begun)
  return told


def _kill(run: Run, first: int | None) -> None:
  """Kills the first process of the PID namespace, which takes the others along, or of the session, and what is left of the launcher.

  `first` is None where there is no such process, or where the launcher has waited for it and is ending.
  """
  if first is not None and run.process.poll() is None:
    for kill in (os.killpg, os.kill):
      with contextlib.suppress(ProcessLookupError):
        kill(first, signal.SIGKILL)
  with contextlib.suppress(subprocess.TimeoutExpired):
    run.process.wait(_END_SECONDS)
  with contextlib.suppress(ProcessLookupError):
    os.killpg(run.process.pid, signal.SIGKILL)
  run.process.wait()


def time_of(sandbox: Sandbox) -> float:
  """Wall time of a program, in seconds; a container's includes what it takes to make one."""
  return sandbox.limits.timeout_s + (_CONTAINER_SECONDS if sandbox.backend == "docker" else 0.0)


def execute(program: Program, sandbox: Sandbox) -> Execution:
  """Runs a program and waits for it. Its streams are files: whatever it prints, nobody has to keep up with it."""
  with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
    given.write(program.stdin.encode("utf-8", "surrogatepass"))
    given.seek(0)
    for file in (given, out, err):  # They have no name, and a program that is nobody may open /dev/stdin.
      os.fchmod(file.fileno(), 0o666)
    try:
      told = finish(begin(program, sandbox, given, out, err), timeout_s=time_of(sandbox))
    except OSError as error:
      return Execution("refused", cause=f"{type(error).__name__}: {error}")
    return judged(told, out, err, limit=sandbox.limits.file_kb << 10)


def converse(asking: Program, answering: Program, sandbox: Sandbox) -> Execution:
  """Runs two programs, each in a sandbox of its own, that read what the other prints.

  Args:
    asking: ends the conversation; what it says to us goes to its standard error.
    answering: killed when the other has ended.
    sandbox: of each.

  Returns:
    How it went for the one that asks; refused where either was.
  """
  with tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as nowhere:
    questions, ask = os.pipe()
    answers, answer = os.pipe()
    ends = contextlib.ExitStack()
    for fd in (questions, ask, answers, answer):
      ends.callback(os.close, fd)
    runs = []
    try:
      with ends:
        runs.append(begin(answering, sandbox, questions, answer, nowhere))
        runs.append(begin(asking, sandbox, answers, ask, err))
      told = finish(runs.pop(), timeout_s=time_of(sandbox))
    except OSError as error:
      return Execution("refused", cause=f"{type(error).__name__}: {error}")
    finally:
      others = [finish(run, timeout_s=0.0) for run in runs]
    if any("error" in other for other in others):
      return Execution("refused", cause=others[0]["error"])
    return judged(told, io.BytesIO(), err, limit=sandbox.limits.file_kb << 10)


def judged(told: dict[str, Any], out: io.BufferedIOBase, err: io.BufferedIOBase, *, limit: int) -> Execution:
  """A run as an `Execution`: what `finish` was told, and up to `limit` bytes of what the program printed."""
  for file in (out, err):
    file.seek(0)
  printed = [file.read(limit) for file in (out, err)]
  stdout, stderr = (data.decode("utf-8", "replace") for data in printed)
  if "error" in told:
    return Execution("refused", stdout, stderr, cause=" ".join(f"{told['error']} {stderr[-200:]}".split()))
  code, seconds = told.get("status"), told["seconds"]
  if code == 0:
    return Execution("finished", stdout, stderr, 0, seconds)
  cause = "exit" if code is None or code > 0 else "signal"
  if max(map(len, printed)) >= limit:
    cause = "output"
  elif told.get("timeout") or code == -signal.SIGXCPU:
    cause = "timeout"
  elif stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
    cause = "memory"
  return Execution("failed", stdout, stderr, code, seconds, cause)
