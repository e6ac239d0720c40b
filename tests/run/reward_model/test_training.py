"""The training of a reward model: its outputs, its resumption and the checks of its config."""

import importlib
import json

import jax
import numpy as np
import pytest

from jaxrl_llm import main
from jaxrl_llm.config.fields import REWARD_MODEL_FIELDS, unread_defaults
from jaxrl_llm.models import load_reward_params, make_model, make_reward_model, preset, read_reward_config, save_hf
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rewards.model import load_reward_tokenizer
from jaxrl_llm.run.jobs.reward_model import check, training
from jaxrl_llm.workdir import checkpoint
from tests.runs import ROOT, lines_of, quick
from tests.runs import rows as rows_of

CONFIG = ROOT / "configs/reward_model.py"


def tiny(**overrides):
  config = importlib.import_module("configs.reward_model").get_config("tiny")
  config.log.tensorboard = False
  config.update_from_flattened_dict(overrides)
  unread = unread_defaults(config, REWARD_MODEL_FIELDS)
  config.update_from_flattened_dict({path: value for path, value in unread.items() if path not in overrides})
  return config


def train(config, workdir, devices=1, stop_after=None):
  workdir.mkdir(parents=True, exist_ok=True)
  with quick(devices):
    run = training.start_run(config, workdir)
    if stop_after is None:
      return training.proceed(run)
    run.config = config.copy_and_resolve_references()
    # This shortens only the loop: the optimizer was made for all steps.
    run.config.num_steps = stop_after
    with run.progress, run.writer:
      training.learn(run)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Summary and workdir of an unbroken run, which keeps only one checkpoint."""
  workdir = tmp_path_factory.mktemp("rm") / "run"
  return train(tiny(), workdir), workdir


def arrays(workdir):
  with quick():
    programs = training.make_programs(tiny(), training.mesh_lib.make_mesh(), check.shape_of(tiny()))
    restored, _ = checkpoint.restore_latest(
      checkpoint.open_checkpoints(workdir / "checkpoints", keep=2), {"state": programs.abstract_state}
    )
  return [np.asarray(x) for x in jax.tree.leaves(restored["state"])]


def test_smoke_run(run):
  summary, workdir = run
  assert summary == json.loads((workdir / "summary.json").read_text())
  assert (summary["status"], summary["objective"], summary["num_steps"], summary["skipped_steps"]) == ("finished", "bradley_terry", 6, 0)
  assert summary["accuracy_start"] == 0.5 and 0 <= summary["accuracy_final"] <= 1 and (workdir / "report.html").is_file()
  rows = rows_of(workdir, "reward_model")
  assert [row["step"] for row in rows] == list(range(1, 7)) and [row["step"] for row in rows_of(workdir, "eval")] == [0, 3, 6]
  # A head of zeros prefers neither response: the first loss is exactly log 2.
  assert rows[0]["reward_model/loss"] == pytest.approx(np.log(2), rel=1e-6) and rows[0]["reward_model/accuracy"] == 0.5
  names = "loss accuracy margin chosen rejected pair_loss grad_norm lr skipped".split()
  assert all({f"reward_model/{name}" for name in names} <= row.keys() and row["reward_model/grad_norm"] > 0 for row in rows)
  for row in rows_of(workdir, "eval"):
    assert row["eval/accuracy_low"] <= row["eval/accuracy"] <= row["eval/accuracy_high"] and row["eval/num_pairs"] == 16


def test_the_folder_holds_what_was_trained_and_its_tokenizer(run):
  folder = run[1] / "reward_model"
  model = make_reward_model(read_reward_config(folder))
  saved = [np.asarray(x) for x in jax.tree.leaves(load_reward_params(folder, model))]
  params = jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0)))
  trained = arrays(run[1])[: params.num_leaves]
  assert all(map(np.array_equal, saved, trained)) and any(np.any(x) for x in saved)
  assert load_reward_tokenizer(folder) == ByteTokenizer()


@pytest.mark.slow
def test_a_resumed_training_equals_an_unbroken_one(run, tmp_path):
  train(tiny(), tmp_path / "run", stop_after=3)
  summary = train(tiny(), tmp_path / "run")
  assert summary["attempts"] == 2
  assert lines_of(tmp_path / "run") == lines_of(run[1])
  assert all(map(np.array_equal, arrays(tmp_path / "run"), arrays(run[1])))
  ours, theirs = (path / "reward_model/model.safetensors" for path in (tmp_path / "run", run[1]))
  assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
def test_devices_and_micro_batches_change_nothing(run, tmp_path):
  train(tiny(**{"mesh.fsdp": 2, "learner.rows_per_device": 1}), tmp_path / "run", devices=4)
  for ours, theirs in zip(rows_of(tmp_path / "run", "reward_model"), rows_of(run[1], "reward_model"), strict=True):
    assert ours["reward_model/loss"] == pytest.approx(theirs["reward_model/loss"], abs=1e-5)
    assert ours["reward_model/accuracy"] == theirs["reward_model/accuracy"]


@pytest.mark.usefixtures("in_the_checkout")
def test_the_command_line(tmp_path, capsys):
  assert main.main(["main", f"--config={CONFIG}:tiny", "--dry_run"]) == 0
  out = capsys.readouterr().out
  for part in ("reward model: nano, 27,104 parameters", "data: 708 pairs to learn from, 23 held out", "no problem found"):
    assert part in out
  with quick():
    assert main.main(["main", f"--config={CONFIG}:tiny", "--config.num_steps=1", f"--workdir={tmp_path / 'run'}"]) == 0
  assert "saved the reward model to" in (out := capsys.readouterr().out) and "accuracy 50.0% -> " in out
  assert main.main(["main", f"--config={CONFIG}:tiny", "--config.objective.name=gspo"]) == 2
  assert "expected a config made by configs.common" in capsys.readouterr().err


def test_a_language_model_becomes_a_reward_model(tmp_path):
  policy = make_model(preset("nano", vocab_size=264))
  weights = policy.init(jax.random.key(3))
  save_hf(tmp_path / "policy", policy, weights)
  config = tiny(**{"model.path": str(tmp_path / "policy"), "model.tokenizer": "bytes"})
  assert check.job_problems(config) == []
  with quick():
    run = training.start_run(config, tmp_path / "run")
    assert np.array_equal(run.state.params["trunk"]["embedding"], weights["embedding"])
    assert not np.any(run.state.params["value_head"])
    run.writer.close()


def test_the_config_is_legal():
  assert (
    check.job_problems(tiny())
    == []
    == check.job_problems(importlib.import_module("configs.reward_model").get_config(""))
  )


PROBLEMS = {
  "steps": ({"num_steps": 0}, ["config.num_steps: found 0, expected a whole number of at least 1, below 2**31"]),
  "margin": ({"objective.margin": float("inf")}, ["config.objective.margin: found inf, expected a finite number"]),
  "centre": ({"objective.center_coef": -1.0}, ["config.objective.center_coef: found -1.0"]),
  "column": ({"task.chosen_column": ""}, ["config.task.chosen_column: found '', expected the name of a column"]),
  "source": (
    {"task.name": "fil"},
    ["config.task.name: found 'fil', expected one of arithmetic, file; did you mean 'file'?"],
  ),
  "no file": ({"task.name": "file"}, ["config.task.path: found None, expected a file of pairs"]),
  "missing file": ({"task.name": "file", "task.path": "no/such.jsonl"}, ["no/such.jsonl: found no such file"]),
  "file of another": (
    {"task.path": "x.jsonl"},
    ["config.task.path: found 'x.jsonl', expected None", "set task.name='file'"],
  ),
  "column of a file": ({"task.margin_column": None, "task.chosen_column": "best"}, ["it is read only if task.name is 'file'"]),
  "preset": ({"model.preset": "nan"}, ["'nan'", "did you mean 'nano'?"]),
  "open policy": ({"model.remat": "auto"}, ["config.model.remat: found 'auto', expected a policy by name"]),
  "missing folder": ({"model.path": "no/such"}, ["config.model.path: found 'no/such', which does not exist"]),
  "tokenizer alone": ({"model.tokenizer": "bytes"}, ["config.model.tokenizer: found 'bytes', expected None"]),
  "chat of bytes": ({"task.chat": True}, ["config.task.chat: found True, expected None"]),
  "row too short": (
    {"learner.row_tokens": 40},
    ["config.learner.row_tokens=40 is below 48", "raise it to at least 48"],
  ),
  "too few rows": ({"learner.batch_pairs": 64}, ["config.learner.row_buckets=(8,)", "add a bucket of at least 32"]),
  "micro-batches": (
    {"learner.rows_per_device": 3},
    ["config.learner.row_buckets: 8 is not a multiple of 1 devices", "x 3 rows at a time (learner.rows_per_device)", "multiple is 9"],
  ),
  "devices": ({"mesh.data": 3}, ["config.learner.row_buckets: 8 is not a multiple of 3 devices"]),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_problems_of_a_config(case):
  overrides, parts = PROBLEMS[case]
  (line,) = check.job_problems(tiny(**overrides))
  for part in parts:
    assert part in line, line


def test_generated_pairs_that_are_too_long_are_refused(tmp_path):
  with pytest.raises(ValueError, match="config.task.max_tokens: found 8, expected at least 1"):
    check.load_pairs(tiny(**{"task.max_tokens": 8}))
