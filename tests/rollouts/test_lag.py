"""A sampler on separate devices: the tokens of a colocated one, or with a lag of older weights."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest

from jaxrl_llm.config.check import config_problems
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts.arrivals import gather
from jaxrl_llm.run.setup import experiment
from jaxrl_llm.run.setup.saved_state import ROLLOUT
from jaxrl_llm.run.steps import ahead, learn, stop
from jaxrl_llm.tasks.pipeline import example_iterator
from jaxrl_llm.tasks.sets import figures
from jaxrl_llm.workdir.metrics import reproducible
from tests.runs import VARIED, break_at, column, quick, rows, run_here, tiny_config

SHORT = VARIED | {
  "num_steps": 5, "warm_start.num_steps": 0, "checkpoint.every": 3, "eval.every": 3, "eval.num_prompts": 8,
  "eval.batch_prompts": 8, "learner.learning_rate": 1e-2, "log.tensorboard": False,
}  # fmt: skip
LAG = {"mesh.sampler": 1, "rollout.staleness": 2}


def config_of(changes):
  config = tiny_config(overrides=SHORT | changes)
  assert config_problems(config) == []
  return config


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
  """Function that runs a config with changes on a number of devices, each run only once."""

  @functools.cache
  def run(devices: int, changes: tuple = ()) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("run")
    run_here(config_of(dict(changes)), workdir, devices=devices)
    return workdir

  return lambda devices, **changes: run(devices, tuple((name.replace("__", "."), x) for name, x in changes.items()))


def assert_same_run(one: pathlib.Path, other: pathlib.Path) -> None:
  """Checks that two runs have the same tokens in every step and evaluation, and the same losses."""
  tokens = column(one, "rollout/tokens_sha256")
  assert column(other, "rollout/tokens_sha256") == tokens and len(set(tokens)) == len(tokens)
  for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "ratio/max"):
    np.testing.assert_allclose(column(other, name), column(one, name), rtol=1e-4, atol=1e-5, err_msg=name)
  assert column(other, "eval/response_length/mean", "eval") == column(one, "eval/response_length/mean", "eval")


@pytest.mark.exhaustive
def test_a_sampler_on_separate_devices_draws_the_same_tokens(run_of):
  apart = run_of(2, mesh__sampler=1)
  assert_same_run(run_of(1), apart)
  assert set(column(apart, "rollout/staleness")) == {0} and max(column(apart, "rollout_corr/logprob_abs_diff/max")) <= 1e-5
  assert len(set(column(apart, "perf/compiles")[1:])) == 1


@pytest.mark.parametrize(
  "changes",
  [
    pytest.param({}, marks=pytest.mark.exhaustive, id="data"),
    pytest.param({"mesh__fsdp": 2, "mesh__sampler_tensor": 2}, marks=pytest.mark.exhaustive, id="fsdp and tensor"),
  ],
)
def test_sub_meshes_draw_the_same_tokens(changes, run_of):
  apart = run_of(8, mesh__sampler=4, **changes)
  assert_same_run(run_of(4), apart)
  assert_same_run(run_of(8), apart)


@pytest.mark.parametrize(
  "changes",
  [
    pytest.param({"mesh__sampler_expert": 4}, marks=pytest.mark.exhaustive, id="expert"),
    pytest.param(
      {"mesh__fsdp": 2, "mesh__sampler_expert": 2, "mesh__sampler_tensor": 2}, marks=pytest.mark.exhaustive, id="expert and tensor"
    ),
  ],
)
def test_a_sampler_that_spreads_experts_draws_the_same_tokens(changes, run_of):
  assert_same_run(run_of(1, model__preset="nano-moe"), run_of(8, model__preset="nano-moe", mesh__sampler=4, **changes))


@pytest.mark.parametrize(
  "changes",
  [
    pytest.param({"model__lora_rank": 2}, marks=pytest.mark.exhaustive, id="adapters"),
    pytest.param({"model__preset": "nano-moe", "moe__replay": "R3", "moe__measure_every": 2}, marks=pytest.mark.exhaustive, id="experts"),
    pytest.param({"objective__kl_coef": 0.1, "learner__old_logprobs": "learner"}, marks=pytest.mark.exhaustive, id="a reference"),
  ],
)
def test_separate_devices_with_adapters_experts_and_references(changes, run_of):
  assert_same_run(run_of(1, **changes), run_of(2, mesh__sampler=1, **changes))


@pytest.fixture(scope="module")
def lagging(tmp_path_factory):
  """Workdir of a run with a lag, the weights before each RL step, and the loop's calls in order."""
  workdir, weights, events = tmp_path_factory.mktemp("lagging"), [], []

  def updating(run, batch, step, update=learn.update):
    if len(weights) == step:
      weights.append(jax.device_get(run.state.params))
    return update(run, batch, step)

  def noted(label, function):
    return lambda *args, **kwargs: (events.append(label), function(*args, **kwargs))[1]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(learn, "update", noted("update", updating))
    for place, name in ((ahead, "launch"), (learn, "with_logprobs"), (stop, "save")):
      patch.setattr(place, name, noted(name, getattr(place, name)))
    run_here(config_of(LAG), workdir, devices=2)
  return workdir, weights, events


