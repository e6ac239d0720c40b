"""Beliefs in pass rates: the order of prompts, forgetting, and prompts that are not tried."""

import numpy as np
import pytest

from jaxrl_llm.advantages import spo_advantages


def test_the_order_of_prompts_changes_nothing(x64, rng):
  rewards, beliefs, drift = rng.random(6), 0.5 + rng.random((6, 2)), 0.01 * rng.random(6)
  advantages, after = spo_advantages(rewards, beliefs, drift, 1)
  order = rng.permutation(6)
  other = spo_advantages(rewards[order], beliefs[order], drift[order], 1)
  np.testing.assert_allclose(other[0], advantages[order], rtol=1e-10)
  np.testing.assert_array_equal(other[1], after[order])


def test_a_belief_follows_the_pass_rate_and_is_kept_by_a_prompt_without_a_reward(x64):
  belief, outcomes = np.array([[0.5, 0.5]]), np.random.default_rng(0).random(400) < 0.7
  for outcome in outcomes.astype(float):
    _, belief = spo_advantages(np.array([outcome]), belief, np.zeros(1), 1)
  alpha, beta = belief[0]
  np.testing.assert_allclose(alpha + beta, 1 / (1 - 0.96), rtol=1e-3)  # Of about 25 responses.
  assert abs(alpha / (alpha + beta) - 0.7) < 0.25
  # A policy that has moved far keeps less.
  far = spo_advantages(np.ones(1), belief, np.full(1, 1e9), 1)[1]
  np.testing.assert_allclose(far, [[0.875 * alpha + 1, 0.875 * beta]])
  np.testing.assert_array_equal(spo_advantages(np.full(1, np.nan), belief, np.ones(1), 1, valid=np.zeros(1, bool))[1], belief)


@pytest.mark.parametrize("settings", [{"half_drift": 0.0}, {"memory_low": 0.0}, {"memory_low": 0.99}, {"memory_high": 1.1}])
def test_settings_out_of_order_are_refused(settings):
  with pytest.raises(ValueError, match="^spo: found half_drift="):
    spo_advantages(np.ones(2), np.ones((2, 2)), np.zeros(2), 1, **settings)


def test_shapes_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match=r"^beliefs: found shape \(1, 2\), expected \(2, 2\)"):
    spo_advantages(np.ones(2), np.ones((1, 2)), np.zeros(2), 1)
