"""The coverage of the bootstrap interval, and its independence of chunks."""

import numpy as np
import pytest

from jaxrl_llm.evaluation import bootstrap_interval, intervals


def test_it_covers_the_truth_as_often_as_it_says():
  """The difficulties differ widely, so that an interval over independent samples is too narrow."""
  rng = np.random.default_rng(1)
  covered, widths = [], []
  for _ in range(300):
    difficulty = rng.choice([0.05, 0.95], size=(40, 1))  # 0.5 on average.
    interval = bootstrap_interval((rng.random((40, 8)) < difficulty).mean(axis=1), num_resamples=200)
    assert interval.low <= interval.mean <= interval.high
    covered.append(interval.low <= 0.5 <= interval.high)
    widths.append(interval.high - interval.low)
  assert 0.89 < np.mean(covered) < 0.99
  # The standard deviation of a mean over 40 problems, most of them all right or all wrong.
  np.testing.assert_allclose(np.mean(widths), 2 * 1.96 * np.sqrt((0.45**2 + 0.0475 / 8) / 40), rtol=0.1)


def test_it_is_the_normal_one_for_many_problems(rng):
  values = rng.random(2000)
  interval = bootstrap_interval(values, confidence=0.9, num_resamples=4000)
  half = 1.6449 * values.std() / 2000**0.5
  np.testing.assert_allclose([interval.low, interval.high], [values.mean() - half, values.mean() + half], atol=5e-4)


def test_the_interval_depends_on_the_seed_and_not_on_the_chunk(rng, monkeypatch):
  values = rng.random(20)
  whole = bootstrap_interval(values)
  assert whole == bootstrap_interval(values) != bootstrap_interval(values, seed=1)
  monkeypatch.setattr(intervals, "_MAX_DRAWS", 60)
  assert bootstrap_interval(values) == whole


def test_unknown_values_are_left_out():
  assert bootstrap_interval(np.array([1.0, np.nan, 1.0])) == (1, 1, 1)
  with pytest.raises(ValueError, match="bootstrap: found 2 problems and none of known reward"):
    bootstrap_interval(np.full(2, np.nan))
  for confidence in (0, 1, 95):
    with pytest.raises(ValueError, match="confidence: found .*expected a number between 0 and 1"):
      bootstrap_interval(np.ones(2), confidence=confidence)
