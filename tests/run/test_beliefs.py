"""A baseline per prompt in a run: beliefs, and the last responses, survive a resumption."""

import json

import numpy as np
import pytest

from jaxrl_llm.config.check import config_problems
from jaxrl_llm.run.steps import beliefs, learn
from tests.runs import break_at, column, run_here, tiny_config

SETTINGS = {
  "task.name": "file", "task.question_column": "q", "task.answer_column": "a", "task.reward": "final_number", "task.levels": None,
  "advantage.estimator": "spo", "rollout.group_size": 1, "rollout.num_prompts": 4, "learner.updates_per_rollout": 1,
  "learner.row_tokens": 64, "learner.row_buckets": (4,), "learner.learning_rate": 3e-2, "objective.kl_coef": None,
  "warm_start.num_steps": 0, "num_steps": 6, "checkpoint.every": 2, "eval.every": 6, "eval.num_prompts": 1, "eval.samples": 1,
  "eval.metrics": (), "log.tensorboard": False, "reward.terms": ("pattern=1",), "reward.settings": ("pattern.regex=[a-m]",),
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
  """Makes the config of a run that sees each of 8 problems once in two steps."""
  path = tmp_path / "problems.jsonl"
  path.write_text("".join(json.dumps({"q": f"{i} + 1?", "a": str(i + 1)}) + "\n" for i in range(9)), encoding="utf-8")
  config = tiny_config("gspo", SETTINGS | {"task.path": str(path), "task.test_fraction": 0.1})
  assert config_problems(config) == []
  return config


@pytest.mark.slow
def test_beliefs_and_the_drift_of_the_policy_survive_a_resumption(config, tmp_path, monkeypatch):
  whole, broken, seen = tmp_path / "whole", tmp_path / "broken", []

  def recorded(run, batch, evidence, real=beliefs.with_beliefs):
    made = real(run, batch, evidence)
    seen.append((np.asarray(made.beliefs), np.asarray(made.drift)))
    return made

  monkeypatch.setattr(learn, "with_beliefs", recorded)
  run_here(config, whole)
  first, *_, last = seen
  assert np.all(first[0] == 0.5) and not np.any(first[1])  # No prompt has been seen.
  # All prompts have been seen, and the policy has moved since.
  assert np.all(last[0].sum(axis=1) > 1.5) and np.all(last[1] > 0)
  assert column(whole, "critic/belief/samples")[0] < column(whole, "critic/belief/samples")[-1]
  breaking = len(seen)
  break_at(config, broken, 5)
  run_here(config, broken)
  # The step that was killed is repeated from the checkpoint before it.
  for one, other in zip(seen[4:breaking], seen[-2:], strict=True):
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(one[1], other[1])
  for name in ("critic/belief/samples", "critic/belief/pass_rate", "critic/advantages/max", "actor/loss"):
    assert column(broken, name) == column(whole, name)
