"""Failed rewards of a step: a few only lose their own responses, too many stop the run."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.evaluation.held_out import NoRewardError
from jaxrl_llm.rewards import WeightedReward, call_here
from jaxrl_llm.rollouts.rollout import Drawn
from jaxrl_llm.run import sample
from jaxrl_llm.run.start import Run
from jaxrl_llm.text_types import Completion
from jaxrl_llm.types import Rollouts
from tests.runs import tiny_config


def assess(num_failed, limit):
  """Grades eight responses to four prompts, of which `num_failed` fail."""

  def judge(completion, example):
    return 1 / 0 if completion.num_tokens <= num_failed else 1.0

  run = object.__new__(Run)
  run.experiment = SimpleNamespace(rewards=[WeightedReward("judge", judge)])
  run.config = tiny_config(overrides={"reward.max_failed_fraction": limit})
  run.grader = call_here
  ones = np.ones((8, 1), bool)
  rollouts = Rollouts(ones.astype(np.int32), ones, ones.astype(np.int32), ones, -1.0 * ones.astype(np.float32), np.ones(8, bool))
  return sample.assess(run, Drawn(rollouts, [Completion("", (1,), n, True) for n in range(1, 9)], [{}] * 4))


@pytest.mark.parametrize("num_failed, limit", [(0, 0.0), (4, 0.5), (7, 1.0), (2, 0.25)])
def test_a_few_failures_cost_only_their_own_responses(num_failed, limit):
  assert assess(num_failed, limit).graded.valid.sum() == 8 - num_failed


@pytest.mark.parametrize("num_failed, limit", [(5, 0.5), (8, 1.0), (1, 0.0), (3, 0.25)])
def test_many_failures_stop_the_run_with_one_line_that_says_why(num_failed, limit):
  with pytest.raises(NoRewardError, match=rf"rewards: found none for .*8 responses \(raised {num_failed}\).*ZeroDivisionError") as caught:
    assess(num_failed, limit)
  assert "\n" not in str(caught.value) and (num_failed == 8 or f"config.reward.max_failed_fraction={limit}" in str(caught.value))
