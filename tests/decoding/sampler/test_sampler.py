"""The decode loop: its draws, its records, its end, and changes that must not affect a draw."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.sampler import make_filter, make_sampler, seeded
from jaxrl_llm.kernels.types import KeyValuesByToken
from jaxrl_llm.learner.train_step import policy_outputs
from jaxrl_llm.rollouts.trajectories import trajectories
from tests.batches import logprobs_of, pack_rows
from tests.decoding.sampler.nano import LENGTHS, PAD, Chain, built, prompts_of

BUDGET, GROUP = 8, 2
# About one token in six ends a response, so that lengths differ.
STOPS = tuple(range(0, 264, 6))


@functools.cache
def sampler_of(**settings):
  return jax.jit(make_sampler(built()[0], group_size=GROUP, max_new_tokens=BUDGET, stop_ids=STOPS, pad_id=PAD, **settings))


def sampled(prompts, mask, seed=0, **settings):
  return jax.device_get(sampler_of(**settings)(built()[1], prompts, mask, seeded(jax.random.key(seed), GROUP * len(prompts))))


@functools.cache
def rollouts_of(seed=0, **settings):
  return sampled(*prompts_of(), seed, **settings)


def same_rollouts(a, b):
  np.testing.assert_array_equal(a.tokens, b.tokens)
  np.testing.assert_array_equal(a.mask, b.mask)
  np.testing.assert_array_equal(a.stopped, b.stopped)
  np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_logprobs_are_the_learners():
  model, params = built()
  batch = jax.tree.map(jnp.asarray, pack_rows(trajectories(rollouts_of()), row_tokens=16, row_buckets=(16,)))
  outputs = policy_outputs(logprobs_of(jax.jit(model.logits)), make_filter(), params, batch)
  drawn = np.asarray(batch.mask) > 0
  assert drawn.sum() > 40
  np.testing.assert_allclose(np.asarray(outputs.logprobs)[drawn], batch.sampler_logprobs[drawn], atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_gpus_layout_of_the_keys_changes_no_draw(dtype, monkeypatch):
  expected = rollouts_of(cache_dtype=dtype)
  for module in ("decoding", "transformer"):
    monkeypatch.setattr(f"jaxrl_llm.models.{module}.layout_of", lambda mesh: KeyValuesByToken)
  sampler_of.cache_clear()
  same_rollouts(sampled(*prompts_of(), cache_dtype=dtype), expected)
  sampler_of.cache_clear()


def test_a_response_ends_with_its_first_stop_token_or_at_the_budget():
  rollouts = rollouts_of()
  lengths = rollouts.mask.sum(axis=1)
  is_stop = np.isin(rollouts.tokens, STOPS)
  assert rollouts.tokens.shape == (len(LENGTHS) * GROUP, BUDGET)
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
  prompts, mask = prompts_of()
  np.testing.assert_array_equal(rollouts.prompts, np.repeat(prompts, GROUP, axis=0))
  np.testing.assert_array_equal(rollouts.prompt_mask, np.repeat(mask, GROUP, axis=0))
  groups = rollouts.tokens.reshape(-1, GROUP, BUDGET)
  assert np.mean(np.any(groups[:, 0] != groups[:, 1], axis=1)) > 0.8


def test_draws_follow_the_key_and_nothing_else():
  again = sampled(*prompts_of())
  chex.assert_trees_all_equal(again, rollouts_of())
  assert np.mean(rollouts_of(seed=1).tokens != again.tokens) > 0.5


def test_a_row_does_not_depend_on_its_neighbours():
  prompts, mask = prompts_of()
  other = sampled(prompts.at[3].set(65), mask.at[3].set(True))
  changed = slice(3 * GROUP, 4 * GROUP)
  keep = lambda x: np.delete(x, changed, axis=0)
  same_rollouts(jax.tree.map(keep, other), jax.tree.map(keep, rollouts_of()))
  assert np.any(other.tokens[changed] != rollouts_of().tokens[changed])


def test_the_prompt_bucket_changes_nothing():
  (prompts, mask), pad = prompts_of(), ((0, 0), (5, 0))
  same_rollouts(sampled(jnp.pad(prompts, pad, constant_values=PAD), jnp.pad(mask, pad)), rollouts_of())


# A fully known model: the logits after a token are that token's row of a table.


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
  return jax.jit(make_sampler(Chain(prefill, decode, grow=grow), pad_id=vocab, **settings))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "top_k": 3}, {"temperature": 2.0, "top_p": 0.7}])
def test_tokens_are_drawn_with_their_probabilities(settings, rng):
  """Joint frequencies of pairs would reveal noise that two steps or rows share."""
  vocab, num_draws = 5, 8192
  table = rng.standard_normal((vocab, vocab)).astype(np.float32)
  sample = stub_sampler(vocab, group_size=4, max_new_tokens=2, stop_ids=(), **settings)
  prompts = jnp.full((num_draws // 4, 1), 2, jnp.int32)
  rollouts = jax.device_get(sample(jnp.asarray(table), prompts, jnp.ones(prompts.shape, bool), seeded(jax.random.key(5), num_draws)))
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
  rollouts = sample(jnp.zeros((4, 4)), prompts, jnp.ones(prompts.shape, bool), seeded(jax.random.key(0), 8192))
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
  rollouts = jax.device_get(sample(counting_table(12), prompts, mask, seeded(jax.random.key(0), 2)))
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
  rollouts = sample(counting_table(12), jnp.array([[1], [6]]), jnp.ones((2, 1), bool), seeded(jax.random.key(0), 2))
  ends = {(9,): ([7, 3], [False, True]), (4, 9): ([3, 3], [True, True]), (): ([7, 7], [False, False])}[stop_ids]
  assert (rollouts.mask.sum(axis=1).tolist(), rollouts.stopped.tolist()) == ends


def test_a_budget_of_one_token():
  sample = stub_sampler(12, group_size=2, max_new_tokens=1, stop_ids=(4,))
  rollouts = sample(counting_table(12), jnp.array([[3], [7]]), jnp.ones((2, 1), bool), seeded(jax.random.key(0), 4))
  assert rollouts.tokens.tolist() == [[4], [4], [8], [8]] and rollouts.stopped.tolist() == [True, True, False, False]
