"""Filters against a slow loop over tokens, on logits with many ties."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.decoding.filters import filter_logits
from jaxrl_llm.decoding.sampler import make_filter
from tests.marks import few

NUM_TOKENS = 7


@functools.cache
def jitted(**settings):
  return jax.jit(make_filter(**settings))


def kept_tokens(logits, temperature, top_k, top_p):
  """Returns which tokens stay by the definitions, in float64, and top-p's smallest margin."""
  logits = np.asarray(logits, np.float64) / temperature
  kept = np.ones(len(logits), bool)
  if 0 < top_k < len(logits):
    kept = np.array([np.sum(logits > x) < top_k for x in logits])
  probs = np.where(kept, np.exp(logits - logits.max()), 0)
  probs /= probs.sum()
  above = np.array([probs[probs > p].sum() for p in probs])
  if top_p < 1:
    kept &= above < top_p
  return kept, np.abs(above - top_p).min()


# On a grid of quarters equal logits are frequent, and unequal ones stay unequal in float32.
LOGITS = st.lists(st.integers(-16, 16).map(lambda x: x / 4), min_size=NUM_TOKENS, max_size=NUM_TOKENS)


@given(LOGITS, st.sampled_from([0.25, 0.5, 1.0, 2.0]), st.integers(0, NUM_TOKENS + 2), st.sampled_from([0.01, 0.3, 0.61, 0.9, 1.0]))
def test_filters_match_a_slow_loop(logits, temperature, top_k, top_p):
  kept, margin = kept_tokens(logits, temperature, top_k, top_p)
  assume(top_p == 1 or margin > 1e-5)
  filtered = jitted(temperature=temperature, top_k=top_k, top_p=top_p)(jnp.array(logits))
  np.testing.assert_allclose(filtered[kept], np.array(logits)[kept] / temperature, rtol=1e-6)
  probs = np.asarray(jax.nn.softmax(filtered))
  # Exactly 0, so that a removed token is never drawn.
  np.testing.assert_array_equal(probs > 0, kept)
  expected = np.where(kept, np.exp(np.array(logits) / temperature), 0)
  np.testing.assert_allclose(probs, expected / expected.sum(), rtol=1e-5)


SETTINGS = st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, NUM_TOKENS + 2), st.sampled_from([0.01, 0.3, 0.61, 1.0]))


@pytest.mark.slow
@given(st.lists(st.tuples(LOGITS, SETTINGS), min_size=3, max_size=3))
def test_rows_are_filtered_as_by_filters_of_their_own(rows):
  logits, settings = zip(*rows, strict=True)
  temperatures, top_ks, top_ps = (jnp.array(x) for x in zip(*settings, strict=True))
  filtered = jitted_rows(jnp.array(logits), temperatures, top_ks, top_ps)
  for row, x, (temperature, top_k, top_p) in zip(filtered, logits, settings, strict=True):
    # A temperature per row, so that the two divide in the same way.
    expected = jitted(top_k=top_k, top_p=top_p)(jnp.array([x]), temperatures=jnp.array([temperature]))[0]
    np.testing.assert_array_equal(row, expected)


@jax.jit
def jitted_rows(logits, temperatures, top_ks, top_ps):
  return filter_logits(logits, temperature=temperatures, top_k=top_ks, top_p=top_ps)


def test_ranks_of_signed_zeros_and_infinities():
  logits = np.array([-np.inf, -0.0, 0.0, -2.0, 3.5, np.inf, -2.0], np.float32)
  ones = jnp.ones(7)
  filtered = np.asarray(jitted_rows(jnp.array([logits] * 7), ones, jnp.arange(1, 8), ones))
  for rank, row in enumerate(filtered, 1):
    kept = logits >= np.sort(logits)[::-1][rank - 1]
    np.testing.assert_array_equal(row, np.where(kept, logits, np.float32(-1e30)))


@given(LOGITS, st.integers(1, 3), st.sampled_from([0.3, 0.9]), st.integers(0, NUM_TOKENS - 1))
def test_kept_ids_survive_every_filter(logits, top_k, top_p, keep):
  filter_logits = jitted(top_k=top_k, top_p=top_p)
  without, with_keep = filter_logits(jnp.array(logits)), filter_logits(jnp.array(logits), jnp.array(keep))
  assert with_keep[keep] == jnp.float32(logits[keep])
  others = np.arange(NUM_TOKENS) != keep
  np.testing.assert_array_equal(with_keep[others], without[others])


TIED, TIES, UNTIED = (0.4, 0.2, 0.2, 0.1, 0.1), (0.4, 0.15, 0.15, 0.15, 0.15), (0.5, 0.3, 0.2)


