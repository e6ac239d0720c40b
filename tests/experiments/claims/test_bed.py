"""The bed of `experiments/claims`: its task, its grader and its signs of instability."""

import jax
import numpy as np
import pytest

from experiments.claims import bed as beds
from experiments.claims import fibonacci, running_sums, trial
from tests.marks import few

RNG = np.random.default_rng


def test_splits_are_disjoint_and_problems_have_their_documented_form():
  for split in ("train", "test"):
    drawn = running_sums.problems(split, 200, RNG(0))
    lengths = (drawn != running_sums.DOT).sum(axis=1)
    assert drawn.shape == (200, running_sums.MOST_DIGITS)
    assert (lengths.min(), lengths.max()) == (running_sums.FEWEST_DIGITS, running_sums.MOST_DIGITS)
    for row, length in zip(drawn, lengths, strict=True):
      assert (row[length:] == running_sums.DOT).all() and (row[:length] < 10).all()
      assert running_sums.split_of(row[:length].tolist()) == split


def test_a_teacher_without_errors_is_right_and_one_that_always_errs_is_mostly_wrong():
  problems = running_sums.problems("train", 64, RNG(1))
  for error_rate, low, high in ((0.0, 1, 1), (1.0, 0, 0.3), (0.2, 0.2, 0.6)):
    responses = running_sums.workings(problems, error_rate=error_rate, rng=RNG(2))
    rewards = running_sums.graded(problems, responses, responses != running_sums.PAD, np.ones(64, bool))
    assert low <= rewards.mean() <= high


def test_a_right_response_needs_an_end_token_and_the_sum():
  problems = np.array([[3, 7, 5, 9, *[running_sums.DOT] * 4]])
  right = running_sums.workings(problems, error_rate=0.0, rng=RNG(0))
  mask = right != running_sums.PAD
  assert running_sums.graded(problems, right, mask, np.array([True])).tolist() == [1]
  assert running_sums.graded(problems, right, mask, np.array([False])).tolist() == [0], "no end"
  wrong = right.copy()
  wrong[0, 2] = 5
  assert running_sums.graded(problems, wrong, mask, np.array([True])).tolist() == [0], "wrong last digit"
  slip = right.copy()
  slip[0, 0] = 1
  assert running_sums.graded(problems, slip, mask, np.array([True])).tolist() == [1], "only the last digit counts"
  empty = np.full_like(right, running_sums.PAD)
  empty[0, 0] = running_sums.END
  assert running_sums.graded(problems, empty, empty != running_sums.PAD, np.array([True])).tolist() == [0], "an end alone"


def test_a_batch_counts_only_the_response():
  problems = running_sums.problems("train", 3, RNG(0))
  responses = running_sums.workings(problems, error_rate=0.0, rng=RNG(0))
  batch = running_sums.rectangle(running_sums.prompts_of(problems), responses, responses != running_sums.PAD)
  assert batch.mask[:, : running_sums.PROMPT_TOKENS].sum() == 0
  assert batch.mask.sum(axis=1).tolist() == (problems != running_sums.DOT).sum(axis=1).tolist(), (
    "one sum for each digit after the first, and the end"
  )
  assert (batch.segments == 0).sum() == (responses == running_sums.PAD).sum()


@pytest.mark.parametrize("tokens", [16, 64, 256])
def test_fibonacci_responses_of_any_length_are_right_as_often_as_the_teacher_errs(tokens):
  problems = fibonacci.problems("train", 2000, RNG(0), digits=(tokens, tokens))
  assert problems.shape == (2000, 2 + tokens) and np.all((problems[:, :-2] + problems[:, 1:-1]) % 10 == problems[:, 2:])
  assert {running_sums.split_of(row[:2].tolist()) for row in problems} == {"train"}
  grade = lambda rate: fibonacci.graded(problems, fibonacci.workings(problems, error_rate=rate, rng=RNG(1)), None, None).mean()
  # e^-½ of the responses have no error, and some errors cancel.
  assert grade(0.0) == 1 and 0.6 < grade(0.5 / tokens) < 0.72


def test_fibonacci_responses_have_one_length():
  with pytest.raises(ValueError, match=r"digits: found \(4, 8\), expected two equal numbers"):
    fibonacci.problems("train", 1, RNG(0), digits=(4, 8))


