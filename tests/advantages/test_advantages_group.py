"""Advantages within groups: closed forms, invariances, brute force, and groups without signal."""

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages import (
  batch_scaled_advantages,
  group_advantages,
  gtpo_advantages,
  leave_one_out_advantages,
  maxrl_advantages,
  opo_advantages,
  pass_at_k_advantages,
  per_reward_advantages,
)
from tests.advantages import reference

ESTIMATORS = {
  "group": group_advantages,
  "group_centred": lambda rewards, group_size: group_advantages(rewards, group_size, normalize_std=False),
  "leave_one_out": leave_one_out_advantages,
  "batch_scaled": batch_scaled_advantages,
  "pass_at_1": lambda rewards, group_size: pass_at_k_advantages(rewards, group_size, k=1),
  "pass_at_2": lambda rewards, group_size: pass_at_k_advantages(rewards, group_size, k=2, eps=0.0),
  "pass_at_2_centred": lambda rewards, group_size: pass_at_k_advantages(rewards, group_size, k=2, normalize_std=False),
  "per_reward": lambda rewards, group_size: per_reward_advantages([rewards, 2 * rewards], [1.0, 0.3], group_size),
}
# A shift of all rewards changes the advantages of MaxRL, and those of OPO sum to 0 over tokens.
ALL = ESTIMATORS | {
  "maxrl": maxrl_advantages,
  "opo": lambda rewards, group_size: opo_advantages(rewards, 1 + np.arange(len(rewards)) % 4, group_size),
}
JITTED = {name: jax.jit(estimate, static_argnums=1) for name, estimate in ALL.items()}


def rewards_of(draw, group_size, num_groups=2):
  """Rewards on a grid, so that ties are common."""
  return np.array(draw(st.lists(st.integers(-8, 8), min_size=num_groups * group_size, max_size=num_groups * group_size))) / 4


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


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1 / 3, 1e6])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("group_size", [1, 3, 8])
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
    (7, 2, {"valid": np.ones(7, bool)}, r"^rewards: found shape \(7,\), expected \[N\] with N a multiple of group_size = 2"),
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


@hypothesis.given(st.data(), st.sampled_from([2, 5]), st.sampled_from(sorted(ESTIMATORS)))
def test_invariances_of_every_estimator(data, group_size, name):
  """Advantages sum to zero, ignore a shift of all rewards, and permute with the samples.

  Equal rewards have equal advantages.
  """
  rewards = rewards_of(data.draw, group_size)
  with jax.enable_x64(True):
    estimate = lambda x: np.asarray(JITTED[name](jnp.asarray(x), group_size))
    a = estimate(rewards)
    np.testing.assert_allclose(a.reshape(2, group_size).sum(1), 0, atol=1e-12 * (1 + np.abs(a).max()))
    np.testing.assert_allclose(estimate(rewards + 0.3), a, rtol=1e-10, atol=1e-10)
    order = np.array(data.draw(st.permutations(range(group_size))))
    order = np.concatenate([order, order + group_size])
    np.testing.assert_allclose(estimate(rewards[order]), a[order], rtol=1e-10, atol=1e-12)
    for group, advantages in zip(rewards.reshape(2, -1), a.reshape(2, -1)):
      for reward in set(group):
        assert len(set(advantages[group == reward])) == 1
      if len(set(group)) == 1:
        assert np.all(advantages == 0)


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("group_size", [3, 7])
def test_equal_rewards_give_no_advantage_in_any_estimator(name, group_size):
  rewards = np.concatenate([np.full(group_size, 0.1), np.arange(group_size), np.full(group_size, 1e6 / 3)]).astype(np.float32)
  a = np.asarray(JITTED[name](rewards, group_size)).reshape(3, group_size)
  assert np.all(a[[0, 2]] == 0) and np.any(a[1] != 0) and a.dtype == np.float32


