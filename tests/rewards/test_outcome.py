"""A reward that fails costs its own response, is counted by its cause, and is never a silent 0."""

import math

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import CAUSES, Outcome, WeightedReward, failure_metrics, grade
from jaxrl_llm.text_types import Completion
from tests.rewards.workers.hostile import Unshowable, raise_

COMPLETIONS = [Completion(text=f"#{i}", token_ids=(i,), num_tokens=i, stopped=True) for i in range(3)]
EXAMPLES = [{"answer": "0"}, {"answer": "5"}, {"answer": "2"}]
LENGTH = WeightedReward("length", lambda completion, example: completion.num_tokens)


def faulty(value):
  """Makes a reward that is 1, except for completion 1, for which `value` is called."""
  return WeightedReward("faulty", lambda completion, example: value() if completion.num_tokens == 1 else 1.0, 0.5)


class Unprintable(Exception):
  def __str__(self):
    return "a\nb" * 10_000


class Hostile:
  def __array__(self, *args, **kwargs):
    raise RuntimeError("no")

  def __repr__(self):
    raise RuntimeError("no")


@pytest.mark.parametrize("value, cause", [
  (lambda: 1 / 0, "raised"),
  (lambda: raise_(Unprintable()), "raised"),
  (lambda: raise_(RecursionError()), "raised"),
  (lambda: raise_(MemoryError()), "memory"),
  (lambda: raise_(Unshowable()), "raised"),
  (lambda: raise_(TimeoutError("late")), "timeout"),
  (lambda: None, "wrong_type"),
  (lambda: "1.0", "wrong_type"),
  (lambda: [1.0], "wrong_type"),
  (lambda: np.ones((2, 2)), "wrong_type"),
  (lambda: 1j, "wrong_type"),
  (lambda: math.nan, "not_finite"),
  (lambda: -math.inf, "not_finite"),
  (lambda: 1e300, "not_finite"),
  *((lambda value=value: value, "wrong_type") for value in (b"1", (1.0,), [], np.array([1.0]), object(), [[1], [1, 2]], Hostile(), len)),
  (lambda: 10**400, "wrong_type"),
])  # fmt: skip
def test_a_failure_costs_one_response(value, cause):
  graded = grade([LENGTH, faulty(value)], COMPLETIONS, EXAMPLES)
  assert graded.failed.tolist() == [None, cause, None] and graded.valid.tolist() == [True, False, True]
  assert graded.totals.tolist() == [0.5, 0, 2.5] and graded.parts["length"].tolist() == [0, 1, 2]
  assert graded.totals.dtype == np.float32 and np.isfinite(graded.parts["faulty"]).all()
  assert graded.details.tolist() == ["", detail := graded.detail, ""]
  assert detail.startswith(f"reward 'faulty', completion 1: {cause}: ") and "\n" not in detail and len(detail) <= 500
  assert cause in CAUSES
  metrics = failure_metrics(graded.failed)
  assert metrics["rewards/failed"] == metrics[f"rewards/failed/{cause}"] == sum(metrics.values()) / 2 == 1


def test_each_completion_meets_its_own_example():
  graded = grade([WeightedReward("final_answer", rewards.make("final_answer"))], COMPLETIONS, EXAMPLES)
  assert graded.totals.tolist() == graded.parts["final_answer"].tolist() == [1, 0, 1] and graded.failed.tolist() == [None] * 3
  assert graded.totals.dtype == graded.parts["final_answer"].dtype == np.float32


def test_weights_unweighted_parts_and_verdicts():
  terms = [
    WeightedReward("answer", rewards.make("final_answer"), 2.0),
    WeightedReward("overlong", rewards.make("soft_overlong", max_tokens=2, buffer_tokens=2), 0.5, shapes=True),
  ]
  graded = grade(terms, COMPLETIONS, EXAMPLES)
  assert graded.parts["answer"].tolist() == [1, 0, 1] and graded.parts["overlong"].tolist() == [0, -0.5, -1]
  assert graded.totals.tolist() == [2, -0.25, 1.5] and graded.verdicts.tolist() == [2, 0, 2]


