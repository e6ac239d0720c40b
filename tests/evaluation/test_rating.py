"""Ratings against a grid search, and intervals for contestants of known strength."""

from math import inf

import numpy as np
import pytest

from jaxrl_llm.evaluation import estimate_rating, solve_probability


def test_elos_expectation():
  np.testing.assert_allclose(solve_probability(1500, np.array([1500, 1100, 1900, 1e9, -1e9])), [0.5, 10 / 11, 1 / 11, 0, 1], atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_estimate_is_the_likeliest_of_all_ratings(seed):
  rng = np.random.default_rng(seed)
  ratings = rng.integers(8, 35, 40) * 100.0
  solved = (rng.random(40) < solve_probability(1700, ratings)).astype(float)
  grid = np.arange(0, 4000, 0.5)
  chances = np.array([[1 / (1 + 10 ** ((d - r) / 400)) for d in ratings] for r in grid])
  likelihood = np.where(solved == 1, np.log(chances), np.log1p(-chances)).sum(axis=1)
  estimate = estimate_rating(ratings, solved)
  assert abs(estimate.rating - grid[likelihood.argmax()]) <= 0.5
  inside = grid[likelihood > likelihood.max() - 1.9207]
  np.testing.assert_allclose([estimate.low, estimate.high], [inside[0], inside[-1]], atol=1)
  np.testing.assert_allclose(solve_probability(estimate.rating, ratings).sum(), solved.sum(), rtol=1e-9)


def test_the_interval_holds_the_truth_as_often_as_it_says():
  rng, ratings = np.random.default_rng(0), np.arange(800, 3000, 50.0)
  intervals = [
    estimate_rating(ratings, (rng.random(44) < solve_probability(1600, ratings)).astype(float)) for _ in range(80)
  ]
  assert 0.88 < np.mean([interval.low <= 1600 <= interval.high for interval in intervals]) <= 1
  assert abs(np.mean([interval.rating for interval in intervals]) - 1600) < 30


def test_all_or_nothing_bounds_one_side_only():
  ratings = np.array([1000.0, 2000.0])
  everything, nothing = estimate_rating(ratings, np.ones(2)), estimate_rating(ratings, np.zeros(2))
  assert everything.rating == everything.high == inf and nothing.rating == nothing.low == -inf
  np.testing.assert_allclose(np.log(solve_probability(everything.low, ratings)).sum(), -1.9207, rtol=1e-6)
  np.testing.assert_allclose(np.log1p(-solve_probability(nothing.high, ratings)).sum(), -1.9207, rtol=1e-6)


def test_fractions_of_samples():
  ratings = np.array([1000.0, 1400.0, 2200.0])
  estimate = estimate_rating(ratings, np.array([1.0, 0.5, 0.0]))
  np.testing.assert_allclose(solve_probability(estimate.rating, ratings).sum(), 1.5, rtol=1e-9)
  assert estimate_rating(ratings, np.array([0.5, 0.5, 0.5])).rating < estimate_rating(ratings, np.array([0.6, 0.5, 0.5])).rating


@pytest.mark.parametrize("ratings, solved, message", [
  ([], [], "found 0 problem ratings and 0 results"),
  ([np.nan], [1.0], "not finite"), ([1.0], [2.0], "outside 0 to 1"), ([1.0], [np.nan], "outside 0 to 1"),
])  # fmt: skip
def test_bad_input(ratings, solved, message):
  with pytest.raises(ValueError, match=f"rating: .*{message}"):
    estimate_rating(np.array(ratings, float), np.array(solved, float))
