"""Trials as processes: places, restarts, all kinds of ends, and a launcher that is told to stop.

The trials are small scripts.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from experiments.launch import local, status
from experiments.launch.rows import SweepError, make_row
from experiments.launch.trial import Trial


def make_trial(tmp_path, name, code):
  """Makes a trial whose command is a script."""
  workdir = tmp_path / name
  workdir.mkdir()
  code = f"import sys, os, pathlib\nw = {str(workdir)!r}\n{code}"
  return Trial(name, make_row({"model.path": name}), str(workdir), ("python", "-c", code))


def run(trials, folder, *, max_parallel=2, tick=lambda: None, **options):
  """Runs the trials and returns whether all were tried, and the events as (name, reason)."""
  happened = []
  complete = local.run(
    iter(trials), folder, max_parallel=max_parallel, options=local.Options(**options), poll_seconds=0.02, tick=tick,
    changed=lambda trial, why: happened.append((trial.name, why)),
  )  # fmt: skip
  return complete, happened


FINISH = "pathlib.Path(w, 'summary.json').write_text('{\"status\": \"finished\", \"accuracy_final\": 0.5}')"


def test_a_failure_does_not_stop_the_other_trials(tmp_path):
  trials = [
    make_trial(tmp_path, "bad", "print('error: no luck', file=sys.stderr); sys.exit(1)"),
    make_trial(tmp_path, "killed", "os.kill(os.getpid(), 9)"),
    make_trial(tmp_path, "good", FINISH),
  ]
  complete, happened = run(trials, tmp_path, max_parallel=1)
  assert complete
  assert happened == [
    ("bad", None), ("bad", "exit status 1: no luck"), ("killed", None), ("killed", "killed by SIGKILL"), ("good", None), ("good", ""),
  ]  # fmt: skip
  events = status.attempts(tmp_path)
  states = [status.look(trial, events[trial.row.id]) for trial in trials]
  assert [(at.state, at.error) for at in states] == [
    ("failed", "exit status 1: no luck"), ("stopped", "killed by SIGKILL"), ("finished", ""),
  ]  # fmt: skip
  assert "no luck" in (tmp_path / "logs" / f"{trials[0].row.id}.log").read_text()


def test_exit_status_42_restarts_a_trial_up_to_the_limit(tmp_path):
  count = "n = len(list(pathlib.Path(w).iterdir())); pathlib.Path(w, str(n)).touch(); "
  trials = [
    make_trial(tmp_path, "twice", f"{count}\nif n < 2: sys.exit(42)\n{FINISH}"),
    make_trial(tmp_path, "always", f"{count}print('error: stuck'); sys.exit(42)"),
  ]
  run(trials, tmp_path, max_restarts=2)
  events = status.attempts(tmp_path)
  twice, always = (status.look(trial, events[trial.row.id]) for trial in trials)
  assert (twice.state, twice.attempts) == ("finished", 3)
  assert (always.state, always.attempts, always.error) == ("stopped", 3, "asks for a restart: stuck")


def test_an_old_error_in_the_log_does_not_explain_a_new_end(tmp_path):
  count = "n = len(list(pathlib.Path(w).iterdir()))\npathlib.Path(w, str(n)).touch()\n"
  trial = make_trial(tmp_path, "a", f"{count}if n: sys.exit(3)\nprint('error: old'); sys.exit(1)")
  assert run([trial], tmp_path)[1][-1] == ("a", "exit status 1: old")
  assert run([trial], tmp_path)[1][-1] == ("a", "exit status 3: it printed nothing")


def test_at_most_max_parallel_trials_run_at_a_time_each_on_its_own_cores(tmp_path):
  code = "import time; open(w + '/cores', 'w').write(str(sorted(os.sched_getaffinity(0)))); time.sleep(0.2)"
  trials = [make_trial(tmp_path, f"t{i}", code) for i in range(5)]
  running, most = set(), []
  local.run(
    iter(trials), tmp_path, max_parallel=2, options=local.Options(), poll_seconds=0.02, tick=lambda: most.append(len(running)),
    changed=lambda trial, why: running.add(trial.name) if why is None else running.discard(trial.name),
  )  # fmt: skip
  assert max(most) == 2
  places = {(tmp_path / trial.name / "cores").read_text() for trial in trials}
  mine = sorted(os.sched_getaffinity(0))
  assert places == ({str(mine[0::2]), str(mine[1::2])} if len(mine) > 1 else {str(mine)})


def test_gpus_go_to_places(tmp_path):
  trial = make_trial(tmp_path, "a", "")
  options = local.Options(gpus="0+1,2+3")
  assert [local.environment(trial, place, options)["CUDA_VISIBLE_DEVICES"] for place in (0, 1)] == ["0,1", "2,3"]
  assert local.environment(trial, 0, local.Options()) == dict(os.environ)


SAVES = """
import signal, time
def save(number, frame):
  pathlib.Path(w, 'saved').write_text(str(int(number)))
  time.sleep(0.3)
  sys.exit({code})
