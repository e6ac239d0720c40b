"""Failed rewards of a step: a few only lose their own responses, too many stop the run."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.advantages import estimators
from jaxrl_llm.rewards import WeightedReward, call_here
from jaxrl_llm.rewards.outcome import NoRewardError
from jaxrl_llm.rollouts.arrivals import DrawnBatch
from jaxrl_llm.run.setup.start import Run
from jaxrl_llm.run.steps import sample
from jaxrl_llm.run.steps.grading import NegativeRewardError
from jaxrl_llm.text_types import Completion
from jaxrl_llm.types import Rollouts
from tests.runs import tiny_config


def assess(num_failed, limit, reward=1.0, **changes):
  """Grades eight responses to four prompts: `num_failed` fail, and the others earn `reward`."""

  def judge(completion, example):
    return 1 / 0 if completion.num_tokens <= num_failed else reward

  run = object.__new__(Run)
  run.config = tiny_config(overrides={"reward.max_failed_fraction": limit} | changes)
  estimator = estimators.of_section(**run.config.advantage)
  run.experiment = SimpleNamespace(rewards=[WeightedReward("judge", judge)], estimator=estimator)
  run.grader = call_here
  ones = np.ones((8, 1), bool)
  rollouts = Rollouts(ones.astype(np.int32), ones, ones.astype(np.int32), ones, -1.0 * ones.astype(np.float32), np.ones(8, bool))
  return sample.assess(run, DrawnBatch(rollouts, [Completion("", (1,), n, True) for n in range(1, 9)], [{}] * 4))


@pytest.mark.parametrize("num_failed, limit", [(0, 0.0), (4, 0.5), (7, 1.0), (2, 0.25)])
def test_a_few_failures_cost_only_their_own_responses(num_failed, limit):
  assert assess(num_failed, limit).graded.valid.sum() == 8 - num_failed


@pytest.mark.parametrize("num_failed, limit", [(5, 0.5), (8, 1.0), (1, 0.0), (3, 0.25)])
def test_many_failures_stop_the_run_with_one_line_that_says_why(num_failed, limit):
  with pytest.raises(NoRewardError, match=rf"rewards: found none for .*8 responses \(raised {num_failed}\).*ZeroDivisionError") as caught:
    assess(num_failed, limit)
  assert "\n" not in str(caught.value) and (num_failed == 8 or f"config.reward.max_failed_fraction={limit}" in str(caught.value))


def test_rewards_below_0_end_a_run_whose_estimator_takes_none():
  with pytest.raises(NegativeRewardError) as caught:
    assess(3, 0.5, reward=-0.25, **{"advantage.estimator": "maxrl"})
  assert str(caught.value) == (
    "config.advantage.estimator: found 'maxrl' and a response with the reward -0.25 (judge -0.25), expected rewards of 0 or more; change "
    "the rewards, or take another estimator"
  )
  assert assess(3, 0.5, reward=0.0, **{"advantage.estimator": "maxrl"}).graded.valid.sum() == 5
  assert assess(3, 0.5, reward=-0.25).graded.totals.min() == -0.25


def test_the_filter_and_whole_groups_decide_what_is_learned_from():
  batch = assess(1, 0.5, **{"advantage.estimator": "pass_at_k"})
  assert batch.counted.tolist() == [False, False, *[True] * 6]
