"""Tests of the real model's page: its runs are collected, paired and drawn."""

import json

import pytest

from experiments.real_model.__main__ import HERE, collect, differences, main, merged, table
from experiments.results import from_json
from jaxrl_llm.evaluation import SampleRow, write_samples

OTHER = dict(sample=0, prompt="", response="", answer=None, gold="", parts={}, cause=None, num_tokens=1, stopped=True)


def write_run(runs, name, right_at_the_end, status="finished"):
  """Writes a run of two RL steps on four problems; the untouched model solves the first."""
  folder = runs / name
  (folder / "evaluations").mkdir(parents=True)
  for step, right in ((0, 1), (2, right_at_the_end)):
    write_samples(folder / "evaluations" / f"step-{step}.jsonl", [SampleRow(id=str(i), score=float(i < right), **OTHER) for i in range(4)])
  evaluation = lambda step, right: {"step": step, "phase": "eval"} | {f"eval/accuracy{x}": right / 4 for x in ("", "_low", "_high")}
  evals = evaluation(0, 1), evaluation(2, right_at_the_end)
  steps = [{"step": step, "phase": "rl", "reward/final_number/mean": 0.5} for step in (1, 2)]
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (evals[0], *steps, evals[1])))
  (folder / "summary.json").write_text(json.dumps({"status": status, "peak_memory_gb": 3.5}))
  (folder / "report.html").write_text("")
  folder.with_suffix(".seconds").write_text("61.5")


def test_runs_are_collected_and_paired(tmp_path):
  write_run(tmp_path, "sapo-smollm2-1", 4)
  write_run(tmp_path, "sapo-smollm2-random-1", 1)
  write_run(tmp_path, "raft-smollm2-1", 2)
  write_run(tmp_path, "sapo-smollm2-2", 4, status="failed")
  write_run(tmp_path, "gspo-0", 4)
  tables = collect(tmp_path)
  gains = {(run["config"], run["seed"]): run["gain"] for run in tables["runs"]}
  assert gains == {("sapo:smollm2", 1): 75.0, ("sapo:smollm2-random", 1): 0.0, ("raft:smollm2", 1): 25.0}
  assert len(tables["steps"]) == len(tables["evals"]) == 6
  (difference,) = differences(tmp_path)
  assert (difference["method"], difference["seed"], difference["points"]) == ("raft", 1, -50.0)
  lines = list(table(tables | {"differences": [difference]}))
  assert "| `sapo:smollm2` | 1 | 25.0% [25.0, 25.0] | 100.0% [100.0, 100.0] | +75.0 [+25.0, +100.0] | 62 s | 3.50 GB |" in lines
  again = merged(tables | {"differences": [difference]}, {"runs": [dict(config="sapo:smollm2", seed=1, gain=9.0)], "differences": []})
  assert [(run["config"], run["seed"], run["gain"]) for run in again["runs"]] == [
    ("raft:smollm2", 1, 25.0), ("sapo:smollm2", 1, 9.0), ("sapo:smollm2-random", 1, 0.0)
  ]  # fmt: skip
  assert again["differences"] == [difference], "rows of missing runs are kept"
  with pytest.raises(FileNotFoundError, match="found no finished run of SmolLM2 in .*nothing; `python -m experiments.laptop_job`"):
    collect(tmp_path / "nothing")


def test_the_checked_in_results_meet_the_rules(tmp_path, capsys):
  pytest.importorskip("matplotlib")
  (tmp_path / "results.json").write_text((HERE / "results.json").read_text())
  main(["--plot_only", "--folder", str(tmp_path)])
  assert (tmp_path / "figures" / "real_model.png").stat().st_size > 10_000
  runs = {(run["config"], run["seed"]): run for run in from_json((HERE / "results.json").read_text())["runs"]}
  assert [runs["sapo:smollm2-steps without running_sum", seed]["gain_low"] > 20 for seed in (1, 2, 3)] == [True, True, False]
  assert all(runs["sapo:smollm2-steps", seed]["gain_low"] > 20 and runs["sapo:smollm2-steps", seed]["seconds"] < 3600 for seed in (4, 5, 6))
  assert all(runs["sapo:smollm2-random", seed]["gain_low"] < 0 for seed in (1, 2, 3))
  assert "| `sapo:smollm2` | 1 | 15.6%" in capsys.readouterr().out
