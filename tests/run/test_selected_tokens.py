"""A run whose updates read the old policy's entropy and the prompts of the samples."""

import pytest

from tests.runs import column, run_here, tiny_config

CHANGES = {
  "objective.name": "kl_cov", "objective.cov_share": 0.1, "objective.weights": "prompt_mean",
  "warm_start.num_steps": 2, "num_steps": 2, "reward.at_random": 0.5, "correction.top_entropy": 0.25, "advantage.estimator": "gtpo",
  "eval.every": 2, "checkpoint.every": 2, "log.samples_every": 2, "log.tensorboard": False,
}  # fmt: skip


@pytest.mark.exhaustive
def test_updates_learn_from_the_tokens_of_largest_entropy(tmp_path):
  run_here(tiny_config("vespo", CHANGES), tmp_path)
  # Ties are kept too, and few of the tokens are equally uncertain.
  assert all(0.25 <= x < 0.4 for x in column(tmp_path, "actor/kept_fraction"))
  assert all(0.05 < x <= 0.1 for x in column(tmp_path, "actor/selected_fraction"))
  assert all(x > 0 for x in column(tmp_path, "actor/grad_norm"))
