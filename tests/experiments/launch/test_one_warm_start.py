"""A sweep over learning rates computes one warm start; its numbers are those without the cache."""

import json

import pytest

from experiments.launch import __main__ as launcher
from experiments.launch import local
from jaxrl_llm.workdir.metrics import read_rows, reproducible

SWEEP = """
def sweep(add):
  for rate in (1e-4, 1e-3):
    add({"learner.learning_rate": rate})
"""
SMALL = (
  "num_steps=1", "warm_start.num_steps=10", "warm_start.batch_size=8", "eval.num_prompts=8", "eval.batch_prompts=8", "eval.samples=1",
  "log.num_table_rows=0", "reward.overlong_buffer=16",
)  # fmt: skip


@pytest.mark.exhaustive
def test_a_sweep_computes_one_warm_start(tmp_path, monkeypatch, capsys):
  (tmp_path / "rates.py").write_text(SWEEP)
  quick = local.environment(None, 0, local.Options()) | {
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
  }
  both = {}
  for name, where in (("cached", str(tmp_path / "warm")), ("plain", "off")):
    monkeypatch.setattr(local, "environment", lambda *_, where=where: quick | {"JAXRL_LLM_WARM_STARTS": where})
    args = ["--config=configs/gspo.py:tiny", f"--sweep={tmp_path / 'rates.py'}", f"--folder={tmp_path / name}", "--max_parallel=2"]
    assert launcher.main([*args, *(f"--config.{setting}" for setting in SMALL)]) == 0, capsys.readouterr().err
    trials = sorted(path.parent for path in (tmp_path / name).glob("*/metrics.jsonl"))
    both[name] = {each.name: [json.dumps(reproducible(row)) for row in read_rows(each / "metrics.jsonl")] for each in trials}
  logs = [path.read_text() for path in sorted((tmp_path / "cached" / "logs").iterdir())]
  assert sorted("warm start: kept" in log for log in logs) == sorted("warm start: taken from" in log for log in logs) == [False, True]
  assert len(both["cached"]) == 2 and both["cached"] == both["plain"]
  one, other = both["cached"].values()
  assert one != other, "the rates make a difference"
