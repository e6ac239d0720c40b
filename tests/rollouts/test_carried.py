"""Groups that continue in the next step: none is truncated, dropped or learned from twice.

A resumed run carries the same groups as an unbroken one.
"""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.config.check import config_problems, row_problems
from jaxrl_llm.decoding.sampler import make_sampler
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rollouts import carried
from jaxrl_llm.rollouts.arrivals import drawn_of, wait_for
from jaxrl_llm.rollouts.jobs import Draws, Job
from jaxrl_llm.rollouts.sweeps import Sweep, continued
from jaxrl_llm.types import StopReason
from jaxrl_llm.workdir.metrics import reproducible
from tests.runs import VARIED, column, rows, run_here, tiny_config

TOKENIZER = ByteTokenizer()
GROUP, BUDGET, LEARNED, SPARE = 2, 12, 4, 2
STOPS = tuple(range(0, 256, 8))
FAST = {"xla_backend_optimization_level": 0}


@functools.cache
def sampler_of(name: str):
  """Makes a policy with weights so large that it is not uniform, and its sampler.

  Its responses end early and late.
  """
  model = make_model(preset(name, vocab_size=264), mesh=mesh_lib.make_mesh(data=1, tensor=8))
  rng = np.random.default_rng(0)
  scale = lambda path, p: jnp.asarray((path[-1].key == "scale") + 0.2 * rng.standard_normal(p.shape), jnp.float32)
  params = jax.tree_util.tree_map_with_path(scale, jax.eval_shape(model.init, jax.random.key(0)))
  model = make_model(preset(name, vocab_size=264))
  sample = make_sampler(
    model, group_size=GROUP, max_new_tokens=BUDGET, stop_ids=STOPS, pad_id=TOKENIZER.pad_id, slots=8, record_routing=True
  )
  return model, params, jax.jit(sample, compiler_options=FAST)


def steps_of(name: str, num_steps: int):
  """Yields each step's groups, rollouts and the rows learned from, for a constant policy."""
  model, params, sample = sampler_of(name)
  placing, new, groups = dict(mesh=mesh_lib.make_mesh(data=1, tensor=8), prompt_buckets=(6,)), iter(range(100, 1000)), carried.NO_GROUPS
  experts = model.config.experts
  draws = Draws(BUDGET, 6, stop_ids=STOPS, routes=experts and (model.config.num_layers, experts.top_k))
  for step in range(num_steps):
    examples = [{"prompt": str(next(new))} for _ in range(LEARNED + SPARE - len(groups.examples))]
    groups = carried.join(groups, examples, [100 * step + i for i in range(GROUP * len(examples))], step=step)
    job = Job(groups.examples, GROUP, groups.seeds, "", draws, begun=groups.conversations, enough=LEARNED)
    gathered = wait_for(Sweep(params, job, sample=sample, tokenizer=TOKENIZER, **placing), job)
    drawn, _ = drawn_of(gathered, job, TOKENIZER, np.arange(len(job.seeds)), prompt_buckets=(6,))
    learned, kept = carried.take(groups, gathered.played, num_groups=LEARNED)
    yield groups, gathered.played, drawn.rollouts, learned
    # Passes the groups through JSON, as a checkpoint does.
    groups = carried.from_json(json.loads(json.dumps(carried.to_json(kept))))


