"""Exact numerics: runs whose sampler's log-probabilities are the learner's to the last bit."""

import subprocess
import sys

import pytest

from jaxrl_llm.models import make_model, preset
from jaxrl_llm.run.steps.stop import inexact
from jaxrl_llm.workdir.metrics import read_rows
from tests.runs import ROOT, call, environment, tiny_config

TINY = ("--config=configs/gspo.py:tiny", "--config.num_steps=2", "--config.warm_start.num_steps=20", "--config.numerics.exact=True")
MIXTURE, BFLOAT16 = "--config.model.preset=nano-moe", "--config.model.dtype=bfloat16"

RUNS = {
  "loop, mixture, expert, bfloat16": (
    "--config.mesh.data=1", "--config.mesh.fsdp=4", "--config.mesh.expert=2", "--config.rollout.driver=loop", MIXTURE, BFLOAT16,
  ),
}  # fmt: skip
MORE = {
  "loop": ("--config.rollout.driver=loop",),
  "drain, filters": ("--config.rollout.driver=drain", "--config.rollout.temperature=0.7", "--config.rollout.top_k=40"),
  "loop, adapters": ("--config.rollout.driver=loop", "--config.model.lora_rank=4"),
  "drain, mixture": ("--config.rollout.driver=drain", MIXTURE),
  "drain, bfloat16": ("--config.rollout.driver=drain", BFLOAT16),
  "windows": ("--config.model.preset=nano-window",),
  "rows of their own": ("--config.learner.share_prompts=False",),
  "conversations": ("--config=configs/tools.py:tiny",),
  "pictures": (
    "--config.model.preset=nano-vl", "--config.task.name=figures", "--config.task.levels=(1,)", "--config.rollout.prompt_buckets=(32,)",
    "--config.learner.row_tokens=160",
  ),
}  # fmt: skip


FURTHER = [pytest.param(options, marks=pytest.mark.exhaustive) for options in MORE.values()]


@pytest.mark.parametrize("options", [*RUNS.values(), *FURTHER], ids=[*RUNS, *MORE])
def test_every_token_of_a_run_has_the_same_bits(tmp_path, options):
  devices = 8 if any("mesh" in option for option in options) else 1
  process = call(*TINY, *options, f"--workdir={tmp_path / 'run'}", devices=devices)
  assert process.returncode == 0, process.stderr[-2000:]
  steps = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "rollout_corr/bits_equal" in row]
  assert len(steps) == 2
  for row in steps:
    assert row["rollout_corr/bits_equal"] == 1 and row["rollout_corr/logprob_abs_diff/max"] == row["rollout_corr/kl"] == 0


@pytest.mark.exhaustive
def test_other_commands_read_the_checkpoint_of_an_exact_run(tmp_path):
  """Each sets the flags that the run's config asks for, whatever its own process began with."""
  run, folder = tmp_path / "run", tmp_path / "exported"
  assert call(*TINY, f"--workdir={run}").returncode == 0
  for module, *args in (
    ("export", str(run), str(folder)),
    ("evaluate", f"--checkpoint={run}", "--config.eval.num_prompts=4"),
    ("main", "--config=configs/opd.py:tiny", f"--config.teacher.path={run}", "--config.num_steps=1", f"--workdir={tmp_path / 'student'}"),
  ):
    command = [sys.executable, "-m", f"jaxrl_llm.{module}", *args]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
  assert (folder / "model.safetensors").is_file()


def test_a_model_is_refused_without_the_flags(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_allow_excess_precision=false")
  with pytest.raises(ValueError, match="found no --xla_cpu_experimental_ynn_fusion_type=individual_dot, which exact numerics need"):
    make_model(preset("nano", vocab_size=264)._replace(exact=True))


def test_keys_of_earlier_weights_are_not_compared():
  config = tiny_config("gspo", {"numerics.exact": True, "rollout.staleness": 1, "rollout.update_in_flight": "keep"})
  assert inexact(config, 3, [{"rollout_corr/logprob_abs_diff/max": 1.0, "rollout_corr/bits_equal": 0.5}], lag=0) is None


@pytest.mark.parametrize(
  ("gap", "exact", "lag", "stops"), [(1e-7, True, 0, True), (0.0, True, 0, False), (1e-7, True, 1, False), (1e-7, False, 0, False)]
)
def test_the_first_token_that_differs_ends_an_exact_run(gap, exact, lag, stops):
  config = tiny_config("gspo", {"numerics.exact": exact, "rollout.staleness": 1})
  why = inexact(config, 3, [{"rollout_corr/logprob_abs_diff/max": gap, "rollout_corr/bits_equal": 0.75}, {}], lag=lag)
  assert (why is not None) == stops
  assert why is None or "of RL step 3 that differ between sampler and learner, by up to 1.0e-07 nats in 25.00% of the tokens" in why