@pytest.mark.slow
def test_rollouts_come_from_the_weights_of_an_earlier_step(lagging):
  """The test draws them again on one device, without the loop."""
  workdir, weights, _ = lagging
  # The checkpoint of step 3 comes before the fourth step.
  assert column(workdir, "rollout/staleness") == column(workdir, "rollout/staleness/mean") == [0, 1, 2, 0, 1]
  config, hashes = config_of({}), []
  with quick():
    built = experiment.build_experiment(config)
    prompts = example_iterator(built.task.train, batch_size=config.rollout.num_prompts, seed=config.seed)
    shardings = jax.tree.map(lambda x: x.sharding, built.learner.abstract_state.params)
    for step, version in enumerate([0, 0, 0, 3, 3]):
      params = jax.device_put(weights[version], shardings)
      examples = next(prompts)
      key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), ROLLOUT), step)
      drawing = built.drawing
      job = drawing.train.job(examples, key, params)
      drawing.queue.publish(params, version)
      playing = drawing.queue.begin(drawing.train.play, job)
      drawn, _ = gather(playing, job, built.task.tokenizer, prompt_buckets=drawing.prompt_buckets)
      batch = batch_lib.assess(drawn.rollouts, drawn.responses, examples, rewards=built.rewards)
      batch = batch._replace(advantages=np.zeros(drawn.rollouts.mask.shape), signal=np.zeros(len(examples), bool))
      hashes.append(batch_lib.metrics(batch)["rollout/tokens_sha256"])
  assert hashes == column(workdir, "rollout/tokens_sha256")


def test_the_log_probabilities_show_the_lag(lagging):
  workdir, *_ = lagging
  gap, lag = column(workdir, "rollout_corr/logprob_abs_diff/max"), column(workdir, "rollout/staleness")
  assert all((x > 1e-3) == (n > 0) for x, n in zip(gap, lag, strict=True)), gap


def test_nothing_compiles_and_the_weights_move_once_a_step(lagging):
  workdir, *_ = lagging
  assert len(set(column(workdir, "perf/compiles")[1:])) == 1
  assert all(x >= 0 for x in column(workdir, "timing_s/weight_sync"))


class Killed(Exception):
  """Stand-in for a kill: it is not caught, and nothing is saved."""


def lines(workdir: pathlib.Path) -> list[str]:
  """Returns rows without values that depend on the clock or the process, as text."""
  every = [row for phase in ("warm_start", "rl", "eval") for row in rows(workdir, phase)]
  return [json.dumps(reproducible(row)) for row in every]


@pytest.mark.parametrize(
  "step",
  [
    pytest.param(1, marks=pytest.mark.exhaustive, id="before the checkpoint"),
    pytest.param(4, marks=pytest.mark.slow, id="after it"),
  ],
)
def test_a_killed_run_resumes_as_an_unbroken_one(step, lagging, tmp_path):
  """The kill strikes while the next rollouts are in flight, or about to be used."""
  golden, *_ = lagging

  def update(run, batch, at, update=learn.update):
    if at == step:
      raise Killed
    return update(run, batch, at)

  with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
    patch.setattr(learn, "update", update)
    run_here(config_of(LAG), tmp_path, devices=2)
  summary = run_here(config_of(LAG), tmp_path, devices=2)
  assert summary["attempts"] == 2 and lines(tmp_path) == lines(golden)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("devices", "changes"),
  [
    pytest.param(4, {"model.preset": "nano-moe", "mesh.fsdp": 2, "mesh.expert": 2}, id="sharded over four devices"),
    pytest.param(
      1,
      {"model.preset": "nano-vl", "task.name": "figures", "task.levels": (1,), "rollout.prompt_buckets": None, "learner.row_tokens": None,
       "learner.row_buckets": None, "warm_start.row_buckets": None},
      id="pictures",
    ),
  ],
)  # fmt: skip
def test_a_lag_of_two_steps_on_any_mesh_and_with_pictures(devices, changes, tmp_path, monkeypatch):
  """Killed between steps that were begun together, it has the bits of an unbroken run."""
  monkeypatch.setattr(figures, "PROBLEMS_PER_ANSWER", 10)
  config = config_of(changes | {"rollout.staleness": 2, "task.data_dir": str(tmp_path / "data")})
  run_here(config, tmp_path / "whole", devices=devices)
  break_at(config, tmp_path / "broken", 4, devices=devices)
  run_here(config, tmp_path / "broken", devices=devices)
  assert lines(tmp_path / "broken") == lines(tmp_path / "whole")
  assert column(tmp_path / "whole", "rollout/staleness") == [0, 1, 2, 0, 1]


def test_the_next_rollouts_are_dispatched_before_the_learner_works(lagging):
  """This makes the two overlap. No prompts are read ahead of a checkpoint."""
  _, _, events = lagging
  learn = ["with_logprobs"] * 2 + ["update"] * 2
  until_checkpoint = ["launch", "launch", "launch", *learn, *learn, *learn, "save"]
  assert events == ["save", *until_checkpoint, "launch", "launch", *learn, *learn, "save"]


@pytest.mark.parametrize(("lag", "expected"), [(0, [1, 2, 3, 4, 5, 6, 7]), (1, [2, 3, 3, 5, 6, 6, 7]), (2, [3, 3, 3, 6, 6, 6, 7])])
def test_every_step_is_begun_once_and_not_across_a_checkpoint(lag, expected):
  config = config_of(LAG | {"num_steps": 7, "checkpoint.every": 3})
  config.rollout.staleness = lag
  assert [ahead.horizon(config, step) for step in range(7)] == expected
  assert [ahead.saves(config, step) for step in range(7)] == [False, False, True, False, False, True, True]
