"""Estimators of advantages: every entry of the table, its settings and its needs."""

import inspect

import jax
import numpy as np
import pytest

from jaxrl_llm import advantages as adv
from jaxrl_llm.advantages.estimators import ESTIMATORS, Evidence, make_credit

G = 3


@pytest.fixture
def evidence(rng) -> Evidence:
  """Two groups of three, up to five tokens."""
  mask = (np.arange(5) < np.array([5, 3, 1, 4, 2, 5])[:, None]).astype(np.float32)
  parts = rng.normal(size=(2, 6)).astype(np.float32)
  draw = lambda: rng.normal(size=mask.shape).astype(np.float32)
  ends = (mask > 0) & (rng.random(mask.shape) < 0.6)
  optional = dict(values=draw(), step_rewards=draw(), step_ends=ends, old_entropy=np.abs(draw()))
  return Evidence(parts.sum(0), parts, mask, kl=np.abs(draw()), kl_coef=np.float32(0.3), **optional)


def bare(evidence: Evidence, name: str) -> Evidence:
  """Keeps the evidence that the estimator reads, without a divergence in the reward."""
  keep = {"rewards", "parts", "mask"} | ESTIMATORS[name].needs
  # The smallest number of rewards of a group matters only if one is missing.
  valid = np.array([True] * 5 + [False]) if "min_valid" in ESTIMATORS[name].defaults else None
  return Evidence(**{field: getattr(evidence, field) for field in keep}, valid=valid)


SETTINGS = {
  "group": {"normalize_std": False},
  "leave_one_out": {},
  "rloo_n": {"min_valid": 2},
  "maxrl": {},
  "batch_scaled": {},
  "pass_at_k": {"pass_k": 3, "normalize_std": False},
  "per_reward": {"normalize_std": False},
  "steps": {"normalize_std": False},
  "gtpo": {"entropy_share": 0.7, "right_above": -0.3},
  "rae": {"num_roles": 3, "decay": 0.5, "zero_sum": False},
  "returns": {"gamma": 0.5},
  "gae": {"gamma": 0.5, "lam": 0.3, "critic_lam": 0.2, "length_alpha": 0.4},
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_reads_its_declared_needs_and_every_setting_has_an_effect(name, evidence):
  credit = make_credit(name, G)(bare(evidence, name))
  assert credit.advantages.shape == evidence.mask.shape and not np.any(
    np.asarray(credit.advantages)[evidence.mask == 0]
  )
  assert np.all(np.isfinite(credit.advantages)) and np.ptp(credit.advantages) > 0
  assert (credit.returns is not None) == (name == "gae")
  assert set(SETTINGS[name]) == set(ESTIMATORS[name].defaults)
  for setting, value in SETTINGS[name].items():
    other = make_credit(name, G, **{setting: value})(bare(evidence, name))
    same = [np.allclose(a, b) for a, b in zip(jax.tree.leaves(credit[:2]), jax.tree.leaves(other[:2]), strict=True)]
    assert not all(same), setting


def test_a_group_advantage_holds_for_all_tokens(evidence):
  advantages = make_credit("group", G)(bare(evidence, "group")).advantages
  expected = adv.group_advantages(evidence.rewards, G)
  np.testing.assert_allclose(advantages, np.asarray(expected)[:, None] * evidence.mask, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name, estimator in ESTIMATORS.items() if estimator.takes_kl])
def test_a_divergence_in_the_reward_is_subtracted(name, evidence):
  # Without division by a deviation, because the best of two of three rewards has only one shape.
  settings = {"normalize_std": False} if "normalize_std" in ESTIMATORS[name].defaults else {}
  credit = make_credit(name, G, **settings)
  advantages = credit(bare(evidence, name)._replace(kl=evidence.kl, kl_coef=evidence.kl_coef)).advantages
  if name in ("returns", "gae"):
    rewards = adv.token_rewards(evidence.rewards, evidence.mask, evidence.kl, evidence.kl_coef)
    expected = adv.returns_to_go(rewards, evidence.mask)
    expected = expected if name == "returns" else (np.asarray(expected) - evidence.values) * evidence.mask
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)
  else:
    shaped = evidence.rewards - evidence.kl_coef * (evidence.kl * evidence.mask).sum(1)
    np.testing.assert_allclose(advantages, credit(bare(evidence, name)._replace(rewards=shaped)).advantages, rtol=1e-5)
  assert not np.allclose(advantages, credit(bare(evidence, name)).advantages)


def test_estimators_that_cannot_take_a_divergence_do_not_read_it(evidence):
  for estimator in ESTIMATORS.values():
    if not estimator.takes_kl:
      assert "_penalised" not in (source := inspect.getsource(estimator.estimate)) and "_per_token" not in source


