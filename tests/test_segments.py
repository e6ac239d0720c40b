"""Segment functions against loops over sequences, and the sums of the weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm import segments as seg

MASK = np.array([[0, 1, 1, 0, 1, 1, 1, 0], [1, 0, 0, 1, 0, 0, 1, 0]], np.float32)
SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 2, 2, 3, 3, 4, 4, 0]])
# Counted tokens: row 0 has 2 in sequence 1 and 3 in sequence 2; row 1 has 1, none, 1 and 1.
NUM_TOKENS, NUM_SEQUENCES = 8, 5


def by_sequence(x, segments):
  for b in range(x.shape[0]):
    for s in sorted(set(segments[b])):
      yield b, segments[b] == s


def test_sum_count_and_mean_match_a_loop():
  x = np.random.default_rng(0).standard_normal(MASK.shape).astype(np.float32)
  sums, counts, means = (np.zeros_like(x) for _ in range(3))
  for b, where in by_sequence(x, SEGMENTS):
    sums[b, where] = x[b, where].sum()
    counts[b, where] = max(MASK[b, where].sum(), 1)
    means[b, where] = (x * MASK)[b, where].sum() / counts[b, where]
  ids = jnp.asarray(SEGMENTS)
  np.testing.assert_allclose(seg.segment_sum(jnp.asarray(x), ids), sums, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(seg.segment_count(jnp.asarray(MASK), ids), counts)
  np.testing.assert_allclose(seg.segment_mean(jnp.asarray(x), jnp.asarray(MASK), ids), means, rtol=1e-5, atol=1e-6)


def test_none_means_one_sequence_per_row():
  x = jnp.asarray(np.random.default_rng(1).standard_normal(MASK.shape), jnp.float32)
  ones = jnp.ones(MASK.shape, int)
  for f in (seg.segment_sum, seg.segment_count):
    np.testing.assert_allclose(f(x, None), f(x, ones), rtol=1e-5)
  for weigh in (seg.token_mean, seg.sequence_mean, seg.sequence_sum, seg.constant(5)):
    np.testing.assert_allclose(weigh(jnp.asarray(MASK), None), weigh(jnp.asarray(MASK), ones), rtol=1e-6)


def test_weights_by_hand():
  mask, ids = jnp.asarray(MASK), jnp.asarray(SEGMENTS)
  assert seg.num_sequences(mask, ids) == NUM_SEQUENCES
  lengths = np.array([[0, 2, 2, 0, 3, 3, 3, 0], [1, 0, 0, 1, 0, 0, 1, 0]])
  with np.errstate(divide="ignore"):
    inverse = np.where(lengths > 0, 1 / lengths, 0)
  np.testing.assert_allclose(seg.token_mean(mask, ids), MASK / NUM_TOKENS, rtol=1e-6)
  np.testing.assert_allclose(seg.sequence_mean(mask, ids), inverse / NUM_SEQUENCES, rtol=1e-6)
  np.testing.assert_allclose(seg.sequence_sum(mask, ids), MASK / NUM_SEQUENCES, rtol=1e-6)
  np.testing.assert_allclose(seg.constant(30)(mask, ids), MASK / NUM_SEQUENCES / 30, rtol=1e-6)


WEIGHTS = {"token_mean": seg.token_mean, "sequence_mean": seg.sequence_mean, "sequence_sum": seg.sequence_sum, "constant": seg.constant(7)}
GROUPS = np.array([[2, 2, 2, 1, 1, 1, 1, 0], [1, 2, 2, 3, 3, 2, 2, 0]])
# Prompt 1 has 4 counted tokens, prompt 2 has 3 and prompt 3 has 1.


def test_prompt_mean_by_hand():
  num_tokens = np.array([[3, 3, 3, 4, 4, 4, 4, 1], [4, 3, 3, 1, 1, 3, 3, 1]])
  weights = seg.prompt_mean(jnp.asarray(MASK), None, jnp.asarray(GROUPS))
  np.testing.assert_allclose(weights, MASK / num_tokens / 3, rtol=1e-6)
  # Order, padding, numbers and prompts without a counted token do not matter.
  wide = seg.prompt_mean(jnp.pad(MASK[::-1], ((1, 2), (3, 5))), None, jnp.pad(np.array([0, 9, 4, 7])[GROUPS[::-1]], ((1, 2), (3, 5))))
  np.testing.assert_allclose(wide[1:3, 3:11][::-1], weights, rtol=1e-6)
  alone = seg.prompt_mean(jnp.asarray(MASK) * (GROUPS == 2), None, jnp.asarray(GROUPS))
  np.testing.assert_allclose(alone, seg.token_mean(jnp.asarray(MASK) * (GROUPS == 2), None), rtol=1e-6)
  assert np.all(seg.prompt_mean(jnp.zeros(MASK.shape), None, jnp.asarray(GROUPS)) == 0)


@pytest.mark.parametrize("weigh", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_of_an_empty_mask_are_zero_and_junk_segments_free(weigh):
  empty = jnp.zeros(MASK.shape)
  assert np.all(weigh(empty, jnp.asarray(SEGMENTS)) == 0) and np.all(weigh(empty, None) == 0)


@functools.cache
def jitted(name):
  return jax.jit(WEIGHTS[name])


@given(seed=st.integers(0, 10**6), density=st.floats(0.0, 1.0))
@settings(max_examples=40)
def test_weights_by_a_loop_over_sequences_of_random_rows(seed, density):
  """The sums Σw are checked as well.

  Σw is 1 for both means, the mean length for the sum, and its share of the budget for the constant.
  """
  rng = np.random.default_rng(seed)
  # Up to six contiguous sequences per row, of any length. Numbers may be missing, and padding comes
  # first.
  segments = np.sort(rng.integers(0, 7, (3, 12)), axis=1)
  mask = ((rng.random((3, 12)) < density) & (segments > 0)).astype(np.float32)
  lengths = {(b, s): mask[b, segments[b] == s].sum() for b in range(3) for s in set(segments[b]) if mask[b, segments[b] == s].any()}
  expected = {name: np.zeros((3, 12)) for name in WEIGHTS}
  for (b, s), length in lengths.items():
    share = {"token_mean": 1 / mask.sum(), "sequence_mean": 1 / len(lengths) / length, "sequence_sum": 1 / len(lengths)}
    for name, w in (share | {"constant": 1 / len(lengths) / 7}).items():
      expected[name][b, segments[b] == s] = w
  weights = {name: np.asarray(jitted(name)(mask, segments)) for name in WEIGHTS}
  for name, w in weights.items():
    np.testing.assert_allclose(w, mask * expected[name], rtol=1e-5, err_msg=name)
  if lengths:
    mean_length = np.mean(list(lengths.values()))
    sums = {"token_mean": 1, "sequence_mean": 1, "sequence_sum": mean_length, "constant": mean_length / 7}
    np.testing.assert_allclose([weights[name].sum() for name in sums], list(sums.values()), rtol=1e-5)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_do_not_know_padding_order_or_empty_sequences(name):
  weigh = WEIGHTS[name]
  mask, segments = jnp.asarray(MASK), jnp.asarray(SEGMENTS)
  expected = np.asarray(weigh(mask, segments))
  wide = weigh(jnp.pad(mask, ((1, 2), (3, 5))), jnp.pad(segments, ((1, 2), (3, 5))))
  np.testing.assert_allclose(wide[1:3, 3:11], expected, rtol=1e-6)
  assert np.count_nonzero(wide) == np.count_nonzero(expected)
  np.testing.assert_allclose(weigh(mask[::-1], segments[::-1]), expected[::-1], rtol=1e-6)
  # Sequence 2 of the second row has no counted token, so that its removal changes nothing.
  gone = jnp.where(segments == 2, jnp.where(jnp.arange(2)[:, None] == 1, 0, segments), segments)
  np.testing.assert_allclose(weigh(mask, gone), expected, rtol=1e-6)


@pytest.mark.parametrize("lengths", [(4, 4, 4), (4, 1, 2)])
def test_the_two_means_agree_only_for_equal_lengths(lengths):
  mask = jnp.asarray(np.arange(4) < np.array(lengths)[:, None], jnp.float32)
  equal = lengths == (4, 4, 4)
  assert np.allclose(seg.token_mean(mask, None), seg.sequence_mean(mask, None)) == equal
  assert np.allclose(seg.sequence_mean(mask, None), seg.sequence_sum(mask, None) / 4) == equal
  np.testing.assert_allclose(seg.sequence_sum(mask, None), 9 * seg.constant(9)(mask, None), rtol=1e-6)


@pytest.mark.parametrize("segments", [None, SEGMENTS])
def test_once_per_sequence_takes_the_first_counted_token(segments):
  x = np.arange(16.0).reshape(2, 8).astype(np.float32)
  ids = np.ones((2, 8), int) if segments is None else segments
  expected = np.full((2, 8), np.nan)
  for b, where in by_sequence(x, ids):
    counted = np.flatnonzero(where & (MASK[b] > 0))
    if len(counted):
      expected[b, counted[0]] = x[b, counted[0]]
  selected = seg.once_per_sequence(
    jnp.asarray(x), jnp.asarray(MASK), None if segments is None else jnp.asarray(segments)
  )
  np.testing.assert_array_equal(selected, expected)
  assert np.sum(~np.isnan(expected)) == (2 if segments is None else NUM_SEQUENCES)


def test_a_statistic_over_sequences_weighs_each_once():
  mask, ids = jnp.asarray(MASK), jnp.asarray(SEGMENTS)
  length = seg.once_per_sequence(seg.segment_count(mask, ids), mask, ids)
  reduced = seg.reduce_metrics({"length/mean": length, "length/max": length, "length/min": length}, mask, mask)
  np.testing.assert_allclose(
    [reduced[f"length/{x}"] for x in ("mean", "max", "min")], [NUM_TOKENS / NUM_SEQUENCES, 3, 1], rtol=1e-6
  )


def test_effective_sample_size():
  mask = jnp.array([[1.0, 1.0, 1.0, 1.0, 0.0]])
  ess = lambda x: float(seg.reduce_metrics({"a/ess": jnp.asarray([x], jnp.float32)}, mask, mask)["a/ess"])
  np.testing.assert_allclose(ess([3.0, 3.0, 3.0, 3.0, 99.0]), 1, rtol=1e-6)
  np.testing.assert_allclose(ess([1.0, 0.0, 0.0, 0.0, 99.0]), 1 / 4, rtol=1e-6)
  np.testing.assert_allclose(ess([1.0, 2.0, np.nan, 3.0, 99.0]), 36 / (3 * 14), rtol=1e-6)
  # In any unit, even if the squares overflow float32. A single sample has a size of 1.
  np.testing.assert_allclose(ess([1e30, 2e30, np.nan, 3e30, 0.0]), 36 / (3 * 14), rtol=1e-6)
  assert ess([np.nan, 5.0, np.nan, np.nan, 99.0]) == 1 and ess([np.nan] * 5) == 0


def test_mean_has_no_gradient_off_the_mask_even_if_there_is_nan():
  x = jnp.where(jnp.asarray(MASK) > 0, 1.0, jnp.nan)
  grad = jax.grad(lambda x: jnp.sum(seg.segment_mean(x, jnp.asarray(MASK), jnp.asarray(SEGMENTS)) * MASK))(x)
  np.testing.assert_allclose(grad, MASK, rtol=1e-6)


def test_metrics_are_reduced_by_their_names():
  mask = jnp.array([[1.0, 1.0, 1.0, 0.0]])
  weights = jnp.array([[0.5, 0.25, 0.25, 0.0]])
  x = jnp.array([[1.0, jnp.nan, 4.0, 99.0]])
  whole = jnp.array([[1.0, 2.0, 4.0, jnp.nan]])
  names = ("a/mean", "a/min", "a/max", "a/p99", "a/of_some")
  reduced = seg.reduce_metrics({**dict.fromkeys(names, x), "b_loss": whole, "c_loss": x}, mask, weights)
  np.testing.assert_allclose([reduced[name] for name in names], [2.5, 1, 4, 3.97, 2.5], rtol=1e-6)
  np.testing.assert_allclose(reduced["b_loss"], 2.0)
  # A loss reports its NaN. Only other metrics leave entries out.
  assert np.isnan(reduced["c_loss"])
  # The quantiles of several metrics, each of its own entries, are found in one loop.
  tails = {"a/p99": x, "b/p99": whole, "c/p99": -whole}
  alone = [seg.reduce_metrics({name: tail}, mask, weights)[name] for name, tail in tails.items()]
  program = jax.make_jaxpr(lambda tails: seg.reduce_metrics(tails, mask, weights))(tails)
  np.testing.assert_array_equal(list(seg.reduce_metrics(tails, mask, weights).values()), alone)
  assert str(program).count(" = scan[") + str(program).count(" = while[") == 1
  of_none = seg.reduce_metrics({name: jnp.full((1, 4), jnp.nan) for name in names}, mask, weights)
  assert all(value == 0 for value in of_none.values())