@pytest.mark.parametrize("value", [
  0.7, -0.7, 1, 0, True, np.float32(0.7), np.float64(0.7), np.int64(3), np.array(0.7), np.bool_(True), 1e-30,
])  # fmt: skip
def test_numbers_survive(value):
  graded = grade([WeightedReward("fn", lambda completion, example: value)], COMPLETIONS, EXAMPLES)
  assert graded.totals.tolist() == graded.parts["fn"].tolist() == [np.float32(value)] * 3


def test_the_first_term_that_fails_names_the_cause():
  terms = [WeightedReward("a", lambda completion, example: None), WeightedReward("b", lambda completion, example: 1 / 0)]
  graded = grade(terms, COMPLETIONS[:1], EXAMPLES[:1])
  assert graded.failed.tolist() == ["wrong_type"] and graded.detail.startswith("reward 'a', completion 0: wrong_type: ")


def test_a_pool_takes_the_place_of_calls_in_this_process():
  seen = []

  def pool(reward, completions, examples):
    seen.append((reward.spec, len(completions)))
    return [Outcome(1.0), Outcome(None, "died", "exit code -9"), Outcome(math.nan)]

  form = WeightedReward("form", rewards.make("tags"), 0.1, rewards.RewardSpec("tags"))
  graded = grade([form], COMPLETIONS, EXAMPLES, call=pool)
  assert seen == [(rewards.RewardSpec("tags", {}), 3)]
  assert graded.failed.tolist() == [None, "died", "not_finite"] and graded.parts["form"].tolist() == [1, 0, 0]
  with pytest.raises(ValueError, match=r"reward 'length': found 0 outcomes, expected 3, one for each completion"):
    grade([LENGTH], COMPLETIONS, EXAMPLES, call=lambda *args: [])


def test_no_term_judges_a_conversation_whose_environment_failed():
  asked, lost = [], COMPLETIONS[1]._replace(failed=("environment", "it broke"))
  seen = WeightedReward("seen", lambda completion, example: len(asked.append(example) or asked))
  graded = grade([seen], [*COMPLETIONS[::2], lost], EXAMPLES)
  assert asked == EXAMPLES[:2] and graded.parts["seen"].tolist() == [1, 2, 0]
  assert graded.failed.tolist() == [None, None, "environment"] and graded.detail == "it broke"


def test_no_completions_and_illegal_terms():
  graded = grade([LENGTH], [], [])
  assert graded.totals.shape == graded.valid.shape == (0,) and graded.totals.dtype == np.float32
  with pytest.raises(ValueError, match="expected as many of each"):
    grade([LENGTH], COMPLETIONS, EXAMPLES[:1])
  for names in ([], ["a", "a"]):
    with pytest.raises(ValueError, match="expected one or more distinct names"):
      grade([LENGTH._replace(name=name) for name in names], COMPLETIONS, EXAMPLES)
  for weight in (math.nan, math.inf):
    with pytest.raises(ValueError, match="reward 'length': found weight"):
      grade([LENGTH._replace(weight=weight)], COMPLETIONS, EXAMPLES)


def test_an_interrupt_is_not_a_failure():
  with pytest.raises(KeyboardInterrupt):
    grade([faulty(lambda: raise_(KeyboardInterrupt()))], COMPLETIONS, EXAMPLES)


def test_every_cause_has_its_counter_and_new_ones_get_theirs():
  metrics = failure_metrics(["No Memory!", None, "timeout"])
  assert {f"rewards/failed/{cause}" for cause in CAUSES} < set(metrics)
  assert metrics["rewards/failed/no_memory_"] == metrics["rewards/failed/timeout"] == 1 and metrics["rewards/failed"] == 2
