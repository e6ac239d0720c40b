"""A reward that fails costs its own response, is counted by its cause, and is never a silent 0."""

import math

import numpy as np
import pytest

from jaxrl_llm import rewards
from jaxrl_llm.rewards import CAUSES, Outcome, WeightedReward, failure_metrics, grade, score
from jaxrl_llm.rewards.outcome import MAX_DETAILS
from jaxrl_llm.text_types import Completion

COMPLETIONS = [Completion(text=f"#{i}", token_ids=(i,), num_tokens=i, stopped=True) for i in range(3)]
EXAMPLES = [{"answer": "0"}, {"answer": "5"}, {"answer": "2"}]
LENGTH = WeightedReward("length", lambda completion, example: completion.num_tokens)


def faulty(value):
  """A reward that is 1, but for completion 1 whatever `value` does."""
  return WeightedReward("faulty", lambda completion, example: value() if completion.num_tokens == 1 else 1.0, 0.5)


def raises(error):
  raise error


class Unprintable(Exception):
  def __str__(self):
    return "a\nb" * 10_000


class Unshowable(Exception):
  def __str__(self):
    raise RuntimeError


@pytest.mark.parametrize("value, cause", [
  (lambda: 1 / 0, "raised"),
  (lambda: raises(Unprintable()), "raised"),
  (lambda: raises(RecursionError()), "raised"),
  (lambda: raises(MemoryError()), "memory"),
  (lambda: raises(Unshowable()), "raised"),
  (lambda: raises(TimeoutError("late")), "timeout"),
  (lambda: None, "wrong_type"),
  (lambda: "1.0", "wrong_type"),
  (lambda: [1.0], "wrong_type"),
  (lambda: np.ones((2, 2)), "wrong_type"),
  (lambda: 1j, "wrong_type"),
  (lambda: math.nan, "not_finite"),
  (lambda: -math.inf, "not_finite"),
  (lambda: 1e300, "not_finite"),
])  # fmt: skip
def test_a_failure_costs_one_response(value, cause):
  graded = grade([LENGTH, faulty(value)], COMPLETIONS, EXAMPLES)
  assert graded.failed == [None, cause, None] and graded.valid.tolist() == [True, False, True]
  assert graded.totals.tolist() == [0.5, 0, 2.5] and graded.parts["length"].tolist() == [0, 1, 2]
  assert graded.totals.dtype == np.float32 and np.isfinite(graded.parts["faulty"]).all()
  (detail,) = graded.details
  assert detail.startswith(f"reward 'faulty', completion 1: {cause}: ") and "\n" not in detail and len(detail) <= 500
  assert cause in CAUSES
  metrics = failure_metrics(graded.failed)
  assert metrics["rewards/failed"] == metrics[f"rewards/failed/{cause}"] == sum(metrics.values()) / 2 == 1


def test_without_a_failure_it_is_score():
  terms = [WeightedReward("answer", rewards.make("final_answer"), 2.0), WeightedReward("length", LENGTH.fn, -0.1)]
  graded, (total, parts) = grade(terms, COMPLETIONS, EXAMPLES), score(terms, COMPLETIONS, EXAMPLES)
  assert graded.totals.tolist() == total.tolist() and graded.failed == [None] * 3
  assert {name: part.tolist() for name, part in graded.parts.items()} == {name: part.tolist() for name, part in parts.items()}


def test_the_first_term_that_fails_names_the_cause():
  terms = [WeightedReward("a", lambda completion, example: None), WeightedReward("b", lambda completion, example: 1 / 0)]
  graded = grade(terms, COMPLETIONS[:1], EXAMPLES[:1])
  assert graded.failed == ["wrong_type"] and len(graded.details) == 2


def test_a_pool_takes_the_place_of_calls_in_this_process():
  seen = []

  def pool(reward, completions, examples):
    seen.append((reward.spec, len(completions)))
    return [Outcome(1.0), Outcome(None, "died", "exit code -9"), Outcome(math.nan)]

  form = WeightedReward("form", rewards.make("tags"), 0.1, rewards.RewardSpec("tags"))
  graded = grade([form], COMPLETIONS, EXAMPLES, call=pool)
  assert seen == [(rewards.RewardSpec("tags", {}), 3)]
  assert graded.failed == [None, "died", "not_finite"] and graded.parts["form"].tolist() == [1, 0, 0]
  with pytest.raises(ValueError, match=r"reward 'length': found 0 outcomes, expected 3, one for each completion"):
    grade([LENGTH], COMPLETIONS, EXAMPLES, call=lambda *args: [])


def test_a_reward_that_always_fails_does_not_flood():
  many = COMPLETIONS * 100
  graded = grade([faulty(lambda: 1.0)._replace(fn=lambda completion, example: None)], many, EXAMPLES * 100)
  assert not graded.valid.any() and len(graded.details) == MAX_DETAILS


def test_no_completions_and_illegal_terms():
  graded = grade([LENGTH], [], [])
  assert graded.totals.shape == graded.valid.shape == (0,) and graded.totals.dtype == np.float32
  with pytest.raises(ValueError, match="expected as many of each"):
    grade([LENGTH], COMPLETIONS, EXAMPLES[:1])
  with pytest.raises(ValueError, match="expected one or more distinct names"):
    grade([], COMPLETIONS, EXAMPLES)


def test_an_interrupt_is_not_a_failure():
  with pytest.raises(KeyboardInterrupt):
    grade([faulty(lambda: raises(KeyboardInterrupt()))], COMPLETIONS, EXAMPLES)


def test_every_cause_has_its_counter_and_new_ones_get_theirs():
  metrics = failure_metrics(["No Memory!", None, "timeout"])
  assert {f"rewards/failed/{cause}" for cause in CAUSES} < set(metrics)
  assert metrics["rewards/failed/no_memory_"] == metrics["rewards/failed/timeout"] == 1 and metrics["rewards/failed"] == 2
