"""A curriculum in a run: measured pass rates decide what is drawn, also after a resumption."""

import pytest

from jaxrl_llm import train
from tests.runs import break_at, column, quick, run_here, tiny_config

CHANGES = {
  "task.curriculum": "level", "task.levels": (1, 2), "log.tensorboard": False,
  "warm_start.num_steps": 2, "num_steps": 4, "checkpoint.every": 2, "rollout.max_refills": 1, "eval.every": 4,
}  # fmt: skip


@pytest.mark.exhaustive
def test_rates_are_measured_and_a_resumed_run_draws_the_same(tmp_path):
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  run_here(tiny_config(overrides=CHANGES), whole)
  assert column(whole, "curriculum/measured")[-1] == 2, "two levels"
  break_at(tiny_config(overrides=CHANGES), parts, 3)
  run_here(tiny_config(overrides=CHANGES), parts)
  assert column(parts, "rollout/tokens_sha256") == column(whole, "rollout/tokens_sha256")
  assert column(parts, "curriculum/pass_rate") == column(whole, "curriculum/pass_rate")


def test_a_column_that_no_row_has_is_refused(tmp_path):
  with quick(), pytest.raises(ValueError, match="task.curriculum: found 'difficulty', expected 'problem' or a column of the rows: answer"):
    (tmp_path / "run").mkdir()
    train.start_run(tiny_config(overrides=CHANGES | {"task.curriculum": "difficulty"}), tmp_path / "run")
