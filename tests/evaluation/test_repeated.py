"""avg@n, pass@k and maj@n against brute force over all choices, from their definitions."""

import itertools
from fractions import Fraction
from math import comb

import numpy as np
import pytest

from jaxrl_llm.evaluation import avg_at_n, by_level, maj_at_n, pass_at_k


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(k, rng):
  correct = (rng.random((20, 6)) < rng.random((20, 1))).astype(float)
  expected = [np.mean([max(choice) for choice in itertools.combinations(row, k)]) for row in correct.tolist()]
  np.testing.assert_allclose(pass_at_k(correct, k), expected, rtol=1e-13)


@pytest.mark.parametrize("samples, k", [(1, 1), (7, 3), (64, 16), (1000, 1), (1000, 100), (1000, 999), (1000, 1000)])
def test_pass_at_k_is_the_ratio_of_binomials_at_any_size(samples, k):
  """The binomials of a thousand samples overflow float64, so that the test uses integers."""
  rights = sorted({0, 1, 2, samples // 2, samples - k, samples - k + 1, samples - 1, samples} & set(range(samples + 1)))
  correct = np.array([[1.0] * c + [0.0] * (samples - c) for c in rights])
  estimates = pass_at_k(correct, k)
  np.testing.assert_allclose(
    estimates, [float(1 - Fraction(comb(samples - c, k), comb(samples, k))) for c in rights], rtol=1e-12
  )
  # These are exact.
  assert (estimates[np.array(rights) == 0] == 0).all() and (estimates[np.array(rights) > samples - k] == 1).all()


def test_pass_at_one_is_avg_at_n(rng):
  correct = (rng.random((9, 8)) < 0.5).astype(float)
  np.testing.assert_allclose(pass_at_k(correct, 1, 5), avg_at_n(correct, 5), rtol=1e-13)
  np.testing.assert_allclose(avg_at_n(correct, 5), correct[:, :5].mean(axis=1))


def vote(answers, correct):
  """Returns the expected reward of the majority, with all ways to break a tie equally likely."""
  classes = sorted({answer for answer in answers if answer is not None})
  counts = [answers.count(answer) for answer in classes]
  winners = [answer for answer, count in zip(classes, counts, strict=True) if count == max(counts)]
  return sum(correct[answers.index(winner)] for winner in winners) / len(winners) if winners else 0.0


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_maj_at_n_is_an_independent_vote(n, rng):
  answers = rng.choice(["1", "2", "3", "4", None], size=(60, 8), p=[0.3, 0.25, 0.15, 0.1, 0.2]).tolist()
  correct = np.array([[float(answer == "1") for answer in row] for row in answers])
  estimates = maj_at_n(answers, correct, n)
  np.testing.assert_allclose(
    estimates, [vote(row[:n], scores.tolist()) for row, scores in zip(answers, correct, strict=True)], rtol=1e-13
  )
  assert n == 1 or len(set(estimates.tolist())) > 2  # There were ties.
  if n == 8:
    order = rng.permutation(8)
    shuffled = [[row[i] for i in order] for row in answers]
    np.testing.assert_allclose(maj_at_n(shuffled, correct[:, order]), estimates, rtol=1e-13)


def test_answers_with_the_same_key_are_one_answer():
  answers, correct = [["0.5", "1/2", "7", "7", "7"]], np.array([[1.0, 1.0, 0.0, 0.0, 0.0]])
  assert maj_at_n(answers, correct).tolist() == [0]
  assert maj_at_n(answers, correct, 4).tolist() == [0.0]
  assert maj_at_n(answers, correct, 4, key={"0.5": 0, "1/2": 0, "7": 1}.get).tolist() == [0.5]
  assert maj_at_n([["a", " a ", "b"]], np.array([[1.0, 1.0, 0.0]])).tolist() == [1]


def test_unknown_rewards_are_left_out():
  nan = np.nan
  correct = np.array([[1.0, nan, 0.0, nan], [nan] * 4, [1.0, 0.0, 0.0, nan]])
  np.testing.assert_allclose(avg_at_n(correct), [0.5, nan, 1 / 3])
  np.testing.assert_allclose(pass_at_k(correct, 2), [1, nan, 2 / 3])
  np.testing.assert_allclose(pass_at_k(correct, 3), [nan, nan, 1])
  np.testing.assert_array_equal(maj_at_n([["a", "b", "b", "b"]] * 3, correct), [0.5, nan, 0.0])


@pytest.mark.parametrize("call, message", [
  (lambda x: pass_at_k(x, 0), "pass@k: found k=0, expected 1 to 3"),
  (lambda x: pass_at_k(x, 4), "pass@k: found k=4, expected 1 to 3"),
  (lambda x: pass_at_k(x, 3, 2), "pass@k: found k=3, expected 1 to 2"),
  (lambda x: pass_at_k(x, 1, 4), "pass@k: found n=4, expected 1 to 3"),
  (lambda x: pass_at_k(x / 2, 1), "pass@k: found rewards that are neither 0 nor 1"),
  (lambda x: avg_at_n(x, 0), "avg@n: found n=0"),
  (lambda x: maj_at_n([["a"] * 3] * 2, x, 4), "maj@n: found n=4"),
  (lambda x: maj_at_n([["a"] * 3], x), "maj@n: found the answers of 1 problems, expected those of 2 x 3 samples"),
  (lambda x: maj_at_n([["a"] * 2] * 2, x), "maj@n: found the answers of 2 problems"),
  (lambda x: by_level(x[:, 0], [1]), "by_level: found 1 levels, expected 2"),
])  # fmt: skip
def test_metrics_that_the_samples_do_not_allow_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call(np.ones((2, 3)))


def test_levels():
  assert by_level(np.array([1.0, 0.0, np.nan, 0.5]), np.array([10, 9, 9, 10])) == {9: (0.0, 1), 10: (0.75, 2)}
  assert list(by_level(np.zeros(3), ["b", 2, "a"])) == [2, "a", "b"]
