"""Self-play: one policy plays both roles, each with a baseline that a checkpoint keeps."""

import json
import string

import numpy as np
import pytest

from jaxrl_llm.config.check import config_problems
from jaxrl_llm.rollouts.environments import Environment, Reply
from tests.runs import break_at, column, rows, run_here, tiny_config


def later_letter():
  """Makes a game of two turns: whose letter comes later in the alphabet wins."""

  def step(before, turn):
    letter = ord(turn.text[-1:] or "a")
    if before is None:
      return letter, Reply(f" {turn.text[-1:]} ")
    return before, Reply(reward=float(np.sign(letter - before)), done=True)

  return Environment(lambda row: None, step)


GAME = {
  "environment.name": "tests.run.test_self_play:later_letter", "environment.call_reward": None,
  "rollout.stop_strings": tuple(string.printable[:95]), "reward.verifier_weight": 0.0, "advantage.estimator": "rae",
  "advantage.decay": 0.9, "num_steps": 4, "warm_start.num_steps": 0, "checkpoint.every": 2, "eval.every": 4, "eval.num_prompts": 8,
  "eval.batch_prompts": 8, "learner.learning_rate": 1e-2, "log.tensorboard": False,
}  # fmt: skip


def config_of(changes=None):
  config = tiny_config("tools", GAME | (changes or {}))
  assert config_problems(config) == []
  return config


def baselines(workdir):
  return [column(workdir, f"critic/baseline/role_{role}") for role in (0, 1)]


@pytest.mark.slow
def test_both_roles_learn_and_a_resumed_run_keeps_their_baselines(tmp_path):
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  run_here(config_of(), whole)
  first, second = baselines(whole)
  np.testing.assert_allclose(first, -np.array(second), rtol=1e-6)  # What one wins the other loses.
  assert len(set(first)) == 4 and min(column(whole, "actor/grad_norm")) > 0
  break_at(config_of(), broken, 3)
  run_here(config_of(), broken)
  assert baselines(broken) == [first, second] and column(broken, "actor/loss") == column(whole, "actor/loss")
  # Other roles begin anew.
  run_here(config_of({"advantage.num_roles": 1, "num_steps": 6, "eval.every": 6}), whole)
  assert json.loads((whole / "summary.json").read_text())["attempts"] == 2
  *_, last = rows(whole, "rl")
  assert last["step"] == 6 and "critic/baseline/role_0" in last and "critic/baseline/role_1" not in last