def test_the_last_token_alone_decides_whether_a_fibonacci_response_is_right():
  problems = fibonacci.problems("test", 1, RNG(0), digits=(6, 6))
  right = problems[:, 2:]
  assert fibonacci.graded(problems, right, None, None).tolist() == [1]
  assert fibonacci.graded(problems, np.where(np.arange(6) == 0, 0, right), None, None).tolist() == [1]
  assert fibonacci.graded(problems, (right + (np.arange(6) == 5)) % 10, None, None).tolist() == [0]


def columns(count=120, **other):
  """Returns a trial's entropy and gradient norm of each update, without a sign of instability."""
  return {"entropy": [0.7] * count, "grad_norm": [1.0] * count} | other


@pytest.mark.parametrize(
  ("rewards", "changes", "expected"),
  [
    ([0.4] * 120, {}, None),
    ([0.4] * 120, {"grad_norm": [1.0] * 100 + [None] * 20}, (101, "not finite")),
    ([0.4] * 120, {"entropy": [0.7] * 100 + [None] * 20}, (101, "not finite")),
    ([0.4] * 120, {"entropy": [0.7] * 100 + [0.03] * 20}, (101, "entropy")),
    # After update 60 the moving average takes 21 updates to halve: (29/30)^21 is 0.49.
    ([0.4] * 60 + [0.0] * 60, {}, (81, "reward")),
    ([0.4] * 90 + [0.0] * 30, {}, None),
    ([0.4] * 120, {"grad_norm": [1.0] * 100 + [11.0] * 20}, (101, "gradient")),
    ([0.4] * 120, {"grad_norm": [11.0] + [1.0] * 119}, None),
    ([0.4] * 60 + [0.0] * 60, {"grad_norm": [1.0] * 50 + [11.0] + [1.0] * 69}, (51, "gradient")),
    ([0.4] * 60 + [0.0] * 60, {"entropy": [0.7] * 100 + [0.03] * 20}, (81, "reward")),
  ],
)
def test_the_first_sign_of_instability(rewards, changes, expected):
  assert trial.first_sign(rewards, columns(**changes), per_rollout=1) == expected


def test_a_fall_of_the_reward_is_measured_in_updates_and_not_in_rollout_batches():
  assert trial.first_sign([0.4, 0.4, 0.0, 0.0], columns(), per_rollout=30) == (61, "reward")


SMALL = beds.SMOKE._replace(updates=4, evaluations=1, num_experts=4)


def test_the_control_has_as_many_active_weights_and_nothing_to_route():
  dense, experts, control = (beds.model_config(beds.Sizes(), model) for model in beds.MODELS)
  assert control.experts.num_experts == control.experts.top_k == experts.experts.top_k < experts.experts.num_experts
  assert control._replace(experts=experts.experts) == experts
  assert experts.experts.top_k * experts.experts.d_ff == dense.d_ff


@pytest.mark.exhaustive
def test_a_mixture_of_experts_replays_the_routes_of_the_old_policy():
  """Replay changes nothing at π_old.

  Under other weights, tokens visit the replayed experts and not those that the router chooses.
  """
  bed, other = beds.make_bed(SMALL, "experts"), beds.warm_params(SMALL, 1, "experts")
  arm = beds.Arm("grpo", recompute=True, model="experts", replay="R2")
  params = beds.warm_params(SMALL, 0, "experts")
  rollout = beds.draw(bed, params, running_sums.problems("train", 2, RNG(0)), jax.random.key(0), arm)
  live = rollout.batch._replace(routing=None)
  score = lambda params, batch: np.asarray(bed.score(params, batch).logprobs)
  np.testing.assert_allclose(score(params, rollout.batch), score(params, live), atol=1e-6)
  assert np.abs(score(other, rollout.batch) - score(other, live)).max() > 1e-4
  row = trial.staleness(bed, params, rollout.batch, rollout.routes)
  assert row["log_r"] < 1e-6 and abs(row["max_r"] - 1) < 1e-5 and row["change"] == 0
  assert trial.staleness(bed, other, rollout.batch, rollout.routes)["change"] > 0.1


@pytest.mark.parametrize("replay", few(["none", "R2"]))
def test_a_trial_of_a_mixture_of_experts_reports_its_staleness(replay):
  arm = beds.Arm("gspo", per_rollout=2, learning_rate=3e-2, recompute=True, model="experts", replay=replay)
  row = trial.train(SMALL, 0, arm)
  assert len(row["rewards"]) == len(row["change"]) == 2 and len(row["grad_norm"]) == 4
  if any(x > 0 for x in row["grad_norm"]):  # A tiny model may get every response wrong.
    assert max(row["log_r"]) > 0
