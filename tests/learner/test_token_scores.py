"""Token scores of the viewer: those of the updated policy and the objective, under any split."""

import numpy as np
import pytest

from jaxrl_llm.workdir.metrics import read_rows
from tests.marks import few
from tests.runs import VARIED, column, run_here, tiny_config

SHORT = VARIED | {
  "num_steps": 2, "warm_start.num_steps": 4, "eval.every": 2, "log.num_table_rows": 0, "log.tensorboard": False, "log.samples_every": 1,
  "log.num_samples": 32, "learner.learning_rate": 3e-3, "learner.warmup_steps": 1,
}  # fmt: skip


def samples_of(name, workdir, overrides, devices=1):
  run_here(tiny_config(name, SHORT | overrides), workdir, devices=devices)
  assert column(workdir, "perf/recompiles") == [0, 0]
  return read_rows(workdir / "samples.jsonl")


def check_gspo(rows, low, high):
  """Checks GSPO's weights: the sequence's ratio, or 0 where the clip ends the gradient."""
  seen = set()
  for row in rows:
    log_ratio, entropy = np.array(row["log_ratio"]), np.array(row["entropy"])
    assert len(log_ratio) == len(entropy) == len(row["token_ids"]) == row["num_tokens"] and np.all(entropy >= -1e-6)
    if abs(row["advantage"]) < 1e-6:
      assert "gate_weight" not in row
      continue
    ratio = np.exp(log_ratio.mean())
    if min(abs(ratio - 1 + low), abs(ratio - 1 - high)) < 1e-5:
      continue  # On the bound of the clip rounding decides.
    clipped = ratio > 1 + high if row["advantage"] > 0 else ratio < 1 - low
    np.testing.assert_allclose(row["gate_weight"], 0 if clipped else ratio, rtol=1e-4)
    seen.add(clipped)
  assert seen == {True, False}


@pytest.mark.parametrize(
  "split",
  few([
    pytest.param({}, id="whole"),
    pytest.param({"learner.rows_per_device": 2}, id="in micro-batches", marks=pytest.mark.exhaustive),
  ], rest="slow"),
)
def test_token_scores_of_a_run(split, tmp_path):
  rows = samples_of("gspo", tmp_path, split)
  assert [row["step"] for row in rows] == [1] * 32 + [2] * 32
  check_gspo(rows, 0.006, 0.008)
  # The scores are those after the updates, not those before.
  assert max(abs(x) for row in rows for x in row["log_ratio"]) > 1e-3


@pytest.mark.exhaustive
def test_token_scores_on_eight_devices(tmp_path):
  check_gspo(samples_of("gspo", tmp_path, {"mesh.fsdp": 4, "mesh.tensor": 2}, devices=8), 0.006, 0.008)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["grpo", "sapo"])
def test_other_objectives_have_token_scores_too(name, tmp_path):
  rows = samples_of(name, tmp_path, {})
  weights = [x for row in rows for x in row.get("gate_weight", []) if x is not None]
  assert weights and all(np.isfinite(weights)) and min(weights) >= 0 and 0.5 < np.median(weights) < 2
