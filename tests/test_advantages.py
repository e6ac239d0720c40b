"""Group advantages: closed forms, invariances, and the groups that teach nothing."""

import jax
import numpy as np
import pytest

from jaxrl_llm.advantages import group_advantages


def test_matches_a_loop(x64):
  rewards = np.random.default_rng(0).standard_normal(24)
  for unbiased in (True, False):
    expected = []
    for group in rewards.reshape(-1, 6):
      mean = sum(group) / 6
      std = (sum((r - mean) ** 2 for r in group) / (5 if unbiased else 6)) ** 0.5
      expected += [(r - mean) / (std + 1e-3) for r in group]
    np.testing.assert_allclose(group_advantages(rewards, 6, eps=1e-3, unbiased=unbiased), expected, rtol=1e-10)
  centred = rewards - np.repeat(rewards.reshape(-1, 6).mean(1), 6)
  np.testing.assert_allclose(group_advantages(rewards, 6, normalize_std=False), centred, rtol=1e-10, atol=1e-15)
  # The centred reward is (G − 1)/G of the leave-one-out advantage.
  others = (np.repeat(rewards.reshape(-1, 6).sum(1), 6) - rewards) / 5
  np.testing.assert_allclose(group_advantages(rewards, 6, normalize_std=False), 5 / 6 * (rewards - others), rtol=1e-10, atol=1e-14)


def test_invariances(x64):
  rewards = np.random.default_rng(1).standard_normal(16)
  settings = {"eps": 0.0, "unbiased": False}
  a = np.asarray(group_advantages(rewards, 8, **settings)).reshape(2, 8)
  np.testing.assert_allclose(a.mean(1), 0, atol=1e-14)
  np.testing.assert_allclose(a.std(1), 1, rtol=1e-12)
  np.testing.assert_allclose(group_advantages(3 * rewards + 7, 8, **settings), a.ravel(), rtol=1e-10)
  np.testing.assert_allclose(group_advantages(-2 * rewards, 8, **settings), -a.ravel(), rtol=1e-10)
  order = np.random.default_rng(2).permutation(8)
  np.testing.assert_allclose(group_advantages(rewards[:8][order], 8, **settings), a[0][order], rtol=1e-10)


@pytest.mark.parametrize("correct", [1, 3, 7])
def test_closed_form_for_right_and_wrong(x64, correct):
  rewards = np.array([1.0] * correct + [0.0] * (8 - correct))
  p = correct / 8
  a = group_advantages(rewards, 8, eps=0.0, unbiased=False)
  np.testing.assert_allclose(a[0], ((1 - p) / p) ** 0.5, rtol=1e-12)
  np.testing.assert_allclose(a[-1], -((p / (1 - p)) ** 0.5), rtol=1e-12)


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1 / 3, 1e6])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("group_size", [1, 3, 7, 8])
def test_equal_rewards_give_exact_zeros(reward, eps, group_size):
  rewards = np.full(2 * group_size, reward, np.float32)
  for normalize_std in (True, False):
    a = group_advantages(rewards, group_size, normalize_std=normalize_std, eps=eps)
    assert np.all(a == 0) and a.dtype == np.float32


def test_a_nan_stays_in_its_group():
  rewards = np.array([1, 0, np.nan, 1, np.inf, 0, 0, 1], np.float32)
  a = np.asarray(group_advantages(rewards, 2))
  np.testing.assert_array_equal(np.isnan(a), [False, False, True, True, True, True, False, False])
  assert np.isnan(group_advantages(np.array([np.nan], np.float32), 1)[0])


def test_under_jit_and_in_low_precision():
  rewards = np.array([1, 0, 0.5, 0], np.float32)
  np.testing.assert_allclose(jax.jit(lambda r: group_advantages(r, 2))(rewards), group_advantages(rewards, 2), rtol=1e-6)
  assert group_advantages(jax.numpy.asarray(rewards, jax.numpy.bfloat16), 2).dtype == np.float32


@pytest.mark.parametrize(
  ("size", "group_size", "changes", "message"),
  [
    (7, 2, {}, r"^rewards: found shape \(7,\), expected \[N\] with N a multiple of group_size = 2"),
    (8, 0, {}, "^group_size: found 0"),
    (8, True, {}, "^group_size: found True"),
    (8, 2, {"eps": -1.0}, "^eps: found -1.0"),
    (8, 2, {"eps": float("nan")}, "^eps: found nan"),
    (8, 2, {"normalize_std": False, "unbiased": False}, "^unbiased: found False"),
  ],
)
def test_refusals(size, group_size, changes, message):
  with pytest.raises(ValueError, match=message):
    group_advantages(np.ones(size, np.float32), group_size, **changes)
