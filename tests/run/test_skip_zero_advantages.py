"""Updates without the responses whose advantages are zero: the same run for fewer tokens."""

import numpy as np
import pytest

from tests.marks import few
from tests.runs import column, run_here, tiny_config

CHANGES = {
  "warm_start.num_steps": 2, "reward.at_random": 0.1, "num_steps": 2,
  "eval.every": 2, "checkpoint.every": 2, "log.samples_every": 1, "log.tensorboard": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("weights", few(["sequence_mean", "token_mean", "prompt_mean"], "prompt_mean"))
def test_the_updates_are_the_same_and_smaller(weights, tmp_path):
  for name, skips in (("all", False), ("skipping", True)):
    changes = CHANGES | {"learner.skip_zero_advantages": skips, "objective.weights": weights}
    run_here(tiny_config(overrides=changes), tmp_path / name)
  columns = lambda metric: np.array([column(tmp_path / name, metric) for name in ("all", "skipping")])
  assert columns("rollout/tokens_sha256")[0, 0] == columns("rollout/tokens_sha256")[1, 0]
  for metric in ("actor/loss", "actor/grad_norm", "critic/rewards/mean", "critic/advantages/max"):
    whole, rest = columns(metric)
    np.testing.assert_allclose(rest, whole, rtol=1e-3, atol=1e-6, err_msg=metric)
  assert np.all(columns("actor/grad_norm") > 0)
  tokens, skipped = columns("perf/total_num_tokens"), column(tmp_path / "skipping", "actor/frac_zero_advantages")
  assert all(0.1 < x < 1 for x in skipped) and np.all(tokens[1] < 0.95 * tokens[0])
