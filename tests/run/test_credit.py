"""Rewards of a run on their way to advantages: filters, random controls, steps and mixed groups."""

import string

import numpy as np
import pytest

from jaxrl_llm.rollouts import trajectories
from jaxrl_llm.run.steps import learn
from tests.marks import few
from tests.runs import rows, run_here, tiny_config

# Random weights end a response at about every tenth token, so that some of 24 tokens are truncated.
ONE = {
  "num_steps": 1, "warm_start.num_steps": 2, "learner.updates_per_rollout": 1, "learner.row_buckets": (16,), "objective.kl_coef": 0.0,
  "rollout.stop_strings": tuple(string.ascii_lowercase),
  "eval.every": 1, "eval.num_prompts": 8, "eval.samples": 1, "eval.metrics": (), "log.tensorboard": False, "log.num_samples": 0,
}  # fmt: skip
PPO = {"objective.kl_coef": None, "reward.overlong_buffer": 16, "critic.value_warmup_steps": 0, "advantage.whiten": True}


def learned(path, changes, monkeypatch, config="grpo"):
  """Trains for a step. Returns its metrics, and the batch with its advantages."""
  seen = []

  def learn_from(run, *args, **options):
    seen.append(learn.learn_from(run, *args, **options))
    return seen[-1]

  monkeypatch.setattr("jaxrl_llm.train.learn_from", learn_from)
  run_here(tiny_config(config, ONE | changes), path)
  return rows(path, "rl")[0], seen[0].batch


@pytest.mark.parametrize(
  ("changes", "config"),
  [
    # Only adapters differ from their reference after a warm start.
    pytest.param({"reward.kl_coef": 0.1, "model.lora_rank": 4, "warm_start.learning_rate": 1e-2}, "grpo", marks=pytest.mark.exhaustive),
    pytest.param({"advantage.estimator": "gtpo"}, "grpo", marks=pytest.mark.exhaustive),
    pytest.param({"advantage.estimator": "otb", "reward.overlong_buffer": 16}, "grpo", marks=pytest.mark.exhaustive),
    pytest.param(PPO, "ppo", marks=pytest.mark.exhaustive),
  ],
)
def test_the_overlong_filter_moves_no_advantage_of_other_responses(changes, config, tmp_path, monkeypatch):
  (off, plain), (on, filtered) = (
    learned(tmp_path / str(filters), changes | {"reward.overlong_filter": filters}, monkeypatch, config) for filters in (False, True)
  )
  assert off["rollout/tokens_sha256"] == on["rollout/tokens_sha256"]
  ended = plain.rollouts.stopped
  assert 0 < ended.sum() < len(ended) and np.array_equal(filtered.counted, ended)
  np.testing.assert_allclose(filtered.advantages[ended], plain.advantages[ended], rtol=1e-5, atol=1e-6)
  assert np.any(plain.advantages[ended]) and np.any(plain.advantages[~ended]) and not np.any(filtered.advantages[~ended])
  if "reward.kl_coef" in changes:  # `kl.target` is a target for all responses that are penalised.
    assert on["actor/reward_kl_penalty"] == pytest.approx(off["actor/reward_kl_penalty"], rel=1e-5) and on["actor/reward_kl_penalty"] != 0


@pytest.mark.parametrize(
  ("estimator", "rate"),
  few([pytest.param("per_reward", 0.0, marks=pytest.mark.slow), ("steps", 0.0), ("pass_at_k", 1.0)], rest="exhaustive"),
)
def test_nothing_is_learned_from_equal_random_rewards(estimator, rate, tmp_path, monkeypatch):
  """Whatever the true rewards are, of which the curriculum sees as little as the estimator."""
  terms = {"reward.terms": ("pattern=0.5",), "reward.settings": ("pattern.regex=[a-m]",), "task.curriculum": "problem"}
  row, _ = learned(tmp_path, terms | {"advantage.estimator": estimator, "reward.at_random": rate}, monkeypatch)
  assert row["actor/grad_norm"] == 0 and row["critic/rewards/mean"] == row["reward/random/mean"] == rate
  assert row["curriculum/pass_rate"] == pytest.approx(rate) and row["group/frac_reward_zero_std"] == 1
  assert 0 < row["reward/pattern/mean"] < 1, "the true rewards are logged"


