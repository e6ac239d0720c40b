"""Segments against loops over sequences, and the weights' promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def test_none_is_one_sequence_a_row():
  x = jnp.asarray(np.random.default_rng(1).standard_normal(MASK.shape), jnp.float32)
  ones = jnp.ones(MASK.shape, int)
  for f in (seg.segment_sum, seg.segment_count):
    np.testing.assert_allclose(f(x, None), f(x, ones), rtol=1e-5)
  for weigh in (seg.token_mean, seg.sequence_mean, seg.constant(5)):
    np.testing.assert_allclose(weigh(jnp.asarray(MASK), None), weigh(jnp.asarray(MASK), ones), rtol=1e-6)


def test_weights_by_hand():
  mask, ids = jnp.asarray(MASK), jnp.asarray(SEGMENTS)
  assert seg.num_sequences(mask, ids) == NUM_SEQUENCES
  lengths = np.array([[0, 2, 2, 0, 3, 3, 3, 0], [1, 0, 0, 1, 0, 0, 1, 0]])
  with np.errstate(divide="ignore"):
    inverse = np.where(lengths > 0, 1 / lengths, 0)
  np.testing.assert_allclose(seg.token_mean(mask, ids), MASK / NUM_TOKENS, rtol=1e-6)
  np.testing.assert_allclose(seg.sequence_mean(mask, ids), inverse / NUM_SEQUENCES, rtol=1e-6)
  np.testing.assert_allclose(seg.constant(30)(mask, ids), MASK / NUM_SEQUENCES / 30, rtol=1e-6)


@pytest.mark.parametrize("weigh", [seg.token_mean, seg.sequence_mean, seg.constant(7)])
def test_weights_of_an_empty_mask_are_zero_and_junk_segments_free(weigh):
  empty = jnp.zeros(MASK.shape)
  assert np.all(weigh(empty, jnp.asarray(SEGMENTS)) == 0) and np.all(weigh(empty, None) == 0)


def test_mean_has_no_gradient_off_the_mask_even_there_is_nan():
  x = jnp.where(jnp.asarray(MASK) > 0, 1.0, jnp.nan)
  grad = jax.grad(lambda x: jnp.sum(seg.segment_mean(x, jnp.asarray(MASK), jnp.asarray(SEGMENTS)) * MASK))(x)
  np.testing.assert_allclose(grad, MASK, rtol=1e-6)


def test_metrics_are_reduced_by_their_names():
  mask = jnp.array([[1.0, 1.0, 1.0, 0.0]])
  weights = jnp.array([[0.5, 0.25, 0.25, 0.0]])
  x = jnp.array([[1.0, jnp.nan, 4.0, 99.0]])
  whole = jnp.array([[1.0, 2.0, 4.0, jnp.nan]])
  names = ("a/mean", "a/min", "a/max", "a/p99", "a/of_some")
  found = seg.reduce_metrics({**dict.fromkeys(names, x), "b_loss": whole, "c_loss": x}, mask, weights)
  np.testing.assert_allclose([found[name] for name in names], [2.5, 1, 4, 3.97, 2.5], rtol=1e-6)
  np.testing.assert_allclose(found["b_loss"], 2.0)
  assert np.isnan(found["c_loss"])  # A loss reports its NaN; only a population may leave entries out.
  nobody = seg.reduce_metrics({name: jnp.full((1, 4), jnp.nan) for name in names}, mask, weights)
  assert all(value == 0 for value in nobody.values())
