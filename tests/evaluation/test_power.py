"""The smallest difference that is likely seen, against simulated evaluations."""

import numpy as np
import pytest

from jaxrl_llm.evaluation import Spread, bootstrap_interval, problems_needed, smallest_difference, spread_of
from jaxrl_llm.evaluation.power import WIDEST


@pytest.mark.parametrize(("kept", "samples"), [(1.0, 1), (1.0, 4), (0.0, 4)])
def test_the_smallest_difference_is_seen_four_times_in_five(kept, samples):
  rng, problems = np.random.default_rng(0), 200
  rates = lambda: rng.choice([0.25, 0.65], size=problems)
  within = (0.25 * 0.75 + 0.65 * 0.35) / 2
  spread = Spread(between=0.2**2, within=within)
  gain = smallest_difference(spread, problems=problems, samples=samples, kept=kept)
  for shift, expected in ((gain, 0.8), (0.0, 0.05)):
    seen = []
    for _ in range(400):
      before = rates()
      # Half of the gain on each side, so that the spread stays.
      after = before if kept else rates()
      draw = lambda rate: rng.binomial(samples, rate) / samples
      interval = bootstrap_interval(draw(after + shift / 2) - draw(before - shift / 2), num_resamples=200)
      seen.append(not interval.low <= 0 <= interval.high)
    # Three standard errors of 400 trials, and an interval that is slightly too narrow.
    assert abs(np.mean(seen) - expected) < 0.06


def test_the_spread_is_that_of_the_samples():
  rng = np.random.default_rng(1)
  rates = rng.choice([0.25, 0.65], size=(20_000, 1))
  rewards = (rng.random((20_000, 4)) < rates).astype(float)
  rewards[::3, 1] = np.nan
  np.testing.assert_allclose(spread_of(rewards), (0.04, 0.2075), rtol=0.05)


def test_no_spread_is_taken_from_samples_that_are_alike_or_alone():
  assert spread_of(np.zeros((8, 4))) == spread_of(np.array([[1.0, np.nan], [0.0, 1.0]])) == WIDEST


def test_the_problems_needed_show_the_difference():
  spread = Spread(between=0.1, within=0.15)
  for kept in (0.0, 0.5, 1.0):
    count = problems_needed(spread, 0.05, samples=2, kept=kept)
    reach = lambda problems, kept=kept: smallest_difference(spread, problems=problems, samples=2, kept=kept)
    assert reach(count) <= 0.05 < reach(count - 1)
  # z(0.975) + z(0.8) = 1.960 + 0.842.
  np.testing.assert_allclose(smallest_difference(Spread(0.0, 0.5), problems=100, samples=1), 0.2802, atol=1e-4)
