"""Learning rates from the first update of a phase to its last, and when the config changes."""

import numpy as np
import pytest

from jaxrl_llm.config.fields import flatten
from jaxrl_llm.learner.programs import make_optimizers
from jaxrl_llm.learner.schedules import phase_schedule, phases, rate_change, unfinished_warm_ups
from tests.runs import tiny_config

LINEAR = {"learner.warmup_steps": 0, "learner.learning_rate": 2e-4}


def fields(name="gspo", **changes):
  return flatten(tiny_config(name, LINEAR | {path.replace("__", "."): x for path, x in changes.items()}))


@pytest.mark.parametrize("alone", [None, 0, 1, 2, 3])
def test_the_policys_rate_ends_with_the_run_however_long_a_critic_is_trained_alone(alone):
  """Four steps of two updates: the last rate is that of one update before 0."""
  config = tiny_config("ppo", LINEAR | {"critic.value_warmup_steps": alone})
  (_, schedule), _ = make_optimizers(config)
  num_updates = 2 * (4 - (alone or 0))
  rates = [float(schedule(update)) for update in range(num_updates + 1)]
  np.testing.assert_allclose(rates, 2e-4 * (1 - np.arange(num_updates + 1) / num_updates), atol=1e-10)
  # The lines about rates read the same schedule.
  assert phases(flatten(config))[-1].num_updates == num_updates
  again = phase_schedule(flatten(config), "learner", num_updates)
  assert [float(again(update)) for update in range(num_updates + 1)] == rates


def test_a_warm_up_that_is_not_over_before_the_run_is_said():
  assert not list(unfinished_warm_ups(fields(learner__warmup_steps=7)))
  (line,) = unfinished_warm_ups(fields(learner__warmup_steps=10))
  assert line == (
    "learning rate: still climbs in the last update, to 0.00016 (learner.learning_rate=0.0002), because learner.warmup_steps=10 is not "
    "below the number of updates, 8"
  )
  assert len(list(unfinished_warm_ups(fields(learner__warmup_steps=8)))) == 1
  assert "warm_start.warmup_steps=20" in next(unfinished_warm_ups(fields(warm_start__num_steps=5)))
  assert not list(unfinished_warm_ups(fields(num_steps=0)))


# A warm start of 120 steps precedes the RL steps.
MOVED = {
  "a finished run is extended": ({}, {"num_steps": 8}, 124, "2.5e-05 in the last update, 0.0001 in the next one"),
  "a run is extended": ({}, {"num_steps": 8}, 122, "0.000125 in the last update, 0.00015 in the next one"),
  "another rate": ({}, {"learner.learning_rate": 1e-3}, 122, "0.000125 in the last update, 0.0005 in the next one"),
  "a rate that stays": ({}, {"learner.schedule": "constant"}, 123, "7.5e-05 in the last update, 0.0002 in the next one"),
  "in the warm start": ({}, {"warm_start.learning_rate": 1.0}, 60, "0.0061 in the last update, 0.6 in the next one"),
  "after a critic's warm-up": ({"critic.value_warmup_steps": 2}, {"num_steps": 6}, 123, "0.00015 in the last update, 0.00015 in"),
  "nothing is left": ({}, {"learner.learning_rate": 1e-3}, 124, None),
  "before RL": ({}, {"num_steps": 8}, 120, None),
  "another field": ({}, {"eval.every": 7}, 122, None),
}


@pytest.mark.parametrize("case", MOVED)
def test_a_rate_that_jumps_when_the_config_changes_is_said(case):
  own, changes, step, words = MOVED[case]
  old, new = (flatten(tiny_config("ppo", LINEAR | {"critic.value_warmup_steps": None} | own | x)) for x in ({}, changes))
  line = rate_change(old, new, step)
  assert line is None if words is None else line.startswith(f"learning rate: {words}"), line