@pytest.mark.parametrize(
  ("probs", "settings", "count"),
  [
    # All ties at the threshold stay.
    (TIED, {"top_k": 2}, 3), (TIED, {"top_p": 0.5}, 3), (TIED, {"top_p": 0.85}, 5), ((0.2,) * 5, {"top_k": 1, "top_p": 0.01}, 5),
    # Top-2 keeps all five. With the mass of only two, the likeliest would have 0.4 / 0.55 and the
    # others would be removed.
    (TIES, {"top_k": 2, "top_p": 0.6}, 5), (TIES, {"top_k": 2, "top_p": 0.39}, 1),
    # The temperature comes before the nucleus.
    (UNTIED, {"top_p": 0.6}, 2), (UNTIED, {"top_p": 0.6, "temperature": 0.25}, 1),
  ],
)  # fmt: skip
def test_the_likeliest_tokens_stay(probs, settings, count):
  kept = make_filter(**settings)(jnp.log(jnp.array(probs))) > -1e9
  assert kept.tolist() == [i < count for i in range(len(probs))]


def test_defaults_change_nothing():
  logits = jnp.array([1.0, -3.0, jnp.finfo(jnp.float32).min])
  np.testing.assert_array_equal(make_filter()(logits), logits)
  assert make_filter()(logits.astype(jnp.bfloat16)).dtype == jnp.float32


def test_filters_without_effect_cost_nothing():
  """There is no mask and no comparison, only a division if the temperature is not 1."""
  primitives = lambda logits, **settings: [str(e.primitive) for e in jax.make_jaxpr(make_filter(**settings))(logits).eqns]
  logits = jnp.zeros((2, NUM_TOKENS))
  assert primitives(logits) == []
  assert primitives(logits, top_k=NUM_TOKENS) == []
  assert primitives(logits, temperature=0.5) == ["div"]


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}, {"top_k": 3}, {"temperature": 0}])
def test_a_sharded_vocabulary_is_filtered_the_same(rng, settings):
  logits = jnp.asarray(rng.standard_normal((4, 264)), jnp.float32)
  spread = jax.device_put(logits, NamedSharding(Mesh(np.array(jax.devices()), ("tensor",)), PartitionSpec(None, "tensor")))
  np.testing.assert_array_equal(jitted(**settings)(spread), jitted(**settings)(logits))


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}, {"top_k": 3}])
def test_no_filter_sorts_the_vocabulary(settings):
  program = jax.jit(make_filter(**settings)).lower(jnp.zeros((4, 4096))).compile().as_text()
  assert "sort(" not in program


def test_a_large_vocabulary_matches_a_sort(rng):
  """A nucleus of hundreds of tokens, with ties across its threshold, against float64."""
  logits = rng.normal(scale=3, size=(4, 1500)).astype(np.float32)
  logits[2:] = np.round(logits[2:] * 4) / 4
  for settings in ({"top_p": 0.9}, {"top_p": 0.37, "temperature": 0.7}, {"top_p": 0.999}, {"top_k": 40, "top_p": 0.8}):
    filtered = np.asarray(make_filter(**settings)(jnp.asarray(logits)))
    for row, expected in zip(filtered, logits):
      kept, margin = kept_tokens(expected, settings.get("temperature", 1), settings.get("top_k", 0), settings["top_p"])
      assert margin < 1e-6 or np.array_equal(row > -1e29, kept)


def test_masses_that_underflow_are_removed():
  logits = jnp.array([0.0, -1.0, -87.5, -100.0, -103.5, -200.0, -jnp.inf])
  for top_p in (0.99, 0.9999999):
    probs = jax.nn.softmax(make_filter(top_p=top_p)(logits))
    assert np.all(np.isfinite(probs)) and np.all(probs[:2] > 0) and np.all(probs[4:] == 0)


@hypothesis.settings(max_examples=30)
@given(LOGITS, st.sampled_from([{}, {"top_k": 2}, {"top_p": 0.4}, {"top_k": 3, "top_p": 0.6}]))
def test_temperature_0_is_the_first_likeliest(logits, others):
  best = int(np.argmax(logits))
  static = jitted(temperature=0, **others)(jnp.array(logits))
  by_row = jitted(**others)(jnp.array([logits, logits]), temperatures=jnp.array([0.0, 0.5]))
  for row in (static, by_row[0]):
    assert np.flatnonzero(np.asarray(row) > -1e29).tolist() == [best] and row[best] == jnp.float32(logits[best])
  np.testing.assert_array_equal(by_row[1], jitted(temperature=0.5, **others)(jnp.array(logits)))