@pytest.mark.parametrize("name", sorted(ALL))
def test_in_every_estimator_a_nan_stays_in_its_group_or_reaches_the_statistics_of_the_batch(name):
  rewards = np.array([1, 0, 0.5, np.nan, 1, 2, 0, 1, 1], np.float32)
  a = np.asarray(JITTED[name](rewards, 3)).reshape(3, 3)
  assert np.all(np.isnan(a[1])) and np.all(np.isnan(a[[0, 2]]) == (name in ("per_reward", "batch_scaled")))


@hypothesis.given(st.data(), st.sampled_from([2, 5]))
def test_length_weighted_advantages_sum_to_zero_over_tokens_and_permute_with_the_samples(data, group_size):
  rewards = rewards_of(data.draw, group_size)
  lengths = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(rewards), max_size=len(rewards))))
  order = np.concatenate([data.draw(st.permutations(range(group_size))), group_size + np.arange(group_size)])
  with jax.enable_x64(True):
    a = np.asarray(opo_advantages(rewards, lengths, group_size))
    np.testing.assert_allclose(np.sum((a * lengths).reshape(2, -1), axis=1), 0, atol=1e-12)
    np.testing.assert_allclose(opo_advantages(rewards[order], lengths[order], group_size), a[order], rtol=1e-10, atol=1e-12)
    # Of equal lengths, they are the centred rewards.
    np.testing.assert_allclose(opo_advantages(rewards, np.full(len(rewards), 3), group_size), JITTED["group_centred"](rewards, group_size))


@pytest.mark.parametrize(("estimate", "factor"), [(JITTED["leave_one_out"], 1), (JITTED["group_centred"], 2 / 3)])
@pytest.mark.parametrize("baseline", [0.0, 7.0])
def test_expected_gradient_by_enumeration(x64, estimate, factor, baseline):
  """Over all groups of three of a bandit, the mean of Σ A∇log π / G is ∇E[R].

  It has a factor (G − 1)/G if the baseline includes the sample.
  """
  logits, rewards = jnp.array([0.3, -0.7, 1.1]), np.array([1.0, -0.5, 2.0])
  policy = np.asarray(jax.nn.softmax(logits))
  true = jax.grad(lambda x: jax.nn.softmax(x) @ rewards)(logits)
  score = np.eye(3) - policy
  total = 0.0
  for group in itertools.product(range(3), repeat=3):
    advantages = np.asarray(estimate(rewards[list(group)] + baseline, 3))
    total += np.prod(policy[list(group)]) * np.mean([a * score[i] for a, i in zip(advantages, group)], axis=0)
  np.testing.assert_allclose(total, factor * true, rtol=1e-10)


@pytest.mark.parametrize("rewards", [[1, -0.99, 0, 0], [1, -1, 0, 0], [1, 0, -0.6, -0.6], [0.01, 0, 0, -5], [-1, -2, -3, -4]])
def test_maxrl_is_bounded_and_a_right_answer_beside_penalties_teaches(rewards):
  a = np.asarray(maxrl_advantages(np.float32(rewards), 4))
  assert np.all(np.abs(a) <= 3) and np.any(a) == (max(rewards) > 0)


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_the_expected_gradient_of_maxrl_is_that_of_the_truncated_likelihood(x64, group_size):
  """Over all groups of a bandit with one right arm, it is ∇ −Σ_k (1 − p)^k / k with k from 1 to G.

  Groups without a right answer have no baseline, which is the rest of the difference.
  """
  logits = jnp.array([0.3, -0.7, 1.1])
  policy, right = np.asarray(jax.nn.softmax(logits)), np.array([0.0, 1.0, 0.0])
  truncated = lambda x: -sum((1 - jax.nn.softmax(x)[1]) ** k / k for k in range(1, group_size + 1))
  score, total = np.eye(3) - policy, 0.0
  for group in itertools.product(range(3), repeat=group_size):
    advantages = np.asarray(maxrl_advantages(right[list(group)], group_size))
    total += np.prod(policy[list(group)]) * np.mean([a * score[i] for a, i in zip(advantages, group)], axis=0)
  wrong_only = [np.prod(policy[list(g)]) * np.mean([score[i] for i in g], axis=0) for g in itertools.product((0, 2), repeat=group_size)]
  expected = np.asarray(jax.grad(truncated)(logits)) + sum(wrong_only)
  np.testing.assert_allclose(total, expected, rtol=1e-10, atol=1e-14)


