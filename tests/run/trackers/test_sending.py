"""What trackers get: each step once, also of a resumed run, and what a failing tracker costs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_llm.config import trackers
from jaxrl_llm.run.observe.trackers import sender
from jaxrl_llm.run.observe.trackers.__main__ import main
from jaxrl_llm.run.observe.trackers.entry import open_record
from jaxrl_llm.run.observe.trackers.followers import Followers
from jaxrl_llm.run.observe.trackers.mlflow import key
from jaxrl_llm.workdir.metrics import MetricWriter, SampleWriter

SAMPLE = {"prompt": "1+1", "response": "2", "answer": "2", "reward": 1.0}


class Listed:
  """A tracker that lists what it gets."""

  def __init__(self):
    self.rows, self.tables, self.page = [], [], None

  def metrics(self, phase, step, numbers):
    self.rows.append((phase, step, dict(numbers)))

  def samples(self, phase, step, rows):
    self.tables.append((phase, step, len(rows)))

  def files(self, figure, report):
    self.page = (figure and figure.stat().st_size > 1000, report and report.read_text())

  def close(self):
    pass


def write(workdir, steps, *, value=0.5, resume=None):
  with MetricWriter(workdir, tensorboard=False) as writer, SampleWriter(workdir) as samples:
    if resume is not None:
      writer.resume({"rl": resume})
      samples.resume({"rl": resume})
    for step in steps:
      writer.write(step, "rl", {"actor/loss": value * step, "timing_s/step": time.perf_counter(), "kl": float("nan"), "note": "text"})
      samples.write(step, "rl", [SAMPLE, SAMPLE])


def send(workdir, tracker=None, rounds=()):
  """Sends all rows; between rounds, further things happen."""
  tracker, rounds = tracker or Listed(), list(rounds)

  def wait():
    if not rounds:
      return False
    rounds.pop(0)()
    return True

  (workdir / "trackers").mkdir(exist_ok=True)
  return tracker, sender.send_rows(workdir, "listed", tracker, wait)


def test_rows_samples_and_files_are_sent_as_they_come(tmp_path):
  write(tmp_path, [1])
  (tmp_path / "report.html").write_text("page")
  tracker, notes = send(tmp_path, rounds=[lambda: write(tmp_path, [2]), lambda: None, lambda: write(tmp_path, [3])])
  assert [(phase, step, row["actor/loss"]) for phase, step, row in tracker.rows] == [("rl", 1, 0.5), ("rl", 2, 1.0), ("rl", 3, 1.5)]
  assert all(row["kl"] != row["kl"] and "note" not in row and "step" not in row for _, _, row in tracker.rows)
  assert tracker.tables == [("rl", 1, 2), ("rl", 2, 2), ("rl", 3, 2)] and tracker.page == (True, "page") and not notes


def test_a_resumed_run_sends_each_step_once(tmp_path):
  write(tmp_path, [1, 2, 3, 4])
  first, _ = send(tmp_path)
  write(tmp_path, [3, 4, 5], resume=2)  # Steps 3 and 4 are repeated; only their clocks differ.
  second, notes = send(tmp_path)
  assert [step for _, step, _ in first.rows + second.rows] == [1, 2, 3, 4, 5]
  assert [step for _, step, _ in first.tables + second.tables] == [1, 2, 3, 4, 5] and not notes


def test_steps_that_are_repeated_with_other_numbers_are_said(tmp_path):
  write(tmp_path, [1, 2, 3])
  send(tmp_path)
  write(tmp_path, [3, 4], value=0.25, resume=2)
  tracker, (note,) = send(tmp_path)
  assert [step for _, step, _ in tracker.rows] == [4]
  assert note.startswith("1 steps were sent before the run was resumed and repeated with other numbers, the first at rl step 3: ")


def test_a_row_that_is_being_written_waits(tmp_path):
  write(tmp_path, [1])
  path = tmp_path / "metrics.jsonl"
  line = path.read_bytes()
  path.write_bytes(line + b'{"step": 2, "phase"')
  tail = sender.Tail(path)
  assert [row["step"] for row in tail.read()] == [1] and not tail.read()
  path.write_bytes(line + b'{"step": 2, "phase": "rl"}\nno row\n')
  assert [row["step"] for row in tail.read()] == [2]
  path.write_bytes(line)  # Shorter: another attempt has removed rows.
  assert [row["step"] for row in tail.read()] == [1]


def test_what_fails_is_sent_by_the_next_process(tmp_path):
  class Failing(Listed):
    def metrics(self, phase, step, numbers):
      if step == 2:
        raise ConnectionError("gone")
      super().metrics(phase, step, numbers)

  write(tmp_path, [1, 2, 3])
  failing = Failing()
  with pytest.raises(ConnectionError):
    send(tmp_path, failing)
  tracker, _ = send(tmp_path)
  assert [step for _, step, _ in failing.rows + tracker.rows] == [1, 2, 3]


def test_the_entry_of_a_run_stays_the_same(tmp_path):
  (tmp_path / "config.json").write_text('{"seed": 3, "learner": {"b1": 0.9}}')
  first, second = open_record(tmp_path, "wandb"), open_record(tmp_path, "wandb")
  assert first.id == second.id and len(first.id) == 16
  assert first.config == {"seed": 3, "learner.b1": 0.9} and first.name == tmp_path.name
  assert open_record(tmp_path, "mlflow").id != first.id


def test_names_that_a_tracker_does_not_allow_are_replaced():
  assert [key(name) for name in ("actor/loss", "eval/pass@4", "a b")] == ["actor/loss", "eval/pass_4", "a b"]


# Packages that behave as a test needs: one hangs when it is imported, one raises, one only lists.
FAKES = {
  "hang": "import time\ntime.sleep(1000)\n",
  "raise": "def init(*args, **kwargs):\n  raise RuntimeError('no room\\nin this project')\n",
  "die": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
  "list": """
