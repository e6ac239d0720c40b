"""Numbers that are not finite: refused, kept for whoever wants to know why, and left out where one sequence has them."""

import json

import jax
import numpy as np
import pytest

from jaxrl_llm import train
from jaxrl_llm.run import learn, stopping
from jaxrl_llm.types import TrainBatch
from jaxrl_llm.workdir import nonfinite
from tests.runs import VARIED, column, quick, rows, tiny_config

SHORT = VARIED | {"warm_start.num_steps": 0, "num_steps": 3, "eval.every": 3, "eval.num_prompts": 8, "checkpoint.every": 3}


def unusual(arrays):
  """Names of the arrays that hold a number that is not finite at a token that counts."""
  counts = arrays["mask"] > 0
  return [name for name, x in arrays.items() if x.shape == counts.shape and not np.all(np.isfinite(x[counts]))]


def train_with(fault, workdir, monkeypatch, name="gspo", **overrides):
  """A run in which something strikes; its lines, what it made of it, and the run."""
  monkeypatch.setenv("JAXRL_FAULT", fault)
  workdir.mkdir(parents=True, exist_ok=True)
  lines = []
  with quick():
    this = train.start(tiny_config(name, SHORT | overrides), workdir, log=lines.append)
    try:
      return lines, train.proceed(this), this
    except stopping.NonFiniteError as error:
      return lines, error, this


def counts(state):
  """The counters of an optimizer, Adam's and the schedule's: updates that were made."""
  return sorted(int(x) for x in jax.tree.leaves(state.opt_state) if x.ndim == 0 and x.dtype == np.int32)


def test_a_refused_update_is_kept_and_told_and_the_schedule_stands_still(tmp_path, monkeypatch):
  lines, summary, this = train_with("update:2:nan", tmp_path, monkeypatch)
  skipped = sum(column(tmp_path, "train/skipped_steps"))
  assert column(tmp_path, "train/skipped_steps")[1] == skipped == summary["skipped_steps"] > 0
  made = 3 * this.config.learner.updates_per_rollout - skipped
  assert set(counts(this.state)) == {made}
  path = tmp_path / "nonfinite" / "step_2.npz"
  (line,) = [line for line in lines if "was not finite" in line]
  assert str(path) in line and line.startswith("update 1 of step 2 ")

  arrays, about = nonfinite.read(path)
  assert set(arrays) <= set(TrainBatch._fields) and {"tokens", "segments", "mask", "advantages", "old_logprobs"} <= set(arrays)
  assert unusual(arrays) == ["advantages"]
  assert about["step"] == 2 and about["update"] == 0 and about["metrics"]["actor/loss"] == "nan"
  with np.load(path, allow_pickle=False) as file:  # Nothing in it is a pickle.
    json.loads(str(file["about"]))


def test_a_run_that_gives_up_names_the_batch_and_the_checkpoint(tmp_path, monkeypatch):
  settings = {"learner.max_skipped": 2, "checkpoint.every": 1}
  _, error, _ = train_with("update:2:inf,update:3:inf", tmp_path, monkeypatch, **settings)
  assert isinstance(error, stopping.NonFiniteError)
  assert "learner.max_skipped=2" in str(error) and str(tmp_path / "checkpoints" / "1") in str(error)
  assert str(tmp_path / "nonfinite" / "step_2.npz") in str(error)


@pytest.mark.slow
def test_no_more_dumps_than_a_disk_can_bear(tmp_path, monkeypatch):
  monkeypatch.setattr(nonfinite, "MAX_DUMPS", 1)
  train_with("update:2:nan,update:3:nan", tmp_path, monkeypatch)
  assert [path.name for path in (tmp_path / "nonfinite").iterdir()] == ["step_2.npz"]


@pytest.mark.slow
def test_the_critics_update_is_refused_alike(tmp_path, monkeypatch):
  add_credit = learn.add_credit

  def spoiled(this, *args):
    batch, placed, metrics = add_credit(this, *args)
    if this.phases.step == 2:
      placed = [x._replace(returns=x.returns * np.float32("nan")) for x in placed]
    return batch, placed, metrics

  monkeypatch.setattr(learn, "add_credit", spoiled)
  lines, summary, this = train_with("", tmp_path, monkeypatch, name="ppo")
  made = 2 * this.config.learner.updates_per_rollout
  assert set(counts(this.critic)) == {made} and summary["skipped_steps"] == made // 2
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(this.critic.params))
  arrays, _ = nonfinite.read(tmp_path / "nonfinite" / "step_2.npz")
  assert unusual(arrays) == ["returns"] and any("was not finite" in line for line in lines)


@pytest.mark.parametrize("old_logprobs", ["sampler", pytest.param("learner", marks=pytest.mark.slow)])
def test_a_sequence_whose_sampler_says_nan_is_left_out_and_nothing_else(old_logprobs, tmp_path, monkeypatch):
  lines, summary, _ = train_with("rollout:2:nan", tmp_path, monkeypatch, **{"learner.old_logprobs": old_logprobs})
  found = [row.get("rollout/nonfinite_logprobs") for row in rows(tmp_path, "rl")]
  assert found == [None, 1, None]
  num_sequences = 1 / (1 - column(tmp_path, "rollout/counted")[1])
  assert round(num_sequences) == tiny_config().rollout.num_prompts * tiny_config().rollout.group_size
  assert summary["skipped_steps"] == 0 and not (tmp_path / "nonfinite").exists()
  assert not any(row.get("nonfinite") for row in rows(tmp_path, "rl"))
  assert [line.split(":")[0] for line in lines if "nonfinite_logprobs" in line] == ["alarm nonfinite_logprobs at RL step 2"]
  assert summary["alarms"]["nonfinite_logprobs"] == 1


def test_a_learner_whose_log_probabilities_are_not_finite_is_refused_with_the_batch(tmp_path, monkeypatch):
  """There the policy itself is broken: no sequence is to blame, and no update is made."""
  with_logprobs = learn.with_logprobs

  def broken(this, batch, step):
    batch, metrics = with_logprobs(this, batch, step)
    return (batch._replace(old_logprobs=batch.old_logprobs.at[:, 5:].set(np.nan)) if step == 1 else batch), metrics

  monkeypatch.setattr(learn, "with_logprobs", broken)
  _, summary, _ = train_with("", tmp_path, monkeypatch, **{"learner.old_logprobs": "learner"})
  assert summary["skipped_steps"] == tiny_config().learner.updates_per_rollout
  assert "old_logprobs" in unusual(nonfinite.read(tmp_path / "nonfinite" / "step_2.npz")[0])