@pytest.mark.slow
def test_every_term_of_the_reward_reaches_an_estimator_of_steps(tmp_path, monkeypatch):
  """All verdicts of its own verifier are equal: a policy with random weights is never right."""
  changes = {"advantage.estimator": "steps", "reward.terms": ("pattern=5",), "reward.settings": ("pattern.regex=[a-m]",)}
  row, batch = learned(tmp_path, changes, monkeypatch)
  assert row["actor/grad_norm"] > 0 and row["reward/final_answer/mean"] == 0
  signs = np.sign(batch.advantages[np.arange(len(batch.counted)), 0]).reshape(-1, batch.group_size)
  verdicts = batch.graded.parts["pattern"].reshape(-1, batch.group_size)
  assert np.array_equal(signs, np.sign(verdicts - verdicts.mean(axis=1, keepdims=True)))


@pytest.mark.slow
def test_the_mismatch_of_a_coarser_sampler_reaches_the_baseline(tmp_path, monkeypatch):
  """The estimator reads the weights by which the correction multiplies the loss."""
  seen, evidence = [], trajectories.evidence
  monkeypatch.setattr(trajectories, "evidence", lambda *args, **options: seen.append(evidence(*args, **options)) or seen[-1])
  changes = {"advantage.estimator": "otb", "correction.terms": ("tis:cap=1.001",), "learner.old_logprobs": "learner"}
  changes |= {"model.sampler_dtype": "bfloat16", "reward.overlong_buffer": 16, "reward.overlong_filter": True}
  row, batch = learned(tmp_path, changes, monkeypatch)
  (given,) = [x for x in seen if x.importance is not None]
  weights = given.importance[given.written > 0]
  assert row["actor/grad_norm"] > 0 and weights.min() < 0.9999 and weights.max() == pytest.approx(1.001)
  assert np.mean(given.importance[given.mask > 0]) == pytest.approx(row["rollout_corr/rollout_is_mean"], rel=1e-5)
  left_out = (given.written > 0) & ~batch.counted[:, None]
  assert np.any(left_out) and np.std(given.importance[left_out]) > 0


@pytest.mark.exhaustive
def test_dynamic_sampling_keeps_groups_that_differ_in_one_of_several_rewards(tmp_path, monkeypatch):
  """The sum of three rewards is always 1, and the estimator compares each of them."""
  functions = [f"def of_{n}(completion, _): return float(completion.num_tokens % 3 == {n})" for n in range(3)]
  (tmp_path / "lengths.py").write_text("\n".join(functions))
  monkeypatch.syspath_prepend(tmp_path)
  changes = {"reward.terms": tuple(f"lengths:of_{n}" for n in range(3)), "reward.verifier_weight": 0.0, "reward.overlong_buffer": 0}
  changes |= {"rollout.max_refills": 2, "objective.kl_coef": None, "reward.workers": 1, "advantage.estimator": "per_reward"}
  row, batch = learned(tmp_path / "run", changes, monkeypatch, "dapo")
  assert row["critic/rewards/min"] == row["critic/rewards/max"] == 1 and row["actor/grad_norm"] > 0
  groups = np.any(batch.advantages.reshape(-1, batch.group_size * batch.advantages.shape[1]) != 0, axis=1)
  assert row["group/mixed"] > 0 and groups.sum() == min(row["group/mixed"], len(groups)) == len(groups) - row["group/filled_up"]
  assert row["group/frac_reward_zero_std"] == pytest.approx(1 - groups.mean())
