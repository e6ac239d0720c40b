"""Slurm's script: its text, its execution by bash, and resubmission. Its commands are stand-ins."""

import json
import os
import subprocess
import sys

import pytest

from experiments.launch import __main__ as launcher
from experiments.launch import slurm, trial
from experiments.launch.rows import SweepError, make_row

HOSTILE = """a "b" 'c' $HOME `ls` $(ls) \\ é"""


def make_trials(folder, count=3):
  sweep = trial.Sweep("clip", "configs/gspo.py:tiny", {"task.system": [HOSTILE]}, folder, str(folder))
  return trial.make_trials(sweep, [make_row({"seed": seed}) for seed in range(count)])


def stand_in(folder, name, code):
  """Writes a stand-in for a command of Slurm."""
  folder.mkdir(exist_ok=True)
  (folder / name).write_text(f"#!{sys.executable}\nimport sys, os, json\n{code}\n")
  (folder / name).chmod(0o755)


def finish(one):
  path = os.path.join(one.workdir, "summary.json")
  os.makedirs(one.workdir)
  with open(path, "w") as file:
    file.write('{"status": "finished"}')


def test_the_script_contains_the_options(tmp_path):
  options = slurm.Options(
    partition="gpu", account="lab", time="2-00:00", nodes=2, gpus_per_node=8, mem="64G", grace_seconds=300,
    setup=("module load cuda", "source env/bin/activate"), sbatch=("reservation=mine",), python="python3",
  )  # fmt: skip
  text = slurm.script(make_trials(tmp_path), tmp_path, max_parallel=2, options=options)
  asked = {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")}
  assert asked >= {
    "array=0-2%2", "partition=gpu", "account=lab", "time=2-00:00", "nodes=2", "gpus-per-node=8", "ntasks-per-node=8", "mem=64G",
    f"chdir={os.getcwd()}", "signal=TERM@300", "requeue", "open-mode=append", "job-name=clip", "reservation=mine",
  }  # fmt: skip
  assert not any(line.startswith(("wckey", "cpus", "qos")) for line in asked)
  assert text.index("module load cuda") < text.index("source env") < text.index("case") < text.index("srun")


@pytest.mark.parametrize(
  "time, seconds",
  [("90", 5400), ("1:30", 90), ("12:00:00", 43200), ("2-00", 172800), ("1-01:30", 91800), ("0-00:00:09", 9), ("0", 0), ("soon", 0)],
)
def test_slurms_time_formats(time, seconds):
  assert slurm._seconds(time) == seconds


def test_the_script_is_valid_bash(tmp_path):
  (path,) = slurm.write(make_trials(tmp_path), tmp_path, options=slurm.Options())
  subprocess.run(["bash", "-n", str(path)], check=True)
  assert (tmp_path / "slurm" / "logs").is_dir() and path.read_text().count("array=0-2%3") == 1


@pytest.mark.parametrize("code, restarts, requeued", [(0, "0", False), (1, "0", False), (42, "0", True), (42, "2", False)])
def test_a_task_runs_its_trial_and_is_queued_again_after_42(tmp_path, code, restarts, requeued):
  trials, bin_folder = make_trials(tmp_path), tmp_path / "bin"
  stand_in(bin_folder, "srun", f"open({str(tmp_path / 'said')!r}, 'w').write(json.dumps(sys.argv[1:])); sys.exit({code})")
  stand_in(bin_folder, "scontrol", f"open({str(tmp_path / 'requeued')!r}, 'w').write(' '.join(sys.argv[1:]))")
  (path,) = slurm.write(trials, tmp_path, options=slurm.Options(max_restarts=2))
  environment = os.environ | {
    "PATH": f"{bin_folder}:{os.environ['PATH']}", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "1",
    "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": restarts,
  }  # fmt: skip
  result = subprocess.run(["bash", str(path)], env=environment, capture_output=True, text=True)
  assert result.returncode == code, result.stderr
  said = json.loads((tmp_path / "said").read_text())
  # Word for word, including quotes.
  assert said[-len(trials[1].command) :] == [sys.executable, *trials[1].command[1:]]
  assert (tmp_path / "requeued").exists() == requeued
  # Only this task: one task's own id is the array's, and 77 would mean all tasks.
  if requeued:
    assert (tmp_path / "requeued").read_text() == "requeue 77_1"


def test_finished_trials_are_left_out(tmp_path, capsys):
  trials = make_trials(tmp_path)
  finish(trials[1])
  (path,) = slurm.write(trials, tmp_path, options=slurm.Options())
  assert trials[1].row.id not in path.read_text() and "array=0-1%2" in path.read_text()
  assert "1 of 3 trials finished earlier" in capsys.readouterr().out


def test_a_relaunch_submits_only_trials_that_are_neither_waiting_nor_running(tmp_path, monkeypatch):
  trials, bin_folder = make_trials(tmp_path), tmp_path / "bin"
  stand_in(bin_folder, "sbatch", "print('9')")
  stand_in(bin_folder, "squeue", "print('9_0\\n9_2\\n8_1')")
  monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
  told = []
  submit = lambda: slurm.submit(trials, tmp_path, options=slurm.Options(), tell=told.append)
  assert submit() == [one.row.id for one in trials]
  assert submit() == [trials[1].row.id]  # It is task 0 of its job, which is also 9 here.
  assert [line.partition(": ")[2] for line in told[1:3]] == [
    "job 9_0 is waiting or running; skipped", "job 9_2 is waiting or running; skipped",
  ]  # fmt: skip
  for one in trials:
    finish(one)
  assert submit() == [] and told[-1] == "nothing to submit"


def test_a_refusal_by_sbatch_is_one_line(tmp_path, monkeypatch):
  stand_in(tmp_path / "bin", "sbatch", "print('sbatch: error: invalid partition specified: gpu', file=sys.stderr); sys.exit(1)")
  stand_in(tmp_path / "bin", "squeue", "")
  monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
  with pytest.raises(SweepError, match="^sbatch: exit status 1: sbatch: error: invalid partition specified: gpu$"):
    slurm.submit(make_trials(tmp_path), tmp_path, options=slurm.Options())


@pytest.mark.parametrize(
  "args, message",
  [
    (("--partitoin=gpu",), "--partitoin: unknown for --target=slurm, did you mean --partition?"),
    (("--time=soon",), "--time: found 'soon', expected minutes, H:MM:SS or D-HH:MM"),
    (("--mem=lots",), "--mem: found 'lots', expected a number and K, M, G or T"),
    (("--nodes=0",), "--nodes: found 0, expected 1 or more"),
    (("--sbatch=exclusive",), "--sbatch: found 'exclusive', expected NAME=VALUE"),
    (("--sbatch=gpus-per-node=8",), "--sbatch: found gpus-per-node, expected it as a flag of its own, --gpus_per_node"),
    (("--sbatch=signal=USR1@60",), "--sbatch: found signal, which the launcher sets itself; expected another option"),
    (("--gpus_per_node=8", "--tasks_per_node=1"), "--tasks_per_node: found 1 for --gpus_per_node=8, expected as many"),
    (("--time=1:00", "--grace_seconds=60"), "--grace_seconds: found 60 with --time=1:00 (60 s), expected less"),
    ((), "--target=slurm: sbatch is not on the PATH; run this on a login node of the cluster, or with --dry_run"),
  ],
)
def test_bad_settings_are_refused(args, message, tmp_path, capsys, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))  # Hides Slurm if it is installed.
  base = ("--config=configs/gspo.py:tiny", "--sweep=experiments/sweeps/clip_range.py", "--target=slurm", f"--folder={tmp_path}")
  assert launcher.main([*base, *args]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and message in line


def test_without_submitit_the_extra_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "submitit.slurm.slurm", None)
  with pytest.raises(ImportError, match=r"--target=slurm needs submitit: pip install \"jaxrl-llm\[sweeps\]\""):
    slurm.script(make_trials(tmp_path), tmp_path, max_parallel=1, options=slurm.Options())
