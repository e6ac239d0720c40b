"""Trials on this machine: a process each, a few at a time, until every one has ended.

Not through submitit, as Slurm is: its local executor (1.5.4) starts all jobs at once; its controller ends with 0 whatever the job's exit
status was, kills the job a second after Ctrl-C (a run needs longer to save) and after a time limit that cannot be switched off, and hides
all GPUs from it that were not asked for.
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

PREEMPTED = 42  # What a run ends with that wants to be started again: after SIGTERM, or when something hung.
INTERRUPTED = 130


class Options(NamedTuple):
  """The target's own flags.

  Attributes:
    max_restarts: of a trial within one launch, after it ended with 42.
    gpus: what each place may see, as in "0,1,2,3" (one GPU each) or "0+1,2+3" (two each); none: every trial sees every device.
    pin: "yes" gives each place its share of the processor's cores, so that trials do not fight over them; "no" leaves all to all.
  """

  max_restarts: int = 3
  gpus: str = ""
  pin: str = "yes"


class Process(NamedTuple):
  """A trial that runs.

  Attributes:
    trial: which.
    place: of `max_parallel`.
    process: of the operating system.
    log: what it prints.
    started: when, by the monotonic clock.
    offset: where in the log this attempt begins, in bytes.
    restarts: of it in this launch.
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
    SweepError: a line for each.
  """
  wrong = []
  if options.pin not in ("yes", "no"):
    wrong.append(f"--pin: found {options.pin!r}, expected yes or no")
  groups = options.gpus.split(",") if options.gpus else []
  if any(not re.fullmatch(r"\d+(\+\d+)*", group) for group in groups):
    wrong.append(f"--gpus: found {options.gpus!r}, expected numbers, as in 0,1,2,3 (one for each trial) or 0+1,2+3 (two for each)")
  elif groups and len(groups) < max_parallel:
    wrong.append(f"--gpus: found {len(groups)} places for --max_parallel={max_parallel}, expected as many")
  if options.max_restarts < 0:
    wrong.append(f"--max_restarts: found {options.max_restarts}, expected 0 or more")
  if wrong:
    raise SweepError("\n".join(wrong))


def environment(trial: Trial, place: int, options: Options) -> dict[str, str]:
  """Of a trial's process: the launcher's, with the place's GPUs."""
  env = dict(os.environ)
  if options.gpus:
    env["CUDA_VISIBLE_DEVICES"] = options.gpus.split(",")[place].replace("+", ",")
  return env


def cores(place: int, max_parallel: int, options: Options) -> list[int]:
  """The cores of a place; empty where all are everybody's. XLA makes as many threads as a process has cores."""
  if options.pin == "no" or max_parallel == 1 or not hasattr(os, "sched_getaffinity") or not shutil.which("taskset"):
    return []
  return sorted(os.sched_getaffinity(0))[place::max_parallel]


def command(trial: Trial, own: Sequence[int]) -> list[str]:
  """What starts a trial here.

  Args:
    trial: which.
    own: its cores; empty for all.
  """
  python, *rest = trial.command
  # Should the launcher be killed, its trials get SIGTERM: they save, end, and leave their workdirs to the next launcher.
  guard = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
  pinned = ["taskset", "-c", ",".join(map(str, own))] if own else []
  return [*guard, *pinned, sys.executable if python == "python" else python, *rest]


def start(trial: Trial, place: int, folder: Path, *, max_parallel: int, options: Options, restarts: int = 0) -> Process:
  """Starts a trial; what it prints goes to `FOLDER/logs/ID.log`, behind what earlier attempts printed."""
  (folder / "logs").mkdir(parents=True, exist_ok=True)
  log = open(log_of(folder, trial), "ab")  # noqa: SIM115 (closed when the process has ended)
  # A group of its own: Ctrl-C reaches the launcher alone, which passes it on once.
  process = subprocess.Popen(
    command(trial, cores(place, max_parallel, options)),
    stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment(trial, place, options), start_new_session=True,
  )  # fmt: skip
  status.note(folder, trial.row.id, "started", pid=process.pid)
  return Process(trial, place, process, log, time.monotonic(), log.tell(), restarts)