import pathlib, types
FILE = pathlib.Path(__file__).with_name("rows")
def init(project, name, **kwargs):
  return types.SimpleNamespace(name=name)
def log(values, step):
  FILE.open("a").write(f"{step} {sorted(values)}\\n")
def log_artifact(path, **kwargs):
  pass
def Table(**kwargs):
  return kwargs
def finish():
  FILE.open("a").write("finish\\n")
""",
}


def fake(tmp_path, monkeypatch, kind):
  """Puts a package called trackio first on the path of other processes."""
  folder = tmp_path / "packages"
  folder.mkdir()
  (folder / "trackio.py").write_text(FAKES[kind])
  monkeypatch.setenv("PYTHONPATH", str(folder))
  monkeypatch.setitem(trackers.PACKAGES, "trackio", ())
  workdir = tmp_path / "run"
  workdir.mkdir()
  return folder, workdir


def wait_until(is_done, seconds=60):
  deadline = time.monotonic() + seconds
  while not is_done() and time.monotonic() < deadline:
    time.sleep(0.05)
  assert is_done()


@pytest.mark.parametrize(
  ("kind", "words"), [("raise", "tracker trackio: RuntimeError: no room in this project; the run goes on without it, and `python -m"),
                      ("die", "tracker trackio: its process ended with status -9; see ")],
)  # fmt: skip
def test_a_tracker_that_fails_costs_one_line(kind, words, tmp_path, monkeypatch):
  _, workdir = fake(tmp_path, monkeypatch, kind)
  followers = Followers(workdir, ["trackio"])
  lines = []
  wait_until(lambda: lines.extend(followers.news()) or lines)
  assert len(lines) == 1 and lines[0].startswith(words) and "\n" not in lines[0], lines
  assert not followers.news() and not followers.finish(1.0)


def test_a_tracker_that_hangs_is_left_behind(tmp_path, monkeypatch):
  _, workdir = fake(tmp_path, monkeypatch, "hang")
  followers = Followers(workdir, ["trackio"])
  (follower,) = followers._running
  assert not followers.news()
  (line,) = followers.finish(0.2)
  command = f"`python -m jaxrl_llm.run.observe.trackers {workdir} trackio` sends what it lacks"
  assert line == f"tracker trackio: did not take the rest within 0 s, {command}"
  assert follower.process.returncode == -signal.SIGKILL


def test_a_run_that_is_killed_leaves_a_tracker_that_takes_the_rest_and_ends(tmp_path, monkeypatch):
  folder, workdir = fake(tmp_path, monkeypatch, "list")
  write(workdir, [1, 2])
  code = f"""
import os, pathlib, signal
from jaxrl_llm.run.observe.trackers.followers import Followers
followers = Followers(pathlib.Path({str(workdir)!r}), ["trackio"])
print(followers._running[0].process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
  path = os.pathsep.join([str(folder), str(Path(__file__).parents[3])])
  killed = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60)
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  rows = folder / "rows"
  wait_until(lambda: rows.exists() and rows.read_text().endswith("finish\n"))
  lines = rows.read_text().splitlines()  # Metrics, then tables.
  assert [line.split()[0] for line in lines] == ["1", "2", "1", "2", "finish"]
  wait_until(lambda: not Path("/proc", killed.stdout.strip()).exists() or "Z" in Path("/proc", killed.stdout.strip(), "stat").read_text())


@pytest.mark.parametrize(
  ("names", "words"),
  [
    (("wand",), "found 'wand', expected one of wandb, mlflow, trackio; did you mean 'wandb'?"),
    (("tensorboard",), "found 'tensorboard', expected config.log.tensorboard=True, the default, which writes its files"),
    (("trackio", "trackio"), "found 'trackio' 2 times, expected each tracker once"),
    (("wandb",), "found 'wandb', which needs the package wandb, expected pip install 'jaxrl-llm[wandb]' first, or another tracker"),
  ],
)
def test_a_tracker_that_cannot_be_used_is_refused(names, words, tmp_path, monkeypatch, capsys):
  (tmp_path / "wandb").mkdir()  # A folder of W&B's files in the current folder is no package.
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", ["", str(tmp_path)])
  (line,) = map(str, trackers.tracker_problems(names))
  assert line == f"config.log.trackers: {words}"
  assert main([str(tmp_path), names[0]]) == 2
  assert "error: " in capsys.readouterr().err


def test_sending_needs_a_run(tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(trackers.PACKAGES, "trackio", ())
  assert main([str(tmp_path), "trackio"]) == 2
  assert capsys.readouterr().err == f"error: {tmp_path}: found no metrics.jsonl, expected the workdir of a run\n"


def test_one_process_at_a_time_sends_a_run(tmp_path, monkeypatch):
  from jaxrl_llm.run.observe.trackers import __main__ as command

  monkeypatch.setattr(command, "LAST_SECONDS", -10.0)
  with command.alone(tmp_path, "wandb"), pytest.raises(TimeoutError, match="another process sends"), command.alone(tmp_path, "wandb"):
    pass
  with command.alone(tmp_path, "wandb"), command.alone(tmp_path, "mlflow"):
    assert json.dumps(sorted(path.name for path in (tmp_path / "trackers").iterdir())) == '["mlflow.lock", "wandb.lock"]'