@pytest.mark.parametrize("settings", [{}, {"top_k": 4, "top_p": 0.7}, {"top_p": 0.6}])
def test_temperatures_per_row(rng, settings):
  logits = jnp.asarray(rng.standard_normal((2, 3, NUM_TOKENS)), jnp.float32)
  keep = jnp.asarray(rng.integers(NUM_TOKENS, size=(2, 3)), jnp.int32)
  temperatures = np.array([[0.5, 1.0, 0.0], [2.0, 0.0, 0.25]], np.float32)
  together = jax.jit(make_filter(temperature=3.0, **settings))(logits, keep, temperatures=jnp.asarray(temperatures))
  for b, t in np.ndindex(2, 3):
    alone = make_filter(temperature=float(temperatures[b, t]), **settings)(logits[b, t], keep[b, t])
    np.testing.assert_allclose(together[b, t], alone, rtol=1e-6)


def test_invalid_temperatures_count_as_0():
  filtered = make_filter()(jnp.ones((3, 2)), temperatures=jnp.array([0.0, -1.0, jnp.nan]))
  np.testing.assert_array_equal(filtered, np.array([[1, -1e30]] * 3, np.float32))


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("top_p", [1e-37, 1.1e-38, 1e-39, 1e-46, 1e-320])
def test_a_mass_that_float32_does_not_have_keeps_the_likeliest_token(top_p, top_k):
  """As every smaller mass than the likeliest token's does."""
  logits = jnp.array([[0.0, 3.0, -2.0, 1.0, -1e4]] * 2)
  of_rows = jitted_rows(logits, jnp.ones(2), jnp.full(2, top_k), jnp.array([top_p] * 2))
  for row in (*jitted(top_p=top_p, top_k=top_k)(logits), *of_rows):
    np.testing.assert_array_equal(row, np.array([-1e30, 3, -1e30, -1e30, -1e30], np.float32))


@pytest.mark.parametrize("temperature", [9e-6, 1e-37, 1e-39, 1e-46, 1e-320])
def test_a_temperature_whose_quotients_overflow_is_0(temperature):
  logits = jnp.array([[40.0, 50.0, -60.0, 50.0]])
  for row in (*jitted(temperature=temperature)(logits), *jitted_rows(logits, jnp.array([temperature]), jnp.array([0]), jnp.ones(1))):
    np.testing.assert_array_equal(row, np.array([-1e30, 50, -1e30, -1e30], np.float32))


def test_at_temperature_0_the_drawn_token_stays():
  logits = jnp.array([1.0, 3.0, 2.0])
  for filtered in (
    make_filter(temperature=0)(logits, jnp.array(0)),
    make_filter(top_p=0.1)(logits, jnp.array(0), temperatures=jnp.array(0.0)),
  ):
    np.testing.assert_array_equal(filtered, jnp.array([1.0, 3.0, -1e30]))


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0, "top_p": 0.5}, {"top_p": 0.9}, {"top_k": 2}, {}])
def test_gradients_at_temperature_0(settings):
  logits = jnp.array([3.0, 2.0, 3.0, -jnp.inf])
  temperatures = None if "temperature" in settings else jnp.array(0.0)
  score = lambda x, drawn: jax.nn.log_softmax(make_filter(**settings)(x, drawn, temperatures=temperatures))[drawn]
  # A point mass cannot become likelier.
  np.testing.assert_array_equal(jax.grad(score)(logits, jnp.array(0)), np.zeros(4))
  grad = jax.grad(score)(logits, jnp.array(1))
  assert np.all(np.isfinite(grad)) and np.all(grad[2:] == 0) and grad[1] > 0


@pytest.mark.parametrize(
  "settings", few([{}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.5}, {"temperature": 0.01, "top_k": 3, "top_p": 0.9}], 0, 3)
)
def test_gradients_are_finite_and_do_not_reach_removed_tokens(settings):
  filter_logits, logits = make_filter(**settings), jnp.array([3.0, 2.0, 1.0, -50.0, -jnp.inf])

  for drawn in range(4):  # Most filters remove the last of these, although it was drawn.
    grad = jax.grad(lambda x, drawn=drawn: jax.nn.log_softmax(filter_logits(x, jnp.array(drawn)))[drawn])(logits)
    assert np.all(np.isfinite(grad))
    removed = np.asarray(filter_logits(logits, jnp.array(drawn))) < -1e29
    assert np.all(grad[removed & np.isfinite(logits)] == 0)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"temperature": -0.5}, "rollout.temperature: found -0.5, expected 0 .* or a number above 0"),
    ({"temperature": float("inf")}, "rollout.temperature: found inf"),
    ({"temperature": float("nan")}, "rollout.temperature: found nan"),
    ({"top_k": -1}, "rollout.top_k: found -1, expected 0"),
    ({"top_p": 0.0}, "rollout.top_p: found 0.0, expected a number in"),
    ({"top_p": 1.01}, "rollout.top_p: found 1.01"),
  ],
)
def test_settings_out_of_range(settings, message):
  with pytest.raises(ValueError, match=message):
    make_filter(**settings)
