"""A run that lags by a step, with an old policy between the sampler's and the current one."""

import pytest

from jaxrl_llm import train
from jaxrl_llm.rollouts import versions
from jaxrl_llm.run import learn
from tests.runs import VARIED, column, run_here, tiny_config

CHANGES = VARIED | {
  "num_steps": 3, "warm_start.num_steps": 0, "checkpoint.every": 3, "eval.every": 3, "eval.num_prompts": 8, "eval.batch_prompts": 8,
  "learner.learning_rate": 1e-2, "learner.updates_per_rollout": 1, "learner.row_buckets": (16,), "log.tensorboard": False,
  "rollout.staleness": 1, "learner.old_logprobs": "interpolated", "correction.tis": 2.0,
}  # fmt: skip


@pytest.mark.slow
def test_the_ratio_follows_the_lag_without_a_pass_for_the_old_policy(tmp_path, monkeypatch):
  waiting, adding, kept = train.wait, learn.with_logprobs, []

  def wait(run, current, **options):
    drawn, metrics = waiting(run, current, **options)
    return drawn._replace(rollouts=versions.of_one_version(drawn.rollouts, current.version)), metrics

  def with_logprobs(run, batch, step):
    done, metrics = adding(run, batch, step)
    kept.append(done.old_logprobs is batch.old_logprobs)
    return done, metrics

  monkeypatch.setattr(train, "wait", wait)
  monkeypatch.setattr(learn, "with_logprobs", with_logprobs)
  run_here(tiny_config(overrides=CHANGES), tmp_path)
  assert kept == [True] * 3
  assert column(tmp_path, "rollout/staleness/mean") == column(tmp_path, "rollout/staleness") == [0, 1, 1]
  counts = [column(tmp_path, f"rollout/staleness/tokens/{lag}") for lag in (0, 1)]
  assert [x > 0 for x in counts[0]] == [True, False, False] and [x > 0 for x in counts[1]] == [False, True, True]
  # Without a lag the ratio is 1. With a lag of one step the old policy is the sampler's, and
  # nothing is left to weigh.
  ratios, weights = column(tmp_path, "ratio/max"), column(tmp_path, "rollout_corr/rollout_is/max")
  assert ratios[0] == 1 and min(ratios[1:]) > 1.001 and weights[0] != 1 and weights[1:] == [1, 1]
  assert all(0 < x < 1 for x in column(tmp_path, "perf/learner_idle"))