@pytest.mark.parametrize("name", ["nano", pytest.param("nano-moe", marks=pytest.mark.slow)])
def test_nothing_is_cut_dropped_or_learned_from_twice(name):
  model, params, sample = sampler_of(name)
  score = jax.jit(lambda *args: jax.nn.log_softmax(model.logits(*args)), compiler_options=FAST)
  learned_from, ages, num_continued, num_steps = [], [], 0, 6
  for step, (groups, played, rollouts, learned) in enumerate(steps_of(name, num_steps)):
    names = [groups.examples[row // GROUP]["prompt"] for row in learned[::GROUP]]
    assert len(names) == LEARNED and names == sorted(names)  # Oldest first.
    learned_from += names
    metrics = carried.metrics(groups, played, learned, step=step)
    ages.append(metrics["rollout/max_age"])
    lengths, before = rollouts.mask[learned].sum(axis=1), np.array([len(groups.conversations[row].tokens) for row in learned])
    assert metrics["rollout/carried_groups"] == sum(groups.steps[row // GROUP] < step for row in learned[::GROUP])
    assert metrics["rollout/carried_tokens"] == pytest.approx(before.sum() / lengths.sum())
    num_continued += int(np.sum((before > 0) & (before < lengths)))
    # Each response has ended, by itself or at its budget, and keeps the tokens of earlier steps.
    last = rollouts.tokens[learned, lengths - 1]
    assert np.all(np.isin(last, STOPS) | (lengths == BUDGET))
    assert np.all(rollouts.reasons[learned] != StopReason.UNFINISHED)
    for row, talk in enumerate(groups.conversations):
      for field in ("tokens", "logprobs"):
        np.testing.assert_array_equal(getattr(rollouts, field)[row, : len(talk.tokens)], getattr(talk, field))
    # One policy drew all parts, so the log-probabilities are those of the whole response under it.
    whole = np.concatenate([rollouts.prompts, rollouts.tokens], axis=1)
    seen = np.concatenate([rollouts.prompt_mask, rollouts.mask], axis=1)
    logprobs = np.asarray(score(params, whole, np.maximum(np.cumsum(seen, axis=1) - 1, 0), seen.astype(np.int32)))
    expected = np.take_along_axis(logprobs[:, -BUDGET - 1 : -1], rollouts.tokens[..., None], axis=2)[..., 0]
    np.testing.assert_allclose(rollouts.logprobs[rollouts.mask], expected[rollouts.mask], atol=1e-5)
    if name == "nano-moe":  # All tokens but the last have known routes.
      fed = np.concatenate([rollouts.prompt_mask, rollouts.mask[:, 1:], np.zeros((len(seen), 1), bool)], axis=1)
      assert np.array_equal(np.all(rollouts.routing >= 0, axis=(2, 3)), fed)
  started = [str(100 + i) for i in range(SPARE + num_steps * LEARNED)]
  assert len(set(learned_from)) == len(learned_from) == num_steps * LEARNED and set(learned_from) <= set(started)
  assert max(ages) > 0 and num_continued > 5  # Many were drawn in parts.
  assert set(started) - set(learned_from) <= {example["prompt"] for example in groups.examples}
  assert sample._cache_size() == 1


def test_a_checkpoint_of_an_earlier_version_is_continued():
  """It held rows of the sampler's arrays, with routes from the prompt's last token on."""
  routes = np.arange(6, dtype=np.int16).reshape(3, 1, 2)
  row = {"tokens": [5, 6, 7], "logprobs": [-1.5, -0.1, -2.0], "raw_logprobs": [-1.0, -0.2, -2.5], "routing": routes.tolist()}
  rows = [{"reason": int(StopReason.UNFINISHED), **row}, {"reason": int(StopReason.TOKEN), **row}]
  groups = carried.from_json({"examples": [{"prompt": "1"}], "sequences": rows, "steps": [4]})
  assert groups.examples == [{"prompt": "1"}] and groups.steps == [4] and len(groups.seeds) == 2
  job = Job(groups.examples, 2, groups.seeds, "", Draws(4, 4, routes=(1, 2)), begun=groups.conversations, enough=1)
  partial, enough = continued(job).partial, continued(job).enough_groups
  assert partial.lengths.tolist() == [3, 3] and partial.reasons.tolist() == [StopReason.UNFINISHED, StopReason.TOKEN] and enough == 1
  assert partial.tokens[0, :3].tolist() == row["tokens"] and np.array_equal(partial.routing[1, :3], routes)
  np.testing.assert_array_equal(partial.raw_logprobs[0, :3], np.float32(row["raw_logprobs"]))


# Single letters end a response, so that some responses of an untrained policy end early.
SHORT = VARIED | {
  "num_steps": 5, "warm_start.num_steps": 0, "checkpoint.every": 3, "eval.every": 5, "eval.num_prompts": 8, "eval.batch_prompts": 8,
  "learner.learning_rate": 1e-2, "log.tensorboard": False, "rollout.num_prompts": 4, "rollout.spare_prompts": 3,
  "rollout.stop_strings": tuple("abcdefghijklmnopqrstuvwx"),
}  # fmt: skip


def config_of(**changes):
  config = tiny_config(overrides=SHORT | {name.replace("__", "."): x for name, x in changes.items()})
  assert config_problems(config) == []
  return config


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> pathlib.Path:
  workdir = tmp_path_factory.mktemp("golden")
  run_here(config_of(), workdir)
  return workdir


def lines(workdir: pathlib.Path) -> list[str]:
  """Returns rows without values that depend on the clock or the process, as text."""
  every = [row for phase in ("rl", "eval") for row in rows(workdir, phase)]
  return [json.dumps(reproducible(row)) for row in every]


@pytest.mark.slow
def test_a_run_learns_from_older_parts_and_measures_their_age(golden):
  assert np.all(np.isfinite(column(golden, "actor/loss"))) and min(column(golden, "actor/grad_norm")) > 0
  assert len(set(column(golden, "perf/compiles")[1:])) == 1
  fraction, gap = column(golden, "rollout/carried_tokens"), column(golden, "rollout_corr/logprob_abs_diff/max")
  assert fraction[0] == 0 and sum(x > 0 for x in fraction) > 2
  # The sampler's log-probabilities are those of the weights that drew each part.
  assert all((x > 1e-4) == (share > 0) for x, share in zip(gap, fraction, strict=True)), (gap, fraction)
  assert column(golden, "rollout/max_age")[0] == 0 and max(column(golden, "rollout/carried_groups")) <= 3


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_carried_groups(golden, tmp_path):
  """After a kill before the checkpoint of step 5, steps 4 and 5 are repeated."""
  killed = tmp_path / "killed"
  shutil.copytree(golden, killed)
  shutil.rmtree(killed / "checkpoints" / "5")
  summary = run_here(config_of(), killed)
  assert summary["attempts"] == 2 and lines(killed) == lines(golden)
  assert column(golden, "rollout/carried_tokens")[3] > 0  # The checkpoint's groups were restored.


@pytest.mark.exhaustive
def test_a_run_that_draws_ahead_carries_groups_and_resumes(tmp_path):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  config = config_of(rollout__staleness=1)
  run_here(config, whole)
  shutil.copytree(whole, killed)
  shutil.rmtree(killed / "checkpoints" / "5")
  run_here(config, killed)
  assert lines(killed) == lines(whole) and column(whole, "rollout/staleness") == [0, 1, 1, 0, 1]
  assert min(column(whole, "rollout/carried_tokens")[3:]) > 0


@pytest.mark.exhaustive
def test_experts_and_their_routes_are_carried(tmp_path):
  config = config_of(model__preset="nano-moe", moe__replay="R3", learner__learning_rate=1e-30, num_steps=4, checkpoint__every=2)
  run_here(config, tmp_path)
  assert max(column(tmp_path, "rollout_corr/logprob_abs_diff/max")) <= 1e-5 and max(column(tmp_path, "rollout/carried_tokens")) > 0


def test_devices_that_do_not_divide_the_prompts_in_the_sampler_are_refused():
  (line,) = row_problems(config_of(), 1, 4)
  assert line.startswith("config.rollout.num_prompts + rollout.spare_prompts: 7 is not a multiple of 4 devices")
  assert line.endswith("the next multiple is 8")
  assert not list(row_problems(config_of(rollout__spare_prompts=4), 1, 4))


@pytest.mark.exhaustive
def test_devices_divide_the_prompts_in_the_sampler(tmp_path):
  """The sampler has 4 + 4 spare prompts for four devices."""
  run_here(config_of(rollout__spare_prompts=4), tmp_path / "one")
  run_here(config_of(rollout__spare_prompts=4), tmp_path / "four", devices=4)
  assert column(tmp_path / "one", "rollout/tokens_sha256") == column(tmp_path / "four", "rollout/tokens_sha256")
