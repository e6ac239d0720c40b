"""The processes of a run that feed its trackers. The run never waits for one before its end.

Each follows the run's files, so that a tracker which hangs, fails or takes the interpreter with it
costs a line and nothing else. A process sees the end of the run, or its death, by the end of its
standard input.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.messages import one_line
from jaxrl_llm.run.observe.trackers.entry import FOLDER

FINISH_SECONDS = 60.0
"""Time that a finished run gives all its trackers to take the rest."""


class Follower(NamedTuple):
  """One tracker's process."""

  name: str
  process: subprocess.Popen
  log: Path
  log_begin: int  # Size of the log before this attempt.

  def said(self, mark: str) -> list[str]:
    """Returns the lines of this attempt's log that begin with a mark, without it."""
    with open(self.log, "rb") as file:
      file.seek(self.log_begin)
      lines = file.read().decode("utf-8", errors="replace").splitlines()
    return [line.removeprefix(mark) for line in lines if line.startswith(mark)]


class Followers:
  """The trackers' processes of one attempt at a run.

  Args:
    workdir: Folder of the run.
    names: Names of the trackers, none in a process that leaves the writing to another one.
  """

  def __init__(self, workdir: Path, names: Sequence[str]):
    self._workdir, self._running = workdir, [_start(workdir, name) for name in names]

  def news(self) -> list[str]:
    """Returns a line for each tracker that has failed since the last call."""
    ended = [follower for follower in self._running if follower.process.poll() is not None]
    self._running = [follower for follower in self._running if follower not in ended]
    return [self._failure(follower) for follower in ended]

  def finish(self, seconds: float = FINISH_SECONDS) -> list[str]:
    """Lets the trackers take the rest of a finished run.

    Args:
      seconds: Time for all of them together, after which they are killed.

    Returns:
      A line for each that failed or was killed, and what the others have to say.
    """
    lines, deadline = self.news(), time.monotonic() + seconds
    for follower in self._running:
      with contextlib.suppress(OSError):  # It has ended already.
        follower.process.stdin.close()
    for follower in self._running:
      try:
        follower.process.wait(max(deadline - time.monotonic(), 0.01))
      except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(follower.process.pid, signal.SIGKILL)  # Also what it has started.
        follower.process.wait()
        lines.append(f"tracker {follower.name}: did not take the rest within {seconds:.0f} s, {self._again(follower)}")
        continue
      lines += [f"tracker {follower.name}: {note}" for note in follower.said("note: ")]
      if follower.process.returncode:
        lines.append(self._failure(follower))
    self._running = []
    return lines

  def _failure(self, follower: Follower) -> str:
    errors = follower.said("error: ")
    why = errors[-1] if errors else f"its process ended with status {follower.process.returncode}; see {follower.log}"
    return f"tracker {follower.name}: {one_line(why, limit=300)}; the run goes on without it, and {self._again(follower)}"

  def _again(self, follower: Follower) -> str:
    return f"`python -m jaxrl_llm.run.observe.trackers {self._workdir} {follower.name}` sends what it lacks"


def _start(workdir: Path, name: str) -> Follower:
  log = workdir / FOLDER / f"{name}.log"
  log.parent.mkdir(parents=True, exist_ok=True)
  # The process must find this package, also from another folder.
  folders = filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[4])))
  with open(log, "ab") as output:
    begin = os.fstat(output.fileno()).st_size
    process = subprocess.Popen(
      [sys.executable, "-m", "jaxrl_llm.run.observe.trackers", str(workdir), name, "--follow"],
      stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
      env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
    )  # fmt: skip
  return Follower(name, process, log, begin)
