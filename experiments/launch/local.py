"""Trials on this machine: one process each, a few at a time, until all of them have ended.

Unlike Slurm's jobs, they do not run through submitit. Its local executor (1.5.4) starts all jobs at
once and hides GPUs that were not requested. Its controller ends with 0 whatever the job's exit
status. It kills the job one second after Ctrl-C, although a run needs longer to save, and after a
time limit that cannot be disabled.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from experiments.launch import status
from experiments.launch.rows import SweepError
from experiments.launch.trial import Trial

try:
  import fcntl
except ImportError:  # Windows.
  fcntl = None

PREEMPTED = 42  # Exit status of a run to start again, after SIGTERM or because something hung.
INTERRUPTED = 130


class Options(NamedTuple):
  """Flags of the local target.

  Attributes:
    max_restarts: Maximum number of restarts of a trial within one launch, after exit status 42.
    gpus: GPUs of each place, as in "0,1,2,3" (one each) or "0+1,2+3" (two each). By default every
      trial sees every device.
    pin: Whether each place gets its share of the processor's cores, so that trials do not compete
      for them ("yes"), or all trials share all cores ("no").
  """

  max_restarts: int = 3
  gpus: str = ""
  pin: str = "yes"


class Process(NamedTuple):
  """Running process of a trial.

  Attributes:
    trial: Trial that it runs.
    place: Index of its place among the `max_parallel`.
    process: Process of the operating system.
    log: File that receives its output.
    started: Time of its start, by the monotonic clock.
    offset: Position in the log at which this attempt begins, in bytes.
    restarts: Number of restarts of the trial in this launch.
  """

  trial: Trial
  place: int
  process: subprocess.Popen
  log: IO[bytes]
  started: float
  offset: int
  restarts: int


def check(options: Options, max_parallel: int) -> None:
  """Refuses settings that cannot work.

  Raises:
    SweepError: If there are any. One line for each.
  """
  wrong = []
  if options.pin not in ("yes", "no"):
    wrong.append(f"--pin: found {options.pin!r}, expected yes or no")
  groups = options.gpus.split(",") if options.gpus else []
  if any(not re.fullmatch(r"\d+(\+\d+)*", group) for group in groups):
    wrong.append(
      f"--gpus: found {options.gpus!r}, expected numbers, as in 0,1,2,3 (one for each trial) or 0+1,2+3 (two for each)"
    )
  elif groups and len(groups) < max_parallel:
    wrong.append(f"--gpus: found {len(groups)} place(s), expected at least --max_parallel={max_parallel}")
  if options.max_restarts < 0:
    wrong.append(f"--max_restarts: found {options.max_restarts}, expected 0 or more")
  if wrong:
    raise SweepError("\n".join(wrong))


def environment(trial: Trial, place: int, options: Options) -> dict[str, str]:
  """Returns the environment of a trial's process: the launcher's, with the GPUs of the place."""
  env = dict(os.environ)
  if options.gpus:
    env["CUDA_VISIBLE_DEVICES"] = options.gpus.split(",")[place].replace("+", ",")
  return env


def cores(place: int, max_parallel: int, options: Options) -> list[int]:
  """Returns the cores of a place, or an empty list if all trials share all cores.

  XLA starts as many threads as a process has cores.
  """
  if options.pin == "no" or max_parallel == 1 or not hasattr(os, "sched_getaffinity") or not shutil.which("taskset"):
    return []
  return sorted(os.sched_getaffinity(0))[place::max_parallel]


def command(trial: Trial, own_cores: Sequence[int]) -> list[str]:
  """Returns the command that starts a trial on this machine.

  Args:
    trial: Trial to start.
    own_cores: Cores of the trial; empty for all.
  """
  python, *rest = trial.command
  # If the launcher is killed, its trials get SIGTERM: they save, end, and release their workdirs.
  guard = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
  pinned = ["taskset", "-c", ",".join(map(str, own_cores))] if own_cores else []
  return [*guard, *pinned, sys.executable if python == "python" else python, *rest]


def start(
  trial: Trial, place: int, folder: Path, *, max_parallel: int, options: Options, restarts: int = 0
) -> Process:
  """Starts a trial and appends its output to `FOLDER/logs/ID.log`."""
  (folder / "logs").mkdir(parents=True, exist_ok=True)
  log = open(log_of(folder, trial), "ab")  # noqa: SIM115 (closed when the process has ended)
  # In a process group of its own: Ctrl-C reaches only the launcher, which forwards it once.
  process = subprocess.Popen(
    command(trial, cores(place, max_parallel, options)),
    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment(trial, place, options), start_new_session=True,
  )  # fmt: skip
  status.note(folder, trial.row.id, "started", pid=process.pid)
  return Process(trial, place, process, log, time.monotonic(), log.tell(), restarts)


def log_of(folder: Path, trial: Trial) -> Path:
  """Returns the path of a trial's output, of all attempts."""
  return folder / "logs" / f"{trial.row.id}.log"


