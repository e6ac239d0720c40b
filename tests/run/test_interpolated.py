"""A run with an old policy between the sampler's and the current one."""

import numpy as np
import pytest

from jaxrl_llm.run.steps import learn
from tests.runs import VARIED, column, run_here, tiny_config

CHANGES = VARIED | {
  "num_steps": 3, "warm_start.num_steps": 0, "checkpoint.every": 3, "eval.every": 3, "eval.num_prompts": 8, "eval.batch_prompts": 8,
  "learner.learning_rate": 1e-2, "learner.updates_per_rollout": 1, "learner.row_buckets": (16,), "log.tensorboard": False,
  "rollout.update_in_flight": "wait", "rollout.staleness": 2, "learner.old_logprobs": "interpolated", "correction.tis": 1e6,
}  # fmt: skip


@pytest.mark.exhaustive
def test_ratio_and_weight_follow_the_lag_without_a_pass_for_the_old_policy(tmp_path, monkeypatch):
  adding, kept = learn.with_logprobs, []

  def with_logprobs(run, batch, step):
    done, metrics = adding(run, batch, step)
    kept.append(done.old_logprobs is batch.old_logprobs)
    return done, metrics

  monkeypatch.setattr(learn, "with_logprobs", with_logprobs)
  run_here(tiny_config(overrides=CHANGES), tmp_path)
  assert kept == [True] * 3
  lags, counts = column(tmp_path, "rollout/staleness"), [column(tmp_path, f"rollout/staleness/tokens/{lag}") for lag in range(3)]
  assert lags == [0, 1, 2] and all(column(tmp_path, f"rollout/staleness/{name}") == lags for name in ("min", "mean", "max"))
  assert [[count > 0 for count in of_steps] for of_steps in counts] == np.eye(3, dtype=bool).tolist()
  ratios, weights = column(tmp_path, "ratio/max"), column(tmp_path, "rollout_corr/rollout_is/max")
  # Without a lag the ratio is 1. With a lag of one step the old policy is the sampler's, and
  # nothing is left to weigh. With two, ratio and weight are the same root of π/μ.
  assert ratios[0] == 1 and weights[1] == 1 and min(*ratios[1:], weights[2]) > 1.1
  assert weights[0] == pytest.approx(1, abs=1e-4) and weights[2] == pytest.approx(ratios[2], rel=1e-4)
  assert all(0 < x < 1 for x in column(tmp_path, "perf/learner_idle"))