def test_a_group_with_too_few_rewards_is_left_out():
  rewards, valid = np.float32([3, 1, 2, 0, 4, 9]), np.array([True] * 4 + [False, True])
  np.testing.assert_allclose(leave_one_out_advantages(rewards, 3, valid=valid, min_valid=3), [1.5, -1.5, 0, 0, 0, 0], atol=1e-6)
  np.testing.assert_allclose(leave_one_out_advantages(rewards, 3, valid=valid, min_valid=2), [1.5, -1.5, 0, -9, 0, 9], atol=1e-6)
  with pytest.raises(ValueError, match="^min_valid: found 4, expected a whole number from 2 to 3"):
    leave_one_out_advantages(rewards, 3, valid=valid, min_valid=4)


@pytest.mark.parametrize("group_size", [1, 2, 7])
def test_pass_at_k_matches_all_subsets(x64, group_size):
  rng = np.random.default_rng(5)
  # Rewards without ties, and with.
  rewards = np.concatenate([rng.standard_normal(group_size), rng.integers(0, 3, group_size) / 2])
  batch = {"rewards": rewards.tolist(), "mask": [[1]] * (2 * group_size)}
  for k in range(1, group_size + 1):
    for normalize_std in (True, False):
      expected = reference.pass_at_k({"pass_k": k, "normalize_std": normalize_std}, batch, group_size)
      actual = pass_at_k_advantages(rewards, group_size, k=k, normalize_std=normalize_std)
      np.testing.assert_allclose(actual, list(expected.values()), rtol=1e-10, atol=1e-13)
      assert k < group_size or np.all(actual == 0)


@pytest.mark.parametrize(("num_wrong", "k"), [(1, 1), (3, 2), (6, 4), (7, 2), (12, 12), (15, 8)])
def test_pass_at_k_has_the_paper_s_closed_form(x64, num_wrong, k):
  n = 16
  rewards = np.array([0.0] * num_wrong + [1.0] * (n - num_wrong))
  mean = 1 - math.comb(num_wrong, k) / math.comb(n, k)
  std = math.sqrt(mean * (1 - mean))
  actual = pass_at_k_advantages(rewards, n, k=k, eps=0.0)
  if std == 0:  # Without a subset that lacks a right answer there is nothing to learn.
    assert np.all(actual == 0)
    return
  np.testing.assert_allclose(actual[-1], (1 - mean) / std, rtol=1e-10)
  np.testing.assert_allclose(
    actual[0], (1 - mean - math.comb(num_wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / std, rtol=1e-10
  )


def test_pass_at_1_is_the_group_advantage(x64):
  rewards = np.random.default_rng(6).standard_normal(24)
  np.testing.assert_allclose(pass_at_k_advantages(rewards, 8, k=1), group_advantages(rewards, 8, unbiased=False), rtol=1e-10)


def test_pass_at_k_of_large_groups():
  rewards = np.random.default_rng(7).standard_normal(2048).astype(np.float32)
  # C(1024, 512) exceeds every float.
  a = np.asarray(pass_at_k_advantages(rewards, 1024, k=512))
  assert np.all(np.isfinite(a)) and np.all(a.reshape(2, -1).argmax(1) == rewards.reshape(2, -1).argmax(1))


def test_a_large_reward_does_not_drown_a_small_one(x64):
  parts = np.array([[1, 0, 1, 0], [0, 500, 500, 0]], float)
  a = per_reward_advantages(parts, [1.0, 1.0], 2, eps=0.0)
  np.testing.assert_allclose(a, per_reward_advantages(parts * [[1], [1e-3]], [1.0, 1.0], 2, eps=0.0), rtol=1e-12)
  assert a[0] == 0 and a[2] > 0
  # A weight is no part of the reward that is normalised.
  weighed = np.asarray(per_reward_advantages(parts, [1.0, 0.1], 2, eps=0.0))
  np.testing.assert_allclose(weighed[[0, 2]] / weighed[2], [0.9 / 1.1, 1], rtol=1e-12)


def test_a_single_sample_has_no_per_reward_advantage():
  assert np.all(per_reward_advantages(np.ones((2, 1), np.float32), [1.0, 1.0], 1) == 0)


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda x: leave_one_out_advantages(x, 1), "^group_size: found 1, expected a whole number >= 2, because a group of one has no others$"),
    (lambda x: leave_one_out_advantages(x, 5), r"^rewards: found shape \(8,\), expected \[N\] with N a multiple of group_size = 5$"),
    (lambda x: pass_at_k_advantages(x, 4, k=5), "^k: found 5, expected a whole number from 1 to 4$"),
    (lambda x: pass_at_k_advantages(x, 4, k=0), "^k: found 0"),
    (lambda x: pass_at_k_advantages(x, 4, k=2, eps=-1.0), "^eps: found -1.0"),
    (lambda x: pass_at_k_advantages(x.reshape(2, 4), 4, k=2), r"^rewards: found shape \(2, 4\), expected \[N\] with"),
    (lambda x: group_advantages(x.astype(complex), 4), "^rewards: found complex64, expected real numbers$"),
    (lambda x: gtpo_advantages(x, np.ones((8, 2)), np.ones((8, 2)), 3), r"^rewards: found shape \(8,\), expected \[N\] with N a multiple"),
    (lambda x: per_reward_advantages(x, [1.0], 4), r"^parts: found shape \(8,\), expected \[K, N\]$"),
    (lambda x: per_reward_advantages([x, x], [1.0], 4), r"^weights: found shape \(1,\), expected \[K\] = \(2,\)"),
    (lambda x: per_reward_advantages([x, x], [1.0, 1.0], 3), r"^parts: found shape \(2, 8\), expected \[K, N\] with N a multiple"),
  ],
)
def test_refusals_of_the_other_estimators(call, message):
  with pytest.raises(ValueError, match=message) as error:
    call(np.arange(8, dtype=np.float32))
  assert "\n" not in str(error.value)


