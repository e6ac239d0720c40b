"""The decode loop: its draws, its records, its end, and changes that must not affect a draw."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.sampler import make_filter, make_sampler
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.learner.train_step import policy_outputs
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.types import TrainBatch
from tests.batches import logprobs_of
from tests.marks import few

PAD = 256
NUM_SLOTS, BUDGET, GROUP = 6, 8, 2
# About one token in six ends a response, so that lengths differ.
STOPS = tuple(range(0, 264, 6))
PROMPT_LENGTHS = (6, 3, 1, 4, 2, 6, 5, 3)


@functools.cache
def nano():
  """Returns a model and weights whose distributions are neither flat nor a single token."""
  model = make_model(preset("nano", vocab_size=264))
  rng = np.random.default_rng(0)
  draw = lambda path, p: jnp.asarray((path[-1].key == "scale") + 0.2 * rng.standard_normal(p.shape), jnp.float32)
  return model, jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, jax.random.key(0)))


def make_prompts(lengths, num_slots):
  rng = np.random.default_rng(1)
  prompts, mask = np.full((len(lengths), num_slots), PAD, np.int32), np.zeros((len(lengths), num_slots), bool)
  for row, length in enumerate(lengths):
    prompts[row, num_slots - length :] = rng.integers(256, size=length)
    mask[row, num_slots - length :] = True
  return jnp.asarray(prompts), jnp.asarray(mask)


@functools.cache
def sampler_of(temperature=1.0, top_k=0, top_p=1.0, **more):
  model, _ = nano()
  settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, **more}
  sample = make_sampler(model, group_size=GROUP, max_new_tokens=BUDGET, stop_ids=STOPS, pad_id=PAD, **settings)
  # The programs run for milliseconds, so compilation dominates.
  return jax.jit(sample, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def rollouts_of(seed=0, **settings):
  _, params = nano()
  return jax.device_get(sampler_of(**settings)(params, *make_prompts(PROMPT_LENGTHS, NUM_SLOTS), jax.random.key(seed)))


def same_rollouts(a, b):
  np.testing.assert_array_equal(a.tokens, b.tokens)
  np.testing.assert_array_equal(a.mask, b.mask)
  np.testing.assert_array_equal(a.stopped, b.stopped)
  np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def learner_batch(rollouts):
  """Lays out one sequence per row from slot 0, unlike the sampler."""
  width = NUM_SLOTS + BUDGET
  ints = np.zeros((3, len(rollouts.tokens), width), np.int32)
  drawn, logprobs = np.zeros(ints.shape[1:], np.float32), np.zeros(ints.shape[1:], np.float32)
  for row in range(len(rollouts.tokens)):
    prompt, response = rollouts.prompts[row][rollouts.prompt_mask[row]], rollouts.tokens[row][rollouts.mask[row]]
    start, stop = len(prompt), len(prompt) + len(response)
    ints[0, row, :stop], ints[1, row, :stop], ints[2, row, :stop] = np.concatenate([prompt, response]), np.arange(stop), 1
    drawn[row, start:stop], logprobs[row, start:stop] = 1, rollouts.logprobs[row][rollouts.mask[row]]
  zeros = jnp.zeros(drawn.shape)
  return TrainBatch(*map(jnp.asarray, ints), jnp.asarray(drawn), zeros, zeros, sampler_logprobs=jnp.asarray(logprobs))


@pytest.mark.parametrize("settings", few([{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}], 0))
def test_logprobs_are_the_learners(settings):
  model, params = nano()
  rollouts = rollouts_of(**settings)
  batch = learner_batch(rollouts)
  logprobs = logprobs_of(jax.jit(model.logits))
  outputs = policy_outputs(logprobs, make_filter(**settings), params, batch)
  drawn = np.asarray(batch.mask) > 0
  assert drawn.sum() > 40
  np.testing.assert_allclose(np.asarray(outputs.logprobs)[drawn], batch.sampler_logprobs[drawn], atol=1e-5)
  if settings:  # The filters have an effect here: under the plain model the tokens are less likely.
    plain = policy_outputs(logprobs, make_filter(), params, batch)
    assert np.mean(np.asarray(outputs.logprobs - plain.logprobs)[drawn]) > 0.1
    assert np.all(np.asarray(outputs.logprobs)[drawn] > -20)  # Only kept tokens were drawn.


def test_a_response_ends_with_its_first_stop_token_or_at_the_budget():
  rollouts = rollouts_of()
  lengths = rollouts.mask.sum(axis=1)
  is_stop = np.isin(rollouts.tokens, STOPS)
  assert rollouts.tokens.shape == (len(PROMPT_LENGTHS) * GROUP, BUDGET)
  np.testing.assert_array_equal(rollouts.mask, np.arange(BUDGET) < lengths[:, None])
  for row, length in enumerate(lengths):
    assert 1 <= length <= BUDGET
    assert not is_stop[row, : length - 1].any()
    assert is_stop[row, length - 1] == rollouts.stopped[row]
    assert rollouts.stopped[row] or length == BUDGET
  assert np.all(rollouts.tokens[~rollouts.mask] == PAD) and np.all(rollouts.logprobs[~rollouts.mask] == 0)
  assert np.all(rollouts.logprobs[rollouts.mask] < 0)
  # All cases occurred: early stops by different tokens, and rows that reached the budget.
  assert len(set(lengths)) > 3 and not rollouts.stopped.all()
  assert len(set(rollouts.tokens[np.arange(len(lengths)), lengths - 1][rollouts.stopped])) > 2


def test_groups_are_consecutive_and_their_samples_differ():
  rollouts = rollouts_of()
  prompts, mask = make_prompts(PROMPT_LENGTHS, NUM_SLOTS)
  np.testing.assert_array_equal(rollouts.prompts, np.repeat(prompts, GROUP, axis=0))
  np.testing.assert_array_equal(rollouts.prompt_mask, np.repeat(mask, GROUP, axis=0))
  groups = rollouts.tokens.reshape(-1, GROUP, BUDGET)
  assert np.mean(np.any(groups[:, 0] != groups[:, 1], axis=1)) > 0.8


def test_draws_follow_the_key_and_nothing_else():
  _, params = nano()
  again = jax.device_get(sampler_of()(params, *make_prompts(PROMPT_LENGTHS, NUM_SLOTS), jax.random.key(0)))
  chex.assert_trees_all_equal(again, rollouts_of())
  assert np.mean(rollouts_of(seed=1).tokens != again.tokens) > 0.5


def test_a_row_does_not_depend_on_its_neighbours():
  _, params = nano()
  prompts, mask = make_prompts(PROMPT_LENGTHS, NUM_SLOTS)
  other = jax.device_get(sampler_of()(params, prompts.at[3].set(65), mask.at[3].set(True), jax.random.key(0)))
  changed = slice(3 * GROUP, 4 * GROUP)
  keep = lambda x: np.delete(x, changed, axis=0)
  same_rollouts(jax.tree.map(keep, other), jax.tree.map(keep, rollouts_of()))
  assert np.any(other.tokens[changed] != rollouts_of().tokens[changed])


def test_the_prompt_bucket_changes_nothing():
  _, params = nano()
  prompts, mask = make_prompts(PROMPT_LENGTHS, NUM_SLOTS)
  pad = ((0, 0), (5, 0))
  wide = jnp.pad(prompts, pad, constant_values=PAD), jnp.pad(mask, pad)
  same_rollouts(jax.device_get(sampler_of()(params, *wide, jax.random.key(0))), rollouts_of())


@pytest.mark.slow
def test_eight_devices_draw_what_one_draws():
  model, params = nano()
  mesh = mesh_lib.make_mesh(data=2, fsdp=2, tensor=2)
  sharded = jax.device_put(params, mesh_lib.param_shardings(mesh, model.logical_axes, params))
  prompts = mesh_lib.place_rows(mesh, make_prompts(PROMPT_LENGTHS, NUM_SLOTS))
  rollouts = sampler_of()(sharded, *prompts, jax.random.key(0))
  assert len(rollouts.tokens.sharding.device_set) == 8
  same_rollouts(jax.device_get(rollouts), rollouts_of())


# A fully known model: the logits after a token are that token's row of a table.


class Stub(NamedTuple):
  """The part of `models.Model` that the sampler calls."""

  prefill: Callable
  decode: Callable
  config: SimpleNamespace = SimpleNamespace(dtype="float32", experts=None)
  mesh: None = None
  grow: Callable = lambda cache, rows, columns, dtype: cache
  resume: None = None
  map_prompts: None = None
  decoding_weights: Callable = lambda params: params


def stub_sampler(vocab, *, on_call=None, **settings):
  def prefill(table, tokens, mask, *, dtype):
    if on_call is not None:
      jax.debug.callback(lambda *args: on_call.append([-1, *(np.asarray(x).tolist() for x in args)]), tokens, mask)
    return jnp.zeros((), int), None

  def decode(table, tokens, positions, cache, *, column, **_):
    cache = jnp.zeros((), int) if cache is None else cache
    if on_call is not None:
      jax.debug.callback(lambda *args: on_call.append([np.asarray(x).tolist() for x in args]), cache, tokens, positions, column)
    return table[tokens], cache + 1, None

  grow = lambda cache, *_, **__: jnp.zeros((), int) if cache is None else cache
  return jax.jit(make_sampler(Stub(prefill, decode, grow=grow), pad_id=vocab, **settings))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "top_k": 3}, {"temperature": 2.0, "top_p": 0.7}])
def test_tokens_are_drawn_with_their_probabilities(settings, rng):
  """Joint frequencies of pairs would reveal noise that two steps or rows share."""
  vocab, num_draws = 5, 8192
  table = rng.standard_normal((vocab, vocab)).astype(np.float32)
  sample = stub_sampler(vocab, group_size=4, max_new_tokens=2, stop_ids=(), **settings)
  prompts = jnp.full((num_draws // 4, 1), 2, jnp.int32)
  rollouts = jax.device_get(sample(jnp.asarray(table), prompts, jnp.ones(prompts.shape, bool), jax.random.key(5)))
  probs = np.asarray(jax.nn.softmax(make_filter(**settings)(jnp.asarray(table)), axis=-1), np.float64)
  expected = (probs[2][:, None] * probs).reshape(-1) * num_draws
  counts = np.bincount(rollouts.tokens[:, 0] * vocab + rollouts.tokens[:, 1], minlength=vocab**2)
  assert np.all(counts[expected == 0] == 0) and (not settings or np.any(expected == 0))
  possible = expected > 0
  statistic = np.sum((counts[possible] - expected[possible]) ** 2 / expected[possible])
  freedom = possible.sum() - 1
  assert statistic < freedom + 5 * np.sqrt(2 * freedom)
  first, second = rollouts.tokens.T
  np.testing.assert_allclose(rollouts.logprobs, np.log(np.stack([probs[2][first], probs[first, second]], axis=1)), atol=1e-5)


def test_samples_of_a_group_are_independent(rng):
  sample = stub_sampler(4, group_size=2, max_new_tokens=1, stop_ids=())
  prompts = jnp.zeros((4096, 1), jnp.int32)
  rollouts = sample(jnp.zeros((4, 4)), prompts, jnp.ones(prompts.shape, bool), jax.random.key(0))
  pairs = np.asarray(rollouts.tokens).reshape(-1, 2)
  counts = np.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16)
  assert np.sum((counts - 256) ** 2 / 256) < 15 + 5 * np.sqrt(30)


def counting_table(vocab):
  """Makes a table by which n + 1 certainly follows token n."""
  return jnp.asarray(100 * np.eye(vocab, k=1), jnp.float32)


@pytest.mark.parametrize(("starts", "num_calls"), [((7, 8), 3), ((9, 9), 1), ((2, 9), 6)])
def test_the_loop_ends_with_its_last_row(starts, num_calls):
  """Two rows count upwards, 10 ends a response, and the budget is 6 tokens."""
  calls = []
  sample = stub_sampler(12, on_call=calls, group_size=1, max_new_tokens=6, stop_ids=(10, 11))
  prompts = jnp.array([[0, 0, start] for start in starts])
  mask = jnp.array([[False, True, True], [False, False, True]])
  rollouts = jax.device_get(sample(counting_table(12), prompts, mask, jax.random.key(0)))
  jax.effects_barrier()
  for row, start in enumerate(starts):
    expected = list(range(start + 1, 11))[:6]
    assert rollouts.tokens[row].tolist() == expected + [12] * (6 - len(expected))
    assert rollouts.mask[row].sum() == len(expected) and rollouts.stopped[row] == (expected[-1] == 10)
  # One call takes the prompts without their last token, then there is one call per token. The first
  # of these feeds the prompt's last token.
  calls.sort(key=lambda call: call[0])
  assert [call[0] for call in calls] == [-1, *range(num_calls)]
  prefilled, seen = map(np.asarray, calls[0][1:])
  assert prefilled[:, -2:].tolist() == [[0, 0], [0, 0]] and seen[:, -2:].tolist() == [[False, True], [False, False]]
  assert not np.any(seen[:, :-2])
  for n, tokens, positions, column in calls[1:]:
    live = np.asarray(rollouts.mask.sum(axis=1)) > n
    fed = list(starts) if n == 0 else rollouts.tokens[:, n - 1].tolist()
    assert np.array_equal(np.asarray(tokens)[live], np.asarray(fed)[live])
    assert np.array_equal(np.asarray(positions)[live], np.array([1 + n, n])[live]) and column == n


@pytest.mark.parametrize("stop_ids", [(9,), (4, 9), ()])
def test_any_stop_token_stops(stop_ids):
  sample = stub_sampler(12, group_size=1, max_new_tokens=7, stop_ids=stop_ids)
  rollouts = sample(counting_table(12), jnp.array([[1], [6]]), jnp.ones((2, 1), bool), jax.random.key(0))
  ends = {(9,): ([7, 3], [False, True]), (4, 9): ([3, 3], [True, True]), (): ([7, 7], [False, False])}[stop_ids]
  assert (rollouts.mask.sum(axis=1).tolist(), rollouts.stopped.tolist()) == ends


def test_a_budget_of_one_token():
  sample = stub_sampler(12, group_size=2, max_new_tokens=1, stop_ids=(4,))
  rollouts = sample(counting_table(12), jnp.array([[3], [7]]), jnp.ones((2, 1), bool), jax.random.key(0))
  assert rollouts.tokens.tolist() == [[4], [4], [8], [8]] and rollouts.stopped.tolist() == [True, True, False, False]
