"""Dynamic sampling: whole groups that differ, drawn by one policy in a limited number of rounds."""

import math

import numpy as np
import pytest

from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts import dynamic_sampling
from jaxrl_llm.run.setup import experiment
from jaxrl_llm.run.steps import learn
from jaxrl_llm.text_types import Completion
from jaxrl_llm.types import Rollouts
from tests.runs import column, rows, run_here, tiny_config


def batch_of(rewards, group_size, first=0, width=3):
  """Grades prompts and responses whose tokens are their own numbers."""
  num = len(rewards)
  ids = first + np.arange(num)
  prompts = np.repeat(1000 + first + np.arange(num) // group_size, width).reshape(num, width).astype(np.int32)
  tokens = np.repeat(ids, 4).reshape(num, 4).astype(np.int32)
  ones = np.ones((num, 4), np.float32)
  routing = np.zeros((num, width + 4, 2, 1), np.int16)
  rollouts = Rollouts(prompts, np.ones(prompts.shape, bool), tokens, ones > 0, -ones, np.ones(num, bool), routing)
  responses = [Completion(str(i), (int(i),), 1, True) for i in ids]
  examples = [{"prompt": str(1000 + first + i)} for i in range(num // group_size)]
  values = dict(zip(responses, rewards, strict=True))
  return batch_lib.assess(rollouts, responses, examples, rewards=[WeightedReward("r", lambda completion, _: values[completion])])


def mixed(batch):
  return dynamic_sampling.differs(batch.graded.verdicts, batch.graded.valid, group_size=batch.group_size)


def test_differences_are_exact_and_ignore_unknown_rewards():
  verdicts = np.float32([0.1, 0.1, 0.5, 0.5, 0, 1, 7, 7])
  valid = np.array([1, 1, 1, 1, 1, 0, 1, 0], bool)
  assert dynamic_sampling.differs(verdicts, valid, group_size=2).tolist() == [False, False, False, False]
  assert dynamic_sampling.differs(np.float32([0, 1e-30, 0, 0]), np.ones(4, bool), group_size=2).tolist() == [True, False]
  assert dynamic_sampling.differs(np.zeros(4, np.float32), np.zeros(4, bool), group_size=2).tolist() == [False, False]


def test_a_full_batch_holds_only_whole_groups_that_differ_in_order():
  first = batch_of([0, 0, 1, 0, 1, 1, 0, 1], 2)
  second = batch_of([1, 1, 0, 1, 1, 0, 0, 0], 2, first=8, width=5)
  batch, counters = dynamic_sampling.fill([first, second], [mixed(first), mixed(second)], num_groups=3)
  assert [c.text for c in batch.completions] == ["2", "3", "6", "7", "10", "11"]
  assert [e["prompt"] for e in batch.examples] == ["1001", "1001", "1003", "1003", "1009", "1009"]
  assert batch.rollouts.tokens[:, 0].tolist() == [2, 3, 6, 7, 10, 11] and batch.rollouts.prompts.shape == (6, 5)
  assert batch.rollouts.prompts[0][batch.rollouts.prompt_mask[0]].tolist() == [1001] * 3
  assert batch.rollouts.routing.shape == (6, 9, 2, 1) and (batch.rollouts.routing[0, :2] == -1).all()
  assert mixed(batch).all()
  assert counters == {"group/rounds": 2, "group/drawn": 8, "group/mixed": 4, "group/filled_up": 0}


def test_missing_groups_are_filled_up():
  whole = batch_of([0, 0, 1, 0, 1, 1, 0, 0], 2)
  batch, counters = dynamic_sampling.fill([whole], [mixed(whole)], num_groups=3)
  assert [c.text for c in batch.completions] == ["0", "1", "2", "3", "4", "5"]
  assert (counters["group/mixed"], counters["group/filled_up"]) == (1, 2)


def test_the_share_of_groups_that_differ_is_as_expected():
  """P(mixed) = 1 - p^G - (1-p)^G."""
  rng, group_size, p = np.random.default_rng(0), 8, 0.2
  verdicts = (rng.random(20_000 * group_size) < p).astype(np.float32)
  share = dynamic_sampling.differs(verdicts, np.ones(len(verdicts), bool), group_size=group_size).mean()
  expected = 1 - p**group_size - (1 - p) ** group_size
  assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / 20_000)


OFTEN = {"rollout.max_refills": 3, "rollout.group_size": 2, "num_steps": 4, "warm_start.num_steps": 2, "log.tensorboard": False}
PLAIN = {"eval.every": 4, "checkpoint.every": 2, "checkpoint.warm_start_every": 2}


@pytest.fixture
def parity(monkeypatch):
  """A verifier that a random policy satisfies for about every third response."""
  terms = [WeightedReward("parity", lambda completion, example: float(sum(completion.token_ids) % 3 == 0))]
  monkeypatch.setattr(experiment, "make_rewards", lambda task, config: terms)


@pytest.mark.slow
def test_a_run_draws_until_its_batches_are_full(parity, tmp_path):
  config = tiny_config(overrides=OFTEN | PLAIN)
  run_here(config, tmp_path)
  steps = rows(tmp_path, "rl")
  for row in steps:
    assert row["group/drawn"] == row["group/rounds"] * config.rollout.num_prompts
    assert row["group/filled_up"] == max(config.rollout.num_prompts - row["group/mixed"], 0)
    assert row["group/rounds"] == 4 or row["group/filled_up"] == 0, "it stopped early only with a full batch"
    assert row["group/frac_reward_zero_std"] == row["group/filled_up"] / config.rollout.num_prompts
    assert row["group/response_tokens_drawn"] >= row["group/drawn"] * 2
  assert max(row["group/rounds"] for row in steps) > 1, "otherwise the test shows nothing"
  assert len(set(column(tmp_path, "perf/compiles")[1:])) == 1, "a further draw compiles nothing"


class Killed(BaseException):
  pass


@pytest.mark.exhaustive
def test_a_killed_run_draws_the_same_again(parity, tmp_path, monkeypatch):
  config = tiny_config(overrides=OFTEN | PLAIN)
  run_here(config, tmp_path / "whole")

  def update(run, batch, at, update=learn.update):
    if at == 3:
      raise Killed
    return update(run, batch, at)

  with monkeypatch.context() as patch, pytest.raises(Killed):
    patch.setattr(learn, "update", update)
    run_here(config, tmp_path / "killed")
  run_here(config, tmp_path / "killed")
  for name in ("rollout/tokens_sha256", "group/rounds", "actor/grad_norm"):
    assert column(tmp_path / "killed", name) == column(tmp_path / "whole", name)
