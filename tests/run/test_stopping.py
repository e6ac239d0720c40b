"""Early ends of a run: SIGTERM, Ctrl-C once and twice, a phase that never ends. Each is resumed."""

import json
import signal
import time

import pytest

from tests.runs import VARIED, call, flags, lines_of, reach, start, succeed

OVERRIDES = VARIED | {
  "warm_start.num_steps": 4, "num_steps": 6, "checkpoint.every": 6, "eval.every": 6, "log.num_table_rows": 0, "log.tensorboard": False,
  "log.samples_every": 1,
}  # fmt: skip


def args(workdir, **changes):
  return ["--config=configs/gspo.py:tiny", *flags(OVERRIDES | changes), f"--workdir={workdir}"]


def saved(workdir):
  return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal())


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("golden") / "run"
  succeed(*args(workdir))
  return workdir


def assert_resumes(workdir, golden):
  assert "resumed" in succeed(*args(workdir))
  assert lines_of(workdir) == lines_of(golden)
  assert (workdir / "samples.jsonl").read_bytes() == (golden / "samples.jsonl").read_bytes()


def assert_given_up(phase, workdir, step):
  """Stops a run by SIGTERM in a phase of a step, and checks what it says and what it has saved."""
  result = call(*args(workdir), JAXRL_FAULT=f"{phase}:{step}:term,{phase}:{step}:pause")
  assert result.returncode == 42 and "error: stopped by SIGTERM; the same command resumes" in result.stderr, (
    result.stderr
  )
  assert saved(workdir)[-1] == 4 + (step if phase == "update" else step - 1)
  assert json.loads((workdir / "summary.json").read_text())["status"] == "stopped: SIGTERM"


@pytest.mark.exhaustive
@pytest.mark.parametrize("phase", ["rollout", "advantages", "update"])
def test_a_step_without_updates_is_given_up(phase, golden, tmp_path):
  """After a SIGTERM in step 3 the checkpoint is that of step 2, or of step 3 if updates began."""
  workdir = tmp_path / "run"
  assert_given_up(phase, workdir, 3)
  assert_resumes(workdir, golden)


def assert_ends_at_once(workdir):
  """Presses Ctrl-C twice in step 3, in which the run hangs."""
  process = start(*args(workdir), JAXRL_FAULT="rollout:3:hang")
  reach(workdir, "rl", 2, process)
  time.sleep(0.5)
  process.send_signal(signal.SIGINT)
  time.sleep(1.0)
  assert process.poll() is None, "after the first Ctrl-C the run waits until it can save"
  process.send_signal(signal.SIGINT)
  _, errors = process.communicate(timeout=60)
  assert process.returncode == 130 and "Traceback" not in errors
  assert "interrupted; the same command resumes from the last checkpoint" in errors
  assert saved(workdir) == [4]


def assert_saves(workdir):
  """Presses Ctrl-C once in step 3."""
  result = call(*args(workdir), JAXRL_FAULT="rollout:3:interrupt,rollout:3:pause")
  assert result.returncode == 130, result.stderr
  assert "Ctrl-C: the run saves a checkpoint and ends; press it again to exit at once" in result.stdout
  assert (
    "error: stopped by Ctrl-C; the same command resumes from checkpoint 6" in result.stderr
    and "Traceback" not in result.stderr
  )


@pytest.mark.slow
def test_one_run_survives_ctrl_c_twice_ctrl_c_once_and_a_sigterm(golden, tmp_path):
  """Each attempt resumes the one before, and the last is equal to a run without interruptions."""
  workdir = tmp_path / "run"
  assert_ends_at_once(workdir)
  assert_saves(workdir)
  assert_given_up("update", workdir, 5)
  assert_resumes(workdir, golden)
  assert json.loads((workdir / "summary.json").read_text())["attempts"] == 4


@pytest.mark.slow
def test_a_phase_that_never_ends_is_stopped_by_the_watchdog(golden, tmp_path):
  workdir = tmp_path / "run"
  result = call(*args(workdir, **{"watchdog.seconds": 20}), JAXRL_FAULT="reward:2:hang")
  assert result.returncode == 42, result.stderr
  assert "error: the phase reward of step 2 has taken 20 s, more than config.watchdog.seconds=20; waiting for " in result.stderr
  (stacks,) = (workdir / "logs").glob("stacks-*.txt")
  assert "in strike" in stacks.read_text(), "the function that hangs"
  assert "the phase reward of step 2" in (workdir / "logs" / "attempt-1.log").read_text()


@pytest.mark.exhaustive
def test_a_sigterm_during_a_phase_that_never_ends(golden, tmp_path):
  workdir = tmp_path / "run"
  result = call(*args(workdir, **{"watchdog.stop_seconds": 2}), JAXRL_FAULT="rollout:3:term,rollout:3:hang")
  assert result.returncode == 42, result.stderr
  assert "error: stopped in the phase rollout of step 3, 2 s after SIGTERM" in result.stderr
