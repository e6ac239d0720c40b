"""Tests of spans of new tokens in a cache whose rows have their own columns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels.types import KeyValues, KeyValuesByToken
from jaxrl_llm.models import make_model, preset
from tests.marks import few

ROWS, COLUMNS, LENGTH = 4, (8, 8, 16), 21
PRESETS = {"dense": "nano", "mixture": "nano-moe", "window": "nano-window"}


@functools.cache
def built(kind):
  """Returns a model, its weights for decoding, its params, sequences, and the logits of these."""
  model = make_model(preset(PRESETS[kind], vocab_size=64))
  params = model.init(jax.random.key(0))
  tokens = np.random.default_rng(1).integers(0, 64, (ROWS, LENGTH)).astype(np.int32)
  positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
  logits = jax.jit(model.logits)(params, tokens, positions, jnp.ones(tokens.shape, jnp.int32))
  return model, jax.jit(model.decoding_weights)(params), params, tokens, np.asarray(logits)


@functools.cache
def extend_of(kind):
  return jax.jit(built(kind)[0].extend, donate_argnums=2)


def empty(model):
  cache = None
  for size in COLUMNS:
    cache = model.grow(cache, ROWS, size, dtype="float32")
  return cache


def run(kind, cache, spans, width, *, weights=None, named=True):
  """Adds spans (row, start, end) of the sequences, and returns the logits after each."""
  _, own, _, tokens, _ = built(kind)
  rows, starts, ends = (np.array(x, np.int32) for x in zip(*spans, strict=True))
  given = np.zeros((len(rows), width), np.int32)
  for i, (row, start, end) in enumerate(spans):
    given[i, : end - start] = tokens[row, start:end]
  logits, cache, _ = extend_of(kind)(weights or own, given, cache, starts, ends - starts, *([rows] if named else []))
  return np.asarray(logits), cache


@pytest.mark.parametrize("layout", [KeyValues, KeyValuesByToken])
@pytest.mark.parametrize("kind", PRESETS)
@pytest.mark.parametrize("width", few([1, 5, 8], 1))
def test_any_split_of_a_sequence_gives_the_logits_of_the_whole(kind, width, layout, monkeypatch):
  """Rows of other lengths advance beside it, each at its own pace."""
  monkeypatch.setattr("jaxrl_llm.models.decoding.layout_of", lambda mesh: layout)
  model, _, _, _, expected = built(kind)
  cache, done, rng = empty(model), np.zeros(ROWS, int), np.random.default_rng(2)
  while np.any(done < LENGTH):
    counts = np.minimum(rng.integers(0, width + 1, ROWS), LENGTH - done)
    spans = [(row, done[row], done[row] + counts[row]) for row in range(ROWS)]
    logits, cache = run(kind, cache, spans, width, named=False)
    done += counts
    for row in np.flatnonzero(counts):
      np.testing.assert_allclose(logits[row], expected[row, done[row] - 1], atol=1e-5)


@pytest.mark.parametrize("kind", few(PRESETS, 0))
def test_spans_of_one_row_may_follow_each_other_in_one_call(kind):
  model, _, _, _, expected = built(kind)
  logits, _ = run(kind, empty(model), [(2, 0, 8), (1, 0, 3), (2, 8, 16), (2, 16, 18), (0, 0, 0)], 8)
  for i, (row, last) in enumerate([(2, 7), (1, 2), (2, 15), (2, 17)]):
    np.testing.assert_allclose(logits[i], expected[row, last], atol=1e-5)


@pytest.mark.parametrize("width", [1, 5])
def test_what_a_row_has_left_behind_harms_nobody(width):
  """Broken weights, then good ones: the old columns are masked, but 0 times NaN would be NaN."""
  model, weights, _, _, expected = built("dense")
  broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), weights)
  logits, cache = run("dense", empty(model), [(row, 0, 20) for row in range(ROWS)], 20, weights=broken)
  assert np.isnan(logits).all()
  for start in range(0, 8, width):
    spans = [(row, start, min(start + width, 8)) for row in range(ROWS)]
    logits, cache = run("dense", cache, spans, width, named=False)
  np.testing.assert_allclose(logits, expected[:, 7], atol=1e-5)


def test_tokens_beyond_the_count_write_nothing():
  model, weights, _, tokens, _ = built("dense")
  _, cache = run("dense", empty(model), [(row, 0, 10) for row in range(ROWS)], 10)
  before = jax.tree.map(np.asarray, cache)
  _, cache, _ = extend_of("dense")(weights, tokens[:, :8], cache, np.full(ROWS, 10), np.array([0, 3, 8, 0]))
  for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(cache), strict=True):
    np.testing.assert_array_equal(np.asarray(new)[[0, 3]], old[[0, 3]])
  (_, block, *_), (_, new, *_) = before.blocks[0], cache.blocks[0]
  changed = np.any(np.asarray(new.v) != block.v, axis=(1, 3))
  assert changed[1].tolist() == [False, False, True, True, True, False, False, False]
  assert changed[2].tolist() == [False] * 2 + [True] * 6


def test_weights_and_a_cache_in_8_bits_stay_close():
  model, _, params, tokens, expected = built("dense")
  rounded = make_model(model.config._replace(decode_weights="int8"))
  weights = jax.jit(rounded.decoding_weights)(params)
  cache = rounded.grow(None, ROWS, 32, dtype="int8")
  extend, counts = jax.jit(rounded.extend), np.full(ROWS, 8)
  _, cache, _ = extend(weights, tokens[:, :8], cache, np.zeros(ROWS, int), counts)
  logits, _, _ = extend(weights, tokens[:, 8:9], cache, counts, np.ones(ROWS, int))
  error = np.abs(logits - expected[:, 8]).max()
  assert 1e-5 < error < 0.1 * np.abs(expected).max()
