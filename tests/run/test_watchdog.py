"""The watchdog ends a run that stalls, or that does not end after a SIGTERM, and no other."""

import subprocess
import sys
import threading
import time

import pytest

from jaxrl_llm.run.observe import watchdog
from jaxrl_llm.run.observe.watchdog import Watchdog
from tests.runs import ROOT, environment


class Ending:
  """Function that the watchdog calls instead of ending the process."""

  def __init__(self):
    self.status, self.over = None, threading.Event()

  def __call__(self, status):
    self.status = status
    self.over.set()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
  monkeypatch.setattr(watchdog, "_LOOK_SECONDS", 0.01)
  monkeypatch.setattr(watchdog, "_ASK_SECONDS", 0.02)


def make(folder, ending, *, seconds=60.0, stop_seconds=60.0, told=lambda: False):
  return Watchdog(seconds, stop_seconds=stop_seconds, folder=folder, told_to_end=told, leave=ending)


def test_a_phase_that_takes_too_long_ends_the_process(tmp_path, capfd):
  ending = Ending()
  with make(tmp_path / "logs", ending, seconds=0.1) as dog:
    dog.look_at("reward", 7, lambda: "the answer of worker 3")
    assert ending.over.wait(10)
  assert ending.status == 42
  (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
  for part in (
    "the phase reward of step 7",
    "seconds=0.1",
    "waiting for the answer of worker 3",
    "logs/stacks-",
    "resumes",
  ):
    assert part in line
  (stacks,) = (tmp_path / "logs").iterdir()
  text = stacks.read_text()
  assert "reward of step 7" in text and "test_a_phase_that_takes_too_long" in text, "the stacks of all threads"


def test_a_failing_description_does_not_stop_the_watchdog(tmp_path, capfd):
  ending = Ending()
  with make(tmp_path, ending, seconds=0.05) as dog:
    dog.look_at("reward", 1, lambda: [][0])
    assert ending.over.wait(10)
  assert "something that cannot be determined (IndexError)" in capfd.readouterr().err


def test_a_run_that_makes_progress_is_left_alone(tmp_path):
  ending = Ending()
  with make(tmp_path, ending, seconds=0.5) as dog:
    for step in range(20):
      dog.look_at("update", step)
      time.sleep(0.05)
  assert not ending.over.wait(0.6), "outside the block the watchdog is inactive"


def test_a_long_phase_is_cut_short_after_a_sigterm(tmp_path, capfd):
  ending = Ending()
  with make(tmp_path, ending, stop_seconds=0.1, told=lambda: True) as dog:
    dog.look_at("rollout", 4)
    assert ending.over.wait(10)
  assert ending.status == 42 and "stopped in the phase rollout of step 4" in capfd.readouterr().err
  assert not list(tmp_path.iterdir()), "nothing stalls, so there are no stacks"


def test_a_save_is_waited_for(tmp_path):
  ending = Ending()
  with make(tmp_path, ending, stop_seconds=0.05, told=lambda: True) as dog:
    dog.look_at(watchdog.SAVE, 4)
    assert not ending.over.wait(0.5)


def test_a_process_whose_main_thread_hangs_is_ended(tmp_path):
  """A real process ends with status 42 although its main thread never returns."""
  source = (
    "import threading\nfrom pathlib import Path\nfrom jaxrl_llm.run.observe.watchdog import Watchdog\n"
    f"with Watchdog(0.3, stop_seconds=60, folder=Path({str(tmp_path)!r})) as dog:\n"
    "  dog.look_at('weight_sync', 2)\n  threading.Event().wait()\n"
  )
  result = subprocess.run([sys.executable, "-c", source], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
  assert result.returncode == 42 and "the phase weight_sync of step 2" in result.stderr and "most recent call first" in result.stderr