def test_gtpo_matches_a_loop(x64, rng):
  rewards, entropy = np.array([1.0, 1, 0, 0, 0, 1, 1, 1]), rng.uniform(0.1, 2, (8, 4))
  mask = (np.arange(4) < np.array([4, 2, 3, 4, 1, 4, 2, 3])[:, None]).astype(float)
  mask[3, 1] = 0
  shaped = np.zeros((8, 4))
  for i, t in np.argwhere(mask):
    same = [k for k in range(i // 4 * 4, i // 4 * 4 + 4) if mask[k, t] and rewards[k] == rewards[i]]
    sign, power = (1, 1) if rewards[i] else (-1, -1)
    shaped[i, t] = sign * (1 + 0.3 * len(same) * entropy[i, t] ** power / sum(entropy[k, t] ** power for k in same))
  expected = np.zeros((8, 4))
  for sign in (1, -1):
    where = shaped * sign > 0
    expected[where] = (shaped[where] - shaped[where].mean()) / np.sqrt(shaped[where].var(ddof=1) + 1e-8)
  actual = adv.gtpo_advantages(rewards, entropy, mask, 4, entropy_share=0.3)
  np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-13)
  spoilt = np.where(mask > 0, entropy, np.nan)  # Values outside the mask are not read.
  np.testing.assert_array_equal(adv.gtpo_advantages(rewards, spoilt, mask, 4, entropy_share=0.3), actual)
  certain = np.asarray(adv.gtpo_advantages(rewards, np.zeros((8, 4)), mask, 4))
  assert np.all(np.isfinite(certain))
  with pytest.raises(ValueError, match=r"^rewards: found shape \(8,\), expected \[N\] with N a multiple of group_size = 3"):
    adv.gtpo_advantages(rewards, entropy, mask, 3)


@pytest.mark.parametrize(("num_roles", "zero_sum"), [(1, True), (2, True), (3, True), (2, False)])
def test_rae_matches_a_loop_over_games(num_roles, zero_sum, x64, rng):
  mask = (np.arange(7) < np.array([7, 4, 0, 1, 6])[:, None]).astype(float)
  ends = (rng.random((5, 7)) < 0.5) & (mask > 0)
  ends[0, :2], ends[3, 0] = True, True
  rewards, first = np.where(ends, rng.normal(size=(5, 7)), np.nan), rng.normal(size=num_roles)
  expected, baselines = np.zeros((5, 7)), first.copy()
  for i in range(5):
    role, own, of_token = 0, np.zeros(num_roles), {}
    for t in np.flatnonzero(mask[i]):
      of_token[t] = role % num_roles
      if ends[i, t]:
        own[role % num_roles] += rewards[i, t]
        role += 1
    for p in set(of_token.values()):
      others = sum(own[q] for q in range(num_roles) if q != p) / max(num_roles - 1, 1)
      reward = own[p] - (others if zero_sum else 0)
      baselines[p] = 0.9 * baselines[p] + 0.1 * reward
      for t in (t for t in of_token if of_token[t] == p):
        expected[i, t] = reward - baselines[p]
  actual, after = adv.role_advantages(rewards, ends, mask, first, decay=0.9, zero_sum=zero_sum)
  np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-13)
  np.testing.assert_allclose(after, baselines, rtol=1e-10)


def test_rae_carries_its_baselines_from_batch_to_batch(evidence):
  credit = make_credit("rae", G)
  first = credit(bare(evidence, "rae"))
  second = credit(bare(evidence, "rae")._replace(role_baselines=first.role_baselines))
  assert not np.allclose(first.role_baselines, second.role_baselines) and not np.allclose(first.advantages, second.advantages)
  assert first.metrics == {f"critic/baseline/role_{role}": x for role, x in enumerate(first.role_baselines)}
  assert make_credit("group", G)(bare(evidence, "group")).role_baselines is None
  with pytest.raises(ValueError, match=r"^decay: found 1.5, expected a number from 0 to 1"):
    adv.role_advantages(evidence.step_rewards, evidence.step_ends, evidence.mask, np.zeros(2, np.float32), decay=1.5)
  with pytest.raises(ValueError, match=r"^step_ends: found float32, expected bool"):
    adv.role_advantages(evidence.step_rewards, evidence.mask, evidence.mask, np.zeros(2, np.float32))


def test_gae_by_hand():
  """One response of two tokens, reward 1, values 0.5 and 0.25; γ = 1."""
  evidence = Evidence(np.float32([1.0]), np.ones((1, 1), np.float32), np.float32([[1, 1, 0]]), values=np.float32([[0.5, 0.25, 7]]))
  credit = make_credit("gae", 1, lam=0.5, critic_lam=1.0)(evidence)
  np.testing.assert_allclose(credit.advantages, [[-0.25 + 0.5 * 0.75, 0.75, 0]], rtol=1e-6)
  np.testing.assert_allclose(np.asarray(credit.returns)[0, :2], [1, 1], rtol=1e-6)
  assert credit.metrics.keys() == {"critic/vf_explained_var"}


def test_the_explained_variance_is_that_of_the_targets(rng):
  values = rng.normal(size=(4, 3)).astype(np.float32)
  mask, rewards = np.ones((4, 3), np.float32), rng.normal(size=4).astype(np.float32)
  credit = make_credit("gae", 2)(Evidence(rewards, rewards[None], mask, values=values))
  targets = np.repeat(rewards[:, None], 3, axis=1)  # γ = λ = 1: the return itself, at every token.
  np.testing.assert_allclose(
    credit.metrics["critic/vf_explained_var"], 1 - np.var(targets - values) / np.var(targets), rtol=1e-4
  )


def test_the_length_adaptive_lambda_replaces_lam(evidence):
  advantages = make_credit("gae", G, length_alpha=0.4)(bare(evidence, "gae")).advantages
  lam = adv.length_adaptive_lambda(evidence.mask, alpha=0.4)
  rewards = adv.token_rewards(evidence.rewards, evidence.mask)
  np.testing.assert_allclose(
    advantages, adv.generalized_advantages(rewards, evidence.values, evidence.mask, lam=lam), rtol=1e-5, atol=1e-6
  )


def test_whitening_leaves_the_targets_alone(evidence):
  plain, white = (make_credit("gae", G, whiten=whiten)(bare(evidence, "gae")) for whiten in (False, True))
  counted = evidence.mask > 0
  inside = np.asarray(white.advantages)[counted]
  np.testing.assert_allclose([inside.mean(), inside.std(ddof=1)], [0, 1], atol=1e-5)
  np.testing.assert_array_equal(white.returns, plain.returns)
