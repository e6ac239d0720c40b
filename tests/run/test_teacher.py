"""Runs that learn from a teacher: what they learn, their refusals, and a resumed run."""

import json
import shutil

import jax
import numpy as np
import pytest

from jaxrl_llm import export
from jaxrl_llm.config import policy
from jaxrl_llm.models import make_model, save_hf
from jaxrl_llm.run.jobs.dry_run import describe_run
from jaxrl_llm.run.setup import teacher as teacher_lib
from jaxrl_llm.run.setup.experiment import build_experiment
from tests.runs import cached_runs, column, lines_of, quick, rows, run_here, tiny_config

SHORT = {
  "num_steps": 2, "warm_start.num_steps": 2, "warm_start.batch_size": 8, "eval.every": 2, "checkpoint.every": 1,
  "log.samples_every": 2, "log.tensorboard": False, "learner.schedule": "constant",
}  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
  """An exported model, wider than the student, with random weights."""
  folder = tmp_path_factory.mktemp("teacher") / "wide"
  shape = policy.model_config(tiny_config(), vocab_size=264)._replace(d_model=64, num_layers=3)
  model = make_model(shape)
  save_hf(folder, model, jax.jit(model.init)(jax.random.key(3)))
  return folder


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, teacher):
  return cached_runs(tmp_path_factory, "opd", SHORT | {"teacher.path": str(teacher)})


@pytest.mark.slow
def test_a_teacher_moves_the_policy_without_any_reward(run_of):
  """The sampled estimate of the divergence agrees with the exact one, on the same tokens."""
  workdir = run_of(teacher__gkd_coef=1.0)
  assert max(column(workdir, "critic/advantages/max")) == 0 < min(column(workdir, "actor/grad_norm"))
  for row in rows(workdir, "rl"):
    assert 0 < row["teacher/agreement"] < 1 and row["teacher/entropy"] > 0 and row["teacher/advantage_abs"] > 0
    assert row["teacher/kl"] == pytest.approx(row["teacher/divergence"], rel=1e-5)  # beta is 1.
    assert row["actor/loss"] == pytest.approx(row["actor/pg_loss"] + row["teacher/gkd_loss"], rel=1e-4)


@pytest.mark.exhaustive
def test_the_two_terms_estimate_the_same_divergence(run_of):
  sampled, exact = run_of(), run_of(teacher__gkd_coef=1.0)
  assert column(sampled, "rollout/tokens_sha256")[0] == column(exact, "rollout/tokens_sha256")[0]
  assert column(sampled, "teacher/kl")[0] == pytest.approx(column(exact, "teacher/kl")[0], rel=0.2)


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one_and_refuses_another_teacher(run_of, teacher, tmp_path):
  golden = run_of(teacher__gkd_coef=1.0)
  changes = SHORT | {"teacher.path": str(teacher), "teacher.gkd_coef": 1.0}
  run_here(tiny_config("opd", changes | {"num_steps": 1}), tmp_path / "resumed")
  shutil.copytree(teacher, tmp_path / "moved")
  run_here(tiny_config("opd", changes | {"teacher.path": str(tmp_path / "moved")}), tmp_path / "resumed")
  assert lines_of(tmp_path / "resumed", "rl") == lines_of(golden, "rl") and len(lines_of(golden, "rl")) == 2
  shape = policy.model_config(tiny_config(), vocab_size=264)
  model = make_model(shape)
  save_hf(tmp_path / "other", model, jax.jit(model.init)(jax.random.key(4)))
  with pytest.raises(ValueError, match="config.teacher.path: found other weights in .* than those that the run in .* began with"):
    run_here(tiny_config("opd", changes | {"teacher.path": str(tmp_path / "other"), "num_steps": 3}), tmp_path / "resumed")


@pytest.mark.slow
def test_a_run_and_its_export_are_the_same_teacher(run_of, tmp_path):
  trained = run_of(teacher__gkd_coef=1.0)
  export.export(trained, tmp_path / "exported")
  of_run, exported = (weights_of(path, dtype="bfloat16") for path in (trained, tmp_path / "exported"))
  for one, other in zip(*map(jax.tree.leaves, (of_run, exported)), strict=True):
    assert one.dtype == other.dtype and np.array_equal(np.float32(one), np.float32(other))
  assert "bfloat16" in {x.dtype.name for x in jax.tree.leaves(of_run)}


def weights_of(path, dtype=None):
  """Loads the teacher of a tiny student."""
  with quick():
    built = build_experiment(tiny_config("opd", {"teacher.path": str(path), "teacher.dtype": dtype}))
  taught = built.learner.teachers[""]
  return teacher_lib.load_teacher(built.teachers[""], taught.model, taught.abstract_params)


@pytest.mark.exhaustive
def test_several_teachers_with_the_same_weights_are_one(run_of, teacher, tmp_path):
  one, same = run_of(), tmp_path / "several"
  paths = {"teacher.path": None, "teacher.paths": (f"1={teacher}", f"2={teacher}"), "teacher.column": "level"}
  run_here(tiny_config("opd", SHORT | paths), same)
  assert column(same, "rollout/tokens_sha256")[0] == column(one, "rollout/tokens_sha256")[0]
  for name in ("teacher/kl", "teacher/entropy", "actor/loss", "actor/grad_norm"):
    assert column(same, name)[0] == pytest.approx(column(one, name)[0], rel=1e-4)
  row = rows(same, "rl")[0]
  # All its problems are of level 2. One mean is over tokens, the other one over updates.
  assert row["teacher/kl/2"] == pytest.approx(row["teacher/kl"], rel=0.02) and "teacher/kl/1" not in row


def test_a_dry_run_counts_the_teacher(teacher):
  config = tiny_config("opd", {"teacher.path": str(teacher)})
  with quick():
    (held,) = (line for line in describe_run(config).splitlines() if line.lstrip().startswith("always"))
  num_params = sum(x.size for x in jax.tree.leaves(weights_of(teacher)))
  assert f"teacher {4 * num_params / 1e6:.1f}" in held


def refused(changes):
  with quick(), pytest.raises(ValueError) as error:
    build_experiment(tiny_config("opd", changes))
  assert "\n" not in str(error.value)
  return str(error.value)


def test_a_teacher_that_is_missing_or_speaks_another_language_is_refused(teacher, tmp_path):
  assert refused({"teacher.path": str(tmp_path / "none")}).startswith("config.teacher.path: found ")
  shape = json.loads((teacher / "config.json").read_text())
  other = tmp_path / "other"
  shutil.copytree(teacher, other)
  (other / "config.json").write_text(json.dumps(shape | {"vocab_size": 300}))
  line = refused({"teacher.path": str(other)})
  difference = "which has no tokenizer.json and logits of 300 ids, while the policy has 264"
  assert line.startswith(f"config.teacher.path: found {str(other)!r}, {difference}, expected a teacher with the policy's tokenizer")