for each in (signal.SIGINT, signal.SIGTERM):
  signal.signal(each, save)
pathlib.Path(w, 'ready').touch()
time.sleep(60)
"""


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 42)])
def test_a_launcher_that_is_told_to_stop_lets_trials_save(tmp_path, number, code, capfd):
  trials = [make_trial(tmp_path, name, SAVES.format(code=code)) for name in ("a", "b", "never")]
  # SIGINT is ignored if the tests run in the background of a shell.
  sent, before = [], signal.getsignal(signal.SIGINT)

  def tick():
    if not sent and all((tmp_path / name / "ready").exists() for name in "ab"):
      sent.append(number)
      os.kill(os.getpid(), number)

  complete, happened = run(trials, tmp_path, tick=tick)
  assert not complete and {name for name, _ in happened} == {"a", "b"}
  assert [(tmp_path / name / "saved").read_text() for name in "ab"] == [str(int(number))] * 2
  events = status.attempts(tmp_path)
  states = [status.look(trial, events.get(trial.row.id, ())) for trial in trials]
  assert [(at.state, at.error) for at in states] == [("stopped", "interrupted")] * 2 + [("waiting", "")]
  assert "2 trial(s) are saving; press Ctrl-C again to end at once" in capfd.readouterr().err
  assert signal.getsignal(signal.SIGINT) is before


def test_trials_of_a_killed_launcher_save_and_end(tmp_path):
  if not local.shutil.which("setpriv"):
    pytest.skip("setpriv is not installed: trials of a killed launcher continue until they end")
  trial = make_trial(tmp_path, "a", SAVES.format(code=42))
  code = f"""
import pathlib
from experiments.launch import local
from experiments.launch.rows import Row
from experiments.launch.trial import Trial
trial = Trial("a", Row("a", {{}}), {trial.workdir!r}, {trial.command!r})
local.run(iter([trial]), pathlib.Path({str(tmp_path)!r}), max_parallel=1, options=local.Options(), changed=print, tick=lambda: None)
"""
  launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
  wait_for(tmp_path / "a" / "ready")
  launcher.kill()
  launcher.wait()
  wait_for(tmp_path / "a" / "saved")
  assert status.look(trial, status.attempts(tmp_path)["a"]).error == "the launcher was killed"


def wait_for(path):
  for _ in range(600):
    if path.exists() and (path.name != "saved" or path.read_text()):
      return
    time.sleep(0.05)
  raise AssertionError(f"no {path}")


def test_a_locked_workdir_is_waited_for(tmp_path, capfd):
  trial = make_trial(tmp_path, "a", FINISH)
  lock = open(tmp_path / "a" / ".lock", "w")  # noqa: SIM115 (open as long as it is locked)
  fcntl.flock(lock, fcntl.LOCK_EX)
  polls = []

  def tick():
    polls.append(0)
    if len(polls) == 3:
      lock.close()

  complete, happened = run([trial], tmp_path, tick=tick)
  assert complete and happened == [("a", None), ("a", "")] and len(polls) > 3
  assert capfd.readouterr().err.count("waiting for it") == 1


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(pin="maybe"), "--pin: found 'maybe', expected yes or no"),
    (dict(gpus="a,b"), "--gpus: found 'a,b', expected numbers"),
    (dict(gpus="0"), r"--gpus: found 1 place\(s\), expected at least --max_parallel=2"),
    (dict(max_restarts=-1), "--max_restarts: found -1"),
  ],
)
def test_settings_that_cannot_work_are_refused(options, message):
  with pytest.raises(SweepError, match=message):
    local.check(local.Options(**options), 2)


def test_the_status_of_a_running_trial_comes_from_its_files(tmp_path):
  trial = make_trial(tmp_path, "a", "")
  rows = [
    {"phase": "warm_start", "step": 40}, {"phase": "eval", "step": 0, "eval/accuracy": 0.25}, {"phase": "rl", "step": 1},
    {"phase": "rl", "step": 2}, {"phase": "eval", "step": 2, "eval/accuracy": 0.5},
  ]  # fmt: skip
  text = "".join(json.dumps(row) + "\n" for row in rows)
  (tmp_path / "a" / "metrics.jsonl").write_text(text + '{"phase": "rl", "st')
  (tmp_path / "a" / "config.json").write_text('{"num_steps": 9}')
  at = status.look(trial, [{"event": "started", "time": time.time() - 5}], is_running=True)
  assert (at.state, at.step, at.num_steps, at.accuracy_start, at.accuracy) == ("running", 2, 9, 0.25, 0.5)
  assert 5 <= at.seconds < 600