def ended(job: Process, folder: Path, *, was_stopped: bool = False) -> tuple[int, str]:
  """Records the end of a process.

  Args:
    job: Process that has ended.
    folder: Folder of the sweep.
    was_stopped: Whether this launcher stopped it.

  Returns:
    The exit status (negative for a signal), and the reason in one line ("" for a good end).
  """
  code = job.process.returncode
  job.log.close()
  why = explained(code, log_of(folder, job.trial), job.offset)
  if was_stopped and why:
    why = "interrupted" + ("" if code in (PREEMPTED, INTERRUPTED) else f" ({why})")
  seconds = round(time.monotonic() - job.started, 3)
  status.note(folder, job.trial.row.id, "ended", code=code, seconds=seconds, error=why, was_stopped=was_stopped)
  return code, why


def explained(code: int, log: Path, offset: int = 0) -> str:
  """Explains in one line why a process ended; empty for a good end.

  Args:
    code: Exit status, or the negative number of a signal.
    log: Path of its output.
    offset: Position in the log at which the attempt begins, in bytes.
  """
  if code == 0:
    return ""
  if code < 0:
    return "killed by " + (signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}")
  text = log.read_bytes()[offset:].decode(errors="replace") if log.exists() else ""
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
  last = (errors or lines or ["it printed nothing"])[-1]
  words = {PREEMPTED: "asks for a restart", INTERRUPTED: "interrupted"}.get(code, f"exit status {code}")
  return f"{words}: {last[:300]}"


def is_busy(workdir: Path) -> bool:
  """Returns whether a run, such as one that outlived its launcher, has locked its workdir."""
  if fcntl is None or not (workdir / ".lock").exists():
    return False
  with open(workdir / ".lock", "rb") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
      return True
    except OSError:  # No locks on this file system.
      return False
  return False


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
  """Collects Ctrl-C, SIGTERM and the closing of the terminal instead of ending the launcher."""
  asked: list[int] = []
  wanted = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
  before = {each: signal.signal(each, lambda number, _: asked.append(number)) for each in wanted}
  try:
    yield asked
  finally:
    for each, handler in before.items():
      signal.signal(each, handler)


def run(
  source: Iterator[Trial],
  folder: Path,
  *,
  max_parallel: int,
  options: Options,
  changed: Callable[[Trial, str | None], Any],
  tick: Callable[[], Any],
  poll_seconds: float = 0.5,
) -> bool:
  """Runs trials, `max_parallel` at a time; a failure does not stop the others.

  Args:
    source: Trials to run, taken only when a place is free.
    folder: Folder of the sweep.
    max_parallel: Maximum number of processes at a time.
    options: Options of the target.
    changed: Function called with a trial and None when it starts, and with a trial and the reason
      when it has ended ("" for a good end).
    tick: Function called after each poll.
    poll_seconds: Interval between polls, in s.

  Returns:
    Whether every trial was tried; False after Ctrl-C or SIGTERM.
  """
  running: dict[str, Process] = {}
  again: list[tuple[Trial, int]] = []  # Trials to start again, with their numbers of restarts.
  blocked: list[Trial] = []
  free = list(range(max_parallel))[::-1]
  more = True
  with signals() as asked:
    while (running or again or blocked or more) and not asked:
      while free and (more or again) and not asked:
        trial, restarts = again.pop(0) if again else (next(source, None), 0)
        if trial is None:
          more = False
          break
        if is_busy(Path(trial.workdir)):
          print(f"note: another process still writes to {trial.workdir}; waiting for it", file=sys.stderr, flush=True)
          blocked.append(trial)
          continue
        running[trial.row.id] = start(
          trial, free.pop(), folder, max_parallel=max_parallel, options=options, restarts=restarts
        )
        changed(trial, None)
      for job in [each for each in running.values() if each.process.poll() is not None]:
        del running[job.trial.row.id]
        free.append(job.place)
        code, why = ended(job, folder)
        changed(job.trial, why)
        if code == PREEMPTED and job.restarts < options.max_restarts:
          again.append((job.trial, job.restarts + 1))
      for trial in [each for each in blocked if not is_busy(Path(each.workdir))]:
        blocked.remove(trial)
        again.append((trial, 0))
      tick()
      time.sleep(poll_seconds if running or blocked else 0)
    for job in stop(running, asked):
      changed(job.trial, ended(job, folder, was_stopped=True)[1])
  return not asked


def stop(running: Mapping[str, Process], asked: Sequence[int]) -> list[Process]:
  """Forwards a signal, upon which every run saves and ends; a second signal kills the runs.

  Args:
    running: Running processes, by row.
    asked: Signals received so far; the list grows while this function waits.

  Returns:
    The processes, all of which have ended.
  """
  if not running:
    return []
  print(
    f"interrupted: {len(running)} trial(s) are saving; press Ctrl-C again to end at once", file=sys.stderr, flush=True
  )
  for job in running.values():
    job.process.send_signal(signal.SIGINT if asked[0] == signal.SIGINT else signal.SIGTERM)
  while any(job.process.poll() is None for job in running.values()):
    if len(asked) > 1:
      for job in running.values():
        job.process.kill()
    time.sleep(0.1)
  return list(running.values())
