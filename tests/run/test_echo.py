"""A run with an environment whose replies are imitated at a small weight."""

import pytest

from tests.runs import column, run_here, tiny_config


@pytest.mark.exhaustive
def test_replies_become_likelier(tmp_path):
  changes = {"learner.echo_coef": 1.0, "learner.learning_rate": 1e-2, "num_steps": 2, "log.tensorboard": False}
  run_here(tiny_config("tools", changes), tmp_path)
  nll, number = (column(tmp_path, f"echo/{name}") for name in ("nll", "num_tokens"))
  assert all(x > 0 for x in number) and nll[1] < nll[0]
