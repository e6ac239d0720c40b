"""A sampler on devices of its own draws what a colocated one draws; with a lag of one, what the weights of one step before draw."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest

from jaxrl_llm import train
from jaxrl_llm.config.check import problems
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts import pipelining, rollout
from jaxrl_llm.run import experiment, learn, stopping
from jaxrl_llm.run.saved_state import ROLLOUT
from jaxrl_llm.tasks.pipeline import example_iterator
from tests.runs import VARIED, column, quick, rows, run_here, tiny_config

SHORT = VARIED | {
  "num_steps": 5, "warm_start.num_steps": 0, "checkpoint.every": 3, "eval.every": 3, "eval.num_prompts": 8,
  "eval.batch_prompts": 8, "learner.learning_rate": 1e-2, "log.tensorboard": False,
}  # fmt: skip
LAG = {"mesh.sampler": 1, "rollout.staleness": 1}


def config_of(changes):
  config = tiny_config(overrides=SHORT | changes)
  assert problems(config) == []
  return config


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
  """Runs on a number of devices with other values for some fields; the same run only once."""

  @functools.cache
  def run(devices: int, changes: tuple = ()) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("run")
    run_here(config_of(dict(changes)), workdir, devices=devices)
    return workdir

  return lambda devices, **changes: run(devices, tuple((name.replace("__", "."), x) for name, x in changes.items()))


def assert_same_run(one: pathlib.Path, other: pathlib.Path) -> None:
  """The same tokens in every step and evaluation, and the same losses."""
  tokens = column(one, "rollout/tokens_sha256")
  assert column(other, "rollout/tokens_sha256") == tokens and len(set(tokens)) == len(tokens)
  for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "ratio/max"):
    np.testing.assert_allclose(column(other, name), column(one, name), rtol=1e-4, atol=1e-5, err_msg=name)
  assert column(other, "eval/response_length/mean", "eval") == column(one, "eval/response_length/mean", "eval")


@pytest.mark.slow
def test_a_sampler_of_its_own_draws_the_same_tokens(run_of):
  apart = run_of(2, mesh__sampler=1)
  assert_same_run(run_of(1), apart)
  assert set(column(apart, "rollout/staleness")) == {0} and max(column(apart, "rollout_corr/logprob_abs_diff/max")) <= 1e-5
  assert len(set(column(apart, "perf/compiles")[1:])) == 1


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"mesh__fsdp": 2, "mesh__sampler_tensor": 2}], ids=str)
def test_sub_meshes_draw_the_same_tokens(changes, run_of):
  apart = run_of(8, mesh__sampler=4, **changes)
  assert_same_run(run_of(4), apart)
  assert_same_run(run_of(8), apart)


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [
    {"model__lora_rank": 2},
    {"model__preset": "nano-moe", "moe__replay": "R3", "moe__measure_every": 2},
    {"objective__kl_coef": 0.1, "learner__old_logprobs": "learner"},
  ],
  ids=str,
)
def test_adapters_experts_and_references_too(changes, run_of):
  assert_same_run(run_of(1, **changes), run_of(2, mesh__sampler=1, **changes))


@pytest.fixture(scope="module")
def lagging(tmp_path_factory):
  """A run with a lag; the weights before each of its RL steps; and what its loop did, in order."""
  workdir, weights, events = tmp_path_factory.mktemp("lagging"), [], []

  def updating(this, batch, step, update=learn.update):
    if len(weights) == step:
      weights.append(jax.device_get(this.state.params))
    return update(this, batch, step)

  def noted(label, function):
    return lambda *args, **kwargs: (events.append(label), function(*args, **kwargs))[1]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(learn, "update", noted("update", updating))
    for place, name in ((train, "launch"), (learn, "with_logprobs"), (stopping, "save")):
      patch.setattr(place, name, noted(name, getattr(place, name)))
    run_here(config_of(LAG), workdir, devices=2)
  return workdir, weights, events


def test_rollouts_come_from_the_weights_of_one_step_before(lagging):
  """Drawn again here, on one device and without the loop."""
  workdir, weights, _ = lagging
  assert column(workdir, "rollout/staleness") == [0, 1, 1, 0, 1]  # The checkpoint of step 3 lies before the fourth.
  config, hashes = config_of({}), []
  with quick():
    built = experiment.build(config)
    prompts = example_iterator(built.task.train, batch_size=config.rollout.num_prompts, seed=config.seed)
    shardings = jax.tree.map(lambda x: x.sharding, built.learner.abstract_state.params)
    for step, version in enumerate([0, 0, 1, 3, 3]):
      params = jax.device_put(weights[version], shardings)
      examples = next(prompts)
      key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), ROLLOUT), step)
      placing = dict(mesh=built.mesh, tokenizer=built.task.tokenizer, prompt_buckets=config.rollout.prompt_buckets)
      found = rollout.draw(built.sampler.sample, params, examples, key, **placing)
      batch = batch_lib.assess(*found, examples, rewards=built.rewards)
      hashes.append(batch_lib.metrics(batch._replace(advantages=np.zeros(found[0].mask.shape)))["rollout/tokens_sha256"])
  assert hashes == column(workdir, "rollout/tokens_sha256")


def test_the_ratio_holds_the_lag(lagging):
  workdir, *_ = lagging
  gap, lag = column(workdir, "rollout_corr/logprob_abs_diff/max"), column(workdir, "rollout/staleness")
  assert all((x > 1e-3) == (n == 1) for x, n in zip(gap, lag, strict=True)), gap


def test_nothing_compiles_and_the_weights_move_once_a_step(lagging):
  workdir, *_ = lagging
  assert len(set(column(workdir, "perf/compiles")[1:])) == 1
  assert all(x >= 0 for x in column(workdir, "timing_s/weight_sync"))


class Killed(Exception):
  """Stands for a kill: nothing is caught and nothing is saved on the way out."""


def lines(workdir: pathlib.Path) -> list[str]:
  """Rows without what depends on the clock or the process; equal text is equal bits."""
  varies = ("timing_s/", "perf/throughput", "perf/compiles", "perf/max_memory_allocated_gb")
  every = [row for phase in ("warm_start", "rl", "eval") for row in rows(workdir, phase)]
  return [json.dumps({name: x for name, x in row.items() if not name.startswith(varies)}) for row in every]


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow, id="before the checkpoint"), pytest.param(4, id="after it")])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(step, lagging, tmp_path):
  """Killed while the next rollouts are in flight, or about to be used."""
  golden, *_ = lagging

  def update(this, batch, at, update=learn.update):
    if at == step:
      raise Killed
    return update(this, batch, at)

  with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
    patch.setattr(learn, "update", update)
    run_here(config_of(LAG), tmp_path, devices=2)
  summary = run_here(config_of(LAG), tmp_path, devices=2)
  assert summary["attempts"] == 2 and lines(tmp_path) == lines(golden)


def test_the_next_rollouts_are_dispatched_before_the_learner_works(lagging):
  """What makes the two overlap; and the prompts are not read ahead of a checkpoint."""
  _, _, events = lagging
  learn = ["with_logprobs"] * 2 + ["update"] * 2
  until_checkpoint = ["launch", "launch", *learn, "launch", *learn, *learn, "save"]
  assert events == ["save", *until_checkpoint, "launch", "launch", *learn, *learn, "save"]


def test_every_step_is_drawn_once():
  """Whatever the lag: a step's rollouts come from the step itself or from the one before, and a checkpoint parts them."""
  config = config_of(LAG | {"num_steps": 7, "checkpoint.every": 3})
  assert [pipelining.draws_ahead(config, step) for step in range(7)] == [True, True, False, True, True, False, False]
  assert [pipelining.saves(config, step) for step in range(7)] == [False, False, True, False, False, True, True]
  config.rollout.staleness = 0
  assert not any(pipelining.draws_ahead(config, step) for step in range(7))
