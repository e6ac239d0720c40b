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
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.pretrained.byte_tokenizer import ByteTokenizer
from jaxrl_llm.rollouts import partial, rollout
from jaxrl_llm.sampler import make_sampler
from jaxrl_llm.types import Rollouts, StopReason
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
  mesh, new = mesh_lib.make_mesh(data=1, tensor=8), iter(range(100, 1000))
  experts = model.config.experts
  carried = partial.no_groups(BUDGET, experts and (model.config.num_layers, experts.top_k))
  for step in range(num_steps):
    examples = [{"prompt": str(next(new))} for _ in range(LEARNED + SPARE - len(carried.examples))]
    groups = partial.join(carried, examples, step=step, group_size=GROUP)
    rollouts = rollout.dispatch(
      sample, params, groups.examples, jax.random.key(step), mesh=mesh, tokenizer=TOKENIZER, prompt_buckets=(6,),
      requests=partial.requests(groups, num_groups=LEARNED),
    )  # fmt: skip
    rollouts, _ = rollout.collect(rollouts, TOKENIZER)
    learned, carried = partial.take(groups, rollouts, num_groups=LEARNED)
    yield groups, rollouts, learned
    # Passes the groups through JSON, as a checkpoint does.
    empty = partial.no_groups(BUDGET, experts and (model.config.num_layers, experts.top_k))
    carried = partial.from_json(json.loads(json.dumps(partial.to_json(carried))), empty)


