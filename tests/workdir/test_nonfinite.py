"""Non-finite updates are refused and dumped, and single non-finite sequences are dropped."""

import json

import jax
import numpy as np
import pytest

from jaxrl_llm import train
from jaxrl_llm.run.steps import learn, stop
from jaxrl_llm.types import TrainBatch
from jaxrl_llm.workdir import nonfinite
from tests.marks import few
from tests.runs import VARIED, column, quick, rows, tiny_config

SHORT = VARIED | {"warm_start.num_steps": 0, "num_steps": 3, "eval.every": 3, "eval.num_prompts": 8, "checkpoint.every": 3}


def unusual(arrays):
  """Returns the names of the arrays with a non-finite number at a counted token."""
  counts = arrays["mask"] > 0
  return [name for name, x in arrays.items() if x.shape == counts.shape and not np.all(np.isfinite(x[counts]))]


def train_with(fault, workdir, monkeypatch, name="gspo", **overrides):
  """Trains with an injected fault. Returns the log lines, the summary or error, and the run."""
  monkeypatch.setenv("JAXRL_FAULT", fault)
  workdir.mkdir(parents=True, exist_ok=True)
  lines = []
  with quick():
    run = train.start_run(tiny_config(name, SHORT | overrides), workdir, log=lines.append)
    try:
      return lines, train.proceed(run), run
    except stop.NonFiniteError as error:
      return lines, error, run


def counts(state):
  """Returns the update counters of an optimizer, those of Adam and of the schedule."""
  return sorted(int(x) for x in jax.tree.leaves(state.opt_state) if x.ndim == 0 and x.dtype == np.int32)


@pytest.mark.slow
def test_a_refused_update_is_dumped_and_reported_and_the_schedule_pauses(tmp_path, monkeypatch):
  lines, summary, run = train_with("update:2:nan", tmp_path, monkeypatch)
  skipped = sum(column(tmp_path, "train/skipped_steps"))
  assert column(tmp_path, "train/skipped_steps")[1] == skipped == summary["skipped_steps"] > 0
  made = 3 * run.config.learner.updates_per_rollout - skipped
  assert set(counts(run.state)) == {made}
  path = tmp_path / "nonfinite" / "step_2.npz"
  (line,) = [line for line in lines if "was not finite" in line]
  assert str(path) in line and line.startswith("update 1 of step 2 ")

  arrays, about = nonfinite.read_dump(path)
  assert set(arrays) <= set(TrainBatch._fields) and {"tokens", "segments", "mask", "advantages", "old_logprobs"} <= set(arrays)
  assert unusual(arrays) == ["advantages"]
  assert about["step"] == 2 and about["update"] == 0 and about["metrics"]["actor/loss"] == "nan"
  with np.load(path, allow_pickle=False) as file:  # It contains no pickle.
    json.loads(str(file["about"]))


@pytest.mark.exhaustive
def test_a_run_that_gives_up_names_the_batch_and_the_checkpoint(tmp_path, monkeypatch):
  settings = {"learner.max_skipped": 2, "checkpoint.every": 1}
  _, error, _ = train_with("update:2:inf,update:3:inf", tmp_path, monkeypatch, **settings)
  assert isinstance(error, stop.NonFiniteError)
  assert "learner.max_skipped=2" in str(error) and str(tmp_path / "checkpoints" / "1") in str(error)
  assert str(tmp_path / "nonfinite" / "step_2.npz") in str(error)


@pytest.mark.exhaustive
def test_an_update_of_the_critic_is_refused_too(tmp_path, monkeypatch):
  add_credit = learn.add_credit

  def spoiled(run, *args):
    batch, placed, metrics = add_credit(run, *args)
    if run.phases.step == 2:
      placed = [x._replace(returns=x.returns * np.float32("nan")) for x in placed]
    return batch, placed, metrics

  monkeypatch.setattr(learn, "add_credit", spoiled)
  lines, summary, run = train_with("", tmp_path, monkeypatch, name="ppo")
  made = 2 * run.config.learner.updates_per_rollout
  assert set(counts(run.critic)) == {made} and summary["skipped_steps"] == made // 2
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(run.critic.params))
  arrays, _ = nonfinite.read_dump(tmp_path / "nonfinite" / "step_2.npz")
  assert unusual(arrays) == ["returns"] and any("was not finite" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("old_logprobs", few(["sampler", "learner"], 0))
def test_only_a_sequence_with_nan_from_the_sampler_is_dropped(old_logprobs, tmp_path, monkeypatch):
  lines, summary, _ = train_with("rollout:2:nan", tmp_path, monkeypatch, **{"learner.old_logprobs": old_logprobs})
  num_nonfinite = [row.get("rollout/nonfinite_logprobs") for row in rows(tmp_path, "rl")]
  assert num_nonfinite == [None, 1, None]
  num_sequences = 1 / (1 - column(tmp_path, "rollout/counted")[1])
  assert round(num_sequences) == tiny_config().rollout.num_prompts * tiny_config().rollout.group_size
  assert summary["skipped_steps"] == 0 and not (tmp_path / "nonfinite").exists()
  assert not any(row.get("nonfinite") for row in rows(tmp_path, "rl"))
  assert [line.split(":")[0] for line in lines if "nonfinite_logprobs" in line] == ["alarm nonfinite_logprobs at RL step 2"]
  assert summary["alarms"]["nonfinite_logprobs"] == 1


@pytest.mark.exhaustive
def test_non_finite_log_probabilities_of_the_learner_refuse_the_batch(tmp_path, monkeypatch):
  """The policy itself is broken, so that no sequence is dropped and no update is made."""
  with_logprobs = learn.with_logprobs

  def broken(run, batch, step):
    batch, metrics = with_logprobs(run, batch, step)
    return (batch._replace(old_logprobs=batch.old_logprobs.at[:, 5:].set(np.nan)) if step == 1 else batch), metrics

  monkeypatch.setattr(learn, "with_logprobs", broken)
  _, summary, _ = train_with("", tmp_path, monkeypatch, **{"learner.old_logprobs": "learner"})
  assert summary["skipped_steps"] == tiny_config().learner.updates_per_rollout
  assert "old_logprobs" in unusual(nonfinite.read_dump(tmp_path / "nonfinite" / "step_2.npz")[0])
