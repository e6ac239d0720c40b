"""A real sweep of four trials, of which one is killed and one fails. One relaunch finishes it."""

import csv
import json

import pytest

from experiments.launch import __main__ as launcher
from experiments.launch import local, status

SWEEP = """
def get_hyper(h):
  return h.product([h.sweep("learner.learning_rate", (1e-4, 1e-3)), h.sweep("seed", (0, 1))])
"""
SMALL = (
  "num_steps=3", "warm_start.num_steps=10", "checkpoint.warm_start_every=10", "checkpoint.every=1", "eval.every=3", "eval.num_prompts=8",
  "eval.batch_prompts=8", "log.num_table_rows=0",
)  # fmt: skip


@pytest.mark.exhaustive
def test_one_relaunch_finishes_a_killed_and_a_failed_trial(tmp_path, monkeypatch, capsys):
  (tmp_path / "mine.py").write_text(SWEEP)
  folder = tmp_path / "sweep"
  args = ["--config=configs/gspo.py:tiny", f"--sweep={tmp_path / 'mine.py'}", f"--folder={folder}", "--max_parallel=2"]
  args += [f"--config.{setting}" for setting in SMALL]
  faults = {(1e-4, 1): "update:3:kill", (1e-3, 0): "reward:2:fail"}

  def environment(one, place, options):
    key = one.row.overrides["learner.learning_rate"], one.row.overrides["seed"]
    return quick | {"JAXRL_FAULT": faults.get(key, "")}

  # One device, as on a user's machine.
  quick = local.environment(None, 0, local.Options()) | {
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
  }
  monkeypatch.setattr(local, "environment", environment)

  assert launcher.main(args) == 1
  first = table(folder)
  killed, failed = first[1], first[2]
  assert [row["state"] for row in first] == ["finished", "stopped", "failed", "finished"]
  assert (killed["error"], killed["steps"], killed["accuracy_final"]) == ("killed by SIGKILL", "2", "")
  assert failed["error"].startswith("exit status 1: OSError: JAXRL_FAULT: a deliberate failure in reward, step 2")
  assert failed["steps"] == "1"
  out = capsys.readouterr().out
  assert "2 finished, 1 failed, 1 stopped" in out and "the same command again continues what is failed, stopped" in out

  faults.clear()
  assert launcher.main(args) == 0
  second = table(folder)
  assert "2 of 4 trials finished earlier and are skipped" in capsys.readouterr().out
  assert [[row[key] for key in ("learner.learning_rate", "seed", "state", "attempts", "steps", "error")] for row in second] == [
    [rate, seed, "finished", "2" if (rate, seed) in (("0.0001", "1"), ("0.001", "0")) else "1", "3", ""]
    for rate in ("0.0001", "0.001") for seed in ("0", "1")
  ]  # fmt: skip
  for before, row in zip(first, second, strict=True):
    summary = json.loads((folder / row["id"] / "summary.json").read_text())
    assert row["workdir"] == str(folder / row["id"]) and summary["num_steps"] == 3
    assert float(row["accuracy_start"]) == summary["accuracy_start"] and float(row["accuracy_final"]) == summary["accuracy_final"]
    seconds = [event["seconds"] for event in status.attempts(folder)[row["id"]] if event["event"] == "ended"]
    assert float(row["seconds"]) == pytest.approx(sum(seconds), abs=1e-3)
    if before["state"] == "finished":
      assert row == before  # A finished trial is left alone.
  # The killed trial was resumed: its first two steps are from the first attempt.
  rows = [json.loads(line) for line in (folder / killed["id"] / "metrics.jsonl").read_text().splitlines()]
  assert [row["step"] for row in rows if row["phase"] == "rl"] == [1, 2, 3]
  assert "<html" in (folder / "report.html").read_text()

  assert launcher.main(args) == 0  # Nothing is left to do.
  assert table(folder) == second


def table(folder):
  with open(folder / "summary.csv", newline="") as file:
    return list(csv.DictReader(file))