@pytest.mark.parametrize("name", ["nano", pytest.param("nano-moe", marks=pytest.mark.slow)])
def test_nothing_is_cut_dropped_or_learned_from_twice(name):
  model, params, sample = sampler_of(name)
  score = jax.jit(lambda *args: jax.nn.log_softmax(model.logits(*args)), compiler_options=FAST)
  learned_from, ages, num_continued, num_steps = [], [], 0, 6
  for step, (groups, rollouts, learned) in enumerate(steps_of(name, num_steps)):
    names = [groups.examples[row // GROUP]["prompt"] for row in learned[::GROUP]]
    assert len(names) == LEARNED and names == sorted(names)  # Oldest first.
    learned_from += names
    metrics = partial.metrics(groups, rollouts, learned, step=step)
    ages.append(metrics["rollout/max_age"])
    lengths, before = rollouts.mask[learned].sum(axis=1), groups.partial.lengths[learned]
    assert metrics["rollout/carried_groups"] == sum(groups.steps[row // GROUP] < step for row in learned[::GROUP])
    assert metrics["rollout/carried_tokens"] == pytest.approx(before.sum() / lengths.sum())
    num_continued += int(np.sum((before > 0) & (before < lengths)))
    # Each response has ended, by itself or at its budget, and keeps the tokens of earlier steps.
    last = rollouts.tokens[learned, lengths - 1]
    assert np.all(np.isin(last, STOPS) | (lengths == BUDGET))
    assert np.all(rollouts.reasons[learned] != StopReason.UNFINISHED)
    there = np.arange(BUDGET) < groups.partial.lengths[:, None]
    for field in ("tokens", "logprobs"):
      np.testing.assert_array_equal(getattr(rollouts, field)[there], getattr(groups.partial, field)[there])
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


def rollouts_of(lengths, reasons):
  shape = (len(lengths), 4)
  mask = np.arange(4) < np.array(lengths)[:, None]
  tokens = np.where(mask, np.arange(np.prod(shape)).reshape(shape), 99).astype(np.int32)
  logprobs = (np.where(mask, -np.sqrt(np.arange(np.prod(shape)).reshape(shape) + 0.1), 0)).astype(np.float32)
  prompts = np.zeros((len(lengths), 2), np.int32)
  return Rollouts(
    prompts, prompts == 0, tokens, mask, logprobs, np.array(reasons) == StopReason.TOKEN, raw_logprobs=2 * logprobs,
    reasons=np.array(reasons, np.int8), routing=np.arange(len(lengths) * 6 * 2, dtype=np.int16).reshape(-1, 6, 1, 2),
  )  # fmt: skip


TOKEN, LENGTH, UNFINISHED = int(StopReason.TOKEN), int(StopReason.LENGTH), int(StopReason.UNFINISHED)
ROLLOUTS = rollouts_of([2, 3, 1, 2, 4, 1, 3, 4], [UNFINISHED, TOKEN, TOKEN, TOKEN, LENGTH, TOKEN, TOKEN, LENGTH])
EXAMPLES = [{"prompt": name, "level": i} for i, name in enumerate("abcd")]


def joined() -> partial.Groups:
  empty = partial.no_groups(4, (1, 2))
  return partial.join(partial.join(empty, EXAMPLES[:1], step=3, group_size=2), EXAMPLES[1:], step=4, group_size=2)


def test_the_oldest_complete_groups_are_learned_from_and_the_others_carried():
  groups = joined()
  assert groups.steps == [3, 4, 4, 4] and groups.partial.tokens.shape == (8, 4)
  learned, carried = partial.take(groups, ROLLOUTS, num_groups=2)
  assert learned.tolist() == [2, 3, 4, 5]
  assert [x["prompt"] for x in carried.examples] == ["a", "d"] and carried.steps == [3, 4]
  assert carried.partial.reasons.tolist() == [
    UNFINISHED,
    TOKEN,
    TOKEN,
    LENGTH,
  ] and carried.partial.lengths.tolist() == [2, 3, 3, 4]
  np.testing.assert_array_equal(carried.partial.tokens, ROLLOUTS.tokens[[0, 1, 6, 7]])
  np.testing.assert_array_equal(carried.partial.raw_logprobs, ROLLOUTS.raw_logprobs[[0, 1, 6, 7]])
  # The carried groups are complete in step 5 and come first.
  groups = partial.join(carried, EXAMPLES[1:3], step=5, group_size=2)
  again = ROLLOUTS._replace(reasons=np.full(8, TOKEN, np.int8), mask=np.ones((8, 4), bool))
  learned, later = partial.take(groups, again, num_groups=3)
  assert learned.tolist() == [0, 1, 2, 3, 4, 5] and later.steps == [5]
  assert partial.metrics(groups, again, learned, step=5) == {
    "rollout/carried_groups": 2, "rollout/carried_tokens": 12 / 24, "rollout/max_age": 2,
  }  # fmt: skip


def test_too_few_complete_groups_are_an_error():
  with pytest.raises(ValueError, match="found 3 complete groups of 4, expected 4 or more"):
    partial.take(joined(), ROLLOUTS, num_groups=4)


def test_a_checkpoint_restores_every_bit():
  _, carried = partial.take(joined(), ROLLOUTS, num_groups=2)
  saved = json.loads(json.dumps(partial.to_json(carried)))
  restored = partial.from_json(saved, partial.no_groups(4, (1, 2)))
  assert restored.examples == carried.examples and restored.steps == carried.steps
  there = np.arange(4) < carried.partial.lengths[:, None]
  for name, x in carried.partial._asdict().items():
    if x is not None:
      back = getattr(restored.partial, name)
      assert back.dtype == x.dtype and np.array_equal(*((back, x) if x.ndim == 1 else (back[there], x[there]))), name
  assert len(partial.from_json(partial.to_json(partial.no_groups(4)), partial.no_groups(4)).examples) == 0


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


def assert_same_run(one: pathlib.Path, other: pathlib.Path) -> None:
  """Checks that two runs have the same tokens, rewards and losses, and that `other` streamed."""
  tokens = column(one, "rollout/tokens_sha256")
  assert column(other, "rollout/tokens_sha256") == tokens and len(set(tokens)) == len(tokens)
  for name in ("critic/rewards/mean", "reward/soft_overlong/mean", "group/frac_reward_zero_std"):
    assert column(other, name) == column(one, name), name
  for name in ("actor/loss", "actor/grad_norm", "critic/advantages/max"):
    np.testing.assert_allclose(column(other, name), column(one, name), rtol=1e-4, atol=1e-5, err_msg=name)
  assert min(column(other, "perf/reward_overlap_s")) > 0 and "perf/reward_overlap_s" not in rows(one, "rl")[0]
  assert len(set(column(other, "perf/compiles")[1:])) == 1


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
def test_a_streamed_run_carries_the_same_groups(golden, tmp_path):
  run_here(config_of(rollout__report_every=4), tmp_path)
  assert_same_run(golden, tmp_path)
  assert column(tmp_path, "rollout/carried_tokens") == column(golden, "rollout/carried_tokens")


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
