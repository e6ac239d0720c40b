"""A warm start taken from an equal run: its bits, its metrics, and never those of another run."""

import re

import jax
import numpy as np
import pytest

from jaxrl_llm import train
from jaxrl_llm.run.observe import faults
from jaxrl_llm.run.setup.experiment import build_experiment
from jaxrl_llm.run.setup.start import start_run
from jaxrl_llm.run.steps import warm_starts
from tests.runs import VARIED, lines_of, quick, tiny_config

SMALL = VARIED | {"num_steps": 1, "warm_start.num_steps": 4, "warm_start.batch_size": 8, "eval.num_prompts": 8, "log.tensorboard": False}
OTHER_RL = {
  "objective.name": "sapo", "learner.learning_rate": 7e-3, "learner.schedule": "constant", "learner.warmup_steps": 1, "num_steps": 3,
  "learner.old_logprobs": "learner", "rollout.temperature": 0.7, "rollout.group_size": 8, "rollout.num_prompts": 4,
  "learner.share_prompts": False, "learner.row_buckets": (8, 16), "reward.overlong_buffer": 3, "eval.samples": 2,
  "checkpoint.warm_start_every": 3, "log.num_samples": 1, "learner.max_skipped": 3, "advantage.whiten": True,
}  # fmt: skip
"""Changes of what RL alone reads."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """A folder of warm starts for one test."""
  monkeypatch.setenv(warm_starts.VARIABLE, str(tmp_path / "warm"))
  return tmp_path / "warm"


def config_of(changes=None):
  """Returns the small config; another objective brings its own clip range."""
  config = tiny_config("gspo", SMALL)
  if "objective.name" in (changes or {}):
    config.objective.clip_low = config.objective.clip_high = None
  config.update_from_flattened_dict(changes or {})
  return config


def run(workdir, changes=None, *, whole=True):
  """Trains, or with `whole=False` to the end of the warm start. Returns the run and its lines."""
  workdir.mkdir()
  lines = []
  with quick():
    job = start_run(config_of(changes), workdir, log=lines.append)
    if whole:
      train.proceed(job)
    else:
      with job.writer, job.samples:
        train.warm_start(job)
  return job, [line for line in lines if line.startswith("warm start: ")]


def assert_equal(one, other):
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.exhaustive
def test_a_run_with_a_taken_warm_start_equals_one_that_computed_it(tmp_path, folder, monkeypatch):
  plain, lines = run(tmp_path / "plain", {"warm_start.cache": False})
  assert lines == [] and not folder.exists()
  kept, lines = run(tmp_path / "kept")
  (entry,) = [path for path in folder.iterdir() if path.name != "locks"]
  assert lines == [f"warm start: kept for equal runs in {entry}"]
  monkeypatch.setattr(train, "imitate", lambda run: pytest.fail("it is computed again"))
  taken, lines = run(tmp_path / "taken")
  assert len(lines) == 1 and lines[0].startswith(f"warm start: taken from {entry}, computed by an equal run in ")
  assert lines_of(tmp_path / "taken") == lines_of(tmp_path / "kept") == lines_of(tmp_path / "plain")
  assert len(lines_of(tmp_path / "taken", "warm_start")) == 4
  assert_equal(plain.arrays(), taken.arrays())
  assert_equal(plain.arrays(), kept.arrays())
  assert taken.places() == plain.places() and taken.record.tokens == plain.record.tokens


@pytest.mark.slow
def test_what_rl_reads_does_not_change_a_warm_start(tmp_path):
  """The proof of `RL_ONLY`: the bits are equal although all of this differs."""
  one, _ = run(tmp_path / "one", whole=False)
  other, _ = run(tmp_path / "other", OTHER_RL, whole=False)
  assert_equal(one.state.params, other.state.params)
  assert lines_of(tmp_path / "one") == lines_of(tmp_path / "other")


@pytest.fixture(scope="module")
def keys():
  """A function from changes to the key of their warm start."""

  def key_of(changes):
    with quick():
      return warm_starts.key_of(build_experiment(config_of(changes)), None)

  base = key_of({})
  return lambda changes: (base, key_of(changes))


def test_runs_that_differ_in_rl_share_a_key(keys):
  base, other = keys(OTHER_RL)
  assert base == other and re.fullmatch("[0-9a-f]{64}", base)


@pytest.mark.parametrize(
  "changes",
  [
    {"seed": 1}, {"model.dtype": "bfloat16"}, {"task.levels": (1,)}, {"warm_start.learning_rate": 2e-2},
    {"learner.b2": 0.95}, {"learner.row_tokens": 96},
  ],
  ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_runs_that_differ_in_the_warm_start_do_not(keys, changes):
  base, other = keys(changes)
  assert base != other


def test_libraries_code_and_machine_are_part_of_the_key(keys, monkeypatch):
  base, _ = keys({})
  for name, value in (("source_digest", lambda: "x"), ("machine", dict), ("PACKAGES", ("jax",))):
    with monkeypatch.context() as patched:
      patched.setattr(warm_starts, name, value)
      assert keys({})[1] != base, name
  monkeypatch.setenv("XLA_FLAGS", "--xla_another=1")
  assert warm_starts.machine()["environment"]["XLA_FLAGS"] == "--xla_another=1"


def test_an_objective_that_imitates_is_part_of_the_key():
  with quick():
    config = tiny_config("sft", {"warm_start.num_steps": 4})
    one = warm_starts.key_of(build_experiment(config), None)
    other = warm_starts.key_of(build_experiment(tiny_config("gspo", {"warm_start.num_steps": 4})), None)
  assert one != other


def test_a_damaged_warm_start_is_computed_again_and_replaced(tmp_path, folder):
  first, _ = run(tmp_path / "first", whole=False)
  (entry,) = [path for path in folder.iterdir() if path.name != "locks"]
  largest = max((path for path in (entry / "0" / "arrays").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
  largest.write_bytes(largest.read_bytes()[:-1])
  second, lines = run(tmp_path / "second", whole=False)
  assert len(lines) == 2 and lines[0].startswith(f"warm start: {entry} is damaged and is computed again: ")
  assert lines[1] == f"warm start: kept for equal runs in {entry}"
  third, lines = run(tmp_path / "third", whole=False)
  assert len(lines) == 1 and "taken from" in lines[0]
  assert_equal(first.state.params, second.state.params)
  assert_equal(first.state.params, third.state.params)
  assert lines_of(tmp_path / "first") == lines_of(tmp_path / "second") == lines_of(tmp_path / "third")


def start(workdir, changes=None):
  """Starts a run and trains nothing."""
  workdir.mkdir()
  with quick():
    return start_run(config_of(changes), workdir)


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path, monkeypatch):
  (tmp_path / "file").write_text("")
  monkeypatch.delenv(warm_starts.VARIABLE)
  job, notes = start(tmp_path / "run", {"warm_start.cache_dir": str(tmp_path / "file")}), []
  monkeypatch.setattr(job.progress, "note", notes.append)
  with job.writer, job.samples:
    warm_starts.reuse(job, lambda run: [{"actor/loss": 1.0}])
  assert len(notes) == 1 and notes[0].startswith("warm start: not kept for equal runs: ")


@pytest.mark.exhaustive
def test_adapters_are_kept_without_their_base(tmp_path, folder):
  lora = {"model.lora_rank": 2}
  one, _ = run(tmp_path / "one", lora, whole=False)
  other, lines = run(tmp_path / "other", lora, whole=False)
  assert "taken from" in lines[0]
  assert_equal(one.state.params, other.state.params)


def test_who_neither_takes_nor_keeps(tmp_path, folder, monkeypatch):
  job = start(tmp_path / "run", {"warm_start.cache": False})
  assert warm_starts.results_of(job) is None
  job.config.warm_start.cache, job.record.warm_steps = True, 1
  assert warm_starts.results_of(job) is None, "it is resumed within its warm start"
  job.record.warm_steps = 0
  assert warm_starts.results_of(job).folder == folder
  with monkeypatch.context() as patched:
    patched.setattr(jax, "process_count", lambda: 2)
    assert warm_starts.results_of(job) is None
  with monkeypatch.context() as patched:
    patched.setenv(faults.VARIABLE, "warm_start:2:kill")
    assert warm_starts.results_of(job) is None
  monkeypatch.setenv(warm_starts.VARIABLE, "off")
  assert warm_starts.results_of(job) is None