WITH_VALID = {
  "group": group_advantages,
  "group_centred": lambda rewards, group_size, **kwargs: group_advantages(rewards, group_size, normalize_std=False, **kwargs),
  "leave_one_out": leave_one_out_advantages,
  "maxrl": lambda rewards, group_size, **kwargs: maxrl_advantages(rewards + 1, group_size, **kwargs),
  "batch_scaled": batch_scaled_advantages,
  "per_reward": lambda rewards, group_size, **kwargs: per_reward_advantages([rewards, rewards**2], [1.0, 0.3], group_size, **kwargs),
}


@pytest.mark.parametrize("name", WITH_VALID)
def test_a_sample_without_a_reward_is_as_if_it_had_not_been_drawn(x64, name):
  """Two of five in each group have no reward; the others have a group of three's advantages."""
  rng, estimate = np.random.default_rng(1), WITH_VALID[name]
  rewards, valid = rng.standard_normal((4, 5)), np.array([rng.permutation([True, True, True, False, False]) for _ in range(4)])
  shown = np.where(valid, rewards, np.nan)  # Their values are never read.
  advantages = np.asarray(estimate(shown.reshape(-1), 5, valid=valid.reshape(-1)))
  np.testing.assert_allclose(advantages[valid.reshape(-1)], estimate(rewards[valid], 3), rtol=1e-12)
  np.testing.assert_array_equal(advantages[~valid.reshape(-1)], 0)
  np.testing.assert_allclose(estimate(rewards.reshape(-1), 5, valid=np.ones(20, bool)), estimate(rewards.reshape(-1), 5), rtol=1e-12)


@pytest.mark.parametrize("name", WITH_VALID)
@pytest.mark.parametrize("count", [0, 1])
def test_one_valid_sample_or_none_gives_no_signal(name, count):
  valid = np.arange(4) < count
  advantages = WITH_VALID[name](jnp.array([0.3, 2.0, np.inf, 0.1]), 4, valid=valid)
  assert advantages.tolist() == [0.0] * 4