def log_of(folder: Path, trial: Trial) -> Path:
  """What a trial has printed, in all attempts."""
  return folder / "logs" / f"{trial.row.id}.log"


def ended(this: Process, folder: Path, *, was_stopped: bool = False) -> tuple[int, str]:
  """Takes down the end of a process: exit status (negative: a signal) and why, a line.

  Args:
    this: has ended.
    folder: of the sweep.
    was_stopped: by us.
  """
  code = this.process.returncode
  this.log.close()
  why = explained(code, log_of(folder, this.trial), this.offset)
  if was_stopped and why:
    why = "interrupted" + ("" if code in (PREEMPTED, INTERRUPTED) else f" ({why})")
  seconds = round(time.monotonic() - this.started, 3)
  status.note(folder, this.trial.row.id, "ended", code=code, seconds=seconds, error=why, was_stopped=was_stopped)
  return code, why


def explained(code: int, log: Path, offset: int = 0) -> str:
  """Why a process ended, a line; empty for a good end.

  Args:
    code: exit status, or a signal's number below zero.
    log: what it printed.
    offset: where in the log, in bytes.
  """
  if code == 0:
    return ""
  if code < 0:
    return "killed by " + (signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}")
  text = log.read_bytes()[offset:].decode(errors="replace") if log.exists() else ""
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
  last = (errors or lines or ["it said nothing"])[-1]
  words = {PREEMPTED: "asks to be started again", INTERRUPTED: "interrupted"}.get(code, f"exit status {code}")
  return f"{words}: {last[:300]}"


def is_busy(workdir: Path) -> bool:
  """Whether a run has locked its workdir: one that a killed launcher has left behind."""
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
  """Ctrl-C, SIGTERM and a terminal that closes, taken down in place of ending the launcher."""
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
  """Runs trials, `max_parallel` at a time; one that fails does not stop the others.

  Args:
    source: of trials; asked only when there is room for one.
    folder: of the sweep.
    max_parallel: processes at a time.
    options: of the target.
    changed: called when a trial starts, with None, and when it has ended, with why ("" for a good end).
    tick: called between looks.
    poll_seconds: between looks, in s.

  Returns:
    Whether everything was tried; False after Ctrl-C or SIGTERM.
  """
  running: dict[str, Process] = {}
  again: list[tuple[Trial, int]] = []  # With the number of restarts.
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
        running[trial.row.id] = start(trial, free.pop(), folder, max_parallel=max_parallel, options=options, restarts=restarts)
        changed(trial, None)
      for this in [each for each in running.values() if each.process.poll() is not None]:
        del running[this.trial.row.id]
        free.append(this.place)
        code, why = ended(this, folder)
        changed(this.trial, why)
        if code == PREEMPTED and this.restarts < options.max_restarts:
          again.append((this.trial, this.restarts + 1))
      for trial in [each for each in blocked if not is_busy(Path(each.workdir))]:
        blocked.remove(trial)
        again.append((trial, 0))
      tick()
      time.sleep(poll_seconds if running or blocked else 0)
    for this in stop(running, asked):
      changed(this.trial, ended(this, folder, was_stopped=True)[1])
  return not asked


def stop(running: Mapping[str, Process], asked: Sequence[int]) -> list[Process]:
  """Passes a signal on: every run saves and ends; a second signal leaves at once.

  Args:
    running: by row.
    asked: signals that came so far, and those that still come.

  Returns:
    Those that ran, which have ended.
  """
  if not running:
    return []
  print(f"interrupted: {len(running)} trial(s) save and end; Ctrl-C again to leave at once", file=sys.stderr, flush=True)
  for this in running.values():
    this.process.send_signal(signal.SIGINT if asked[0] == signal.SIGINT else signal.SIGTERM)
  while any(this.process.poll() is None for this in running.values()):
    if len(asked) > 1:
      for this in running.values():
        this.process.kill()
    time.sleep(0.1)
  return list(running.values())
