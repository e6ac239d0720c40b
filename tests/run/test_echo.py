"""A run with an environment whose replies are imitated at a small weight."""

import pytest

from tests.runs import column, run_here, tiny_config


@pytest.mark.exhaustive
def test_replies_become_likelier(tmp_path):
  changes = {"learner.learning_rate": 1e-2, "num_steps": 2, "log.tensorboard": False}
  measured = {}
  for coef in (1.0, 1e-6):
    run_here(tiny_config("tools", changes | {"learner.echo_coef": coef}), tmp_path / str(coef))
    measured[coef] = column(tmp_path / str(coef), "echo/nll")
    assert all(x > 0 for x in column(tmp_path / str(coef), "echo/num_tokens"))
  # A step has several updates, so that the first one shows in its mean already.
  assert measured[1.0][0] < measured[1e-6][0] and measured[1.0][1] < measured[1e-6][1] - 0.1, measured
