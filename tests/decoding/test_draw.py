"""Token drawing against a float64 loop, against softmax frequencies, and at rounding edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.decoding.draw import draw, inverse_cdf
from jaxrl_llm.decoding.sampler import make_filter
from tests.marks import few

REMOVED = -1e30
LARGEST = np.float32(1 - 2**-24)  # The largest float32 below 1.
draw_jit, inverse_cdf_jit = jax.jit(draw), jax.jit(lambda *args: inverse_cdf(*args)[0])


def search(masses, u):
  """Finds the first entry with mass at which the cumulative mass exceeds u times the total.

  Also returns the relative distance of the nearest decision.
  """
  point = u * sum(masses)
  total = 0.0
  margin = np.inf
  first = None
  for i, mass in enumerate(masses):
    total += mass
    margin = min(margin, abs(total - point))
    if first is None and mass > 0 and total > point:
      first = i
  return (max(i for i, mass in enumerate(masses) if mass > 0) if first is None else first), margin / sum(masses)


def reference(logits, uniforms, num_blocks):
  """Draws in two levels in float64; returns None if float32 may decide otherwise."""
  logits = np.pad(logits, (0, -len(logits) % num_blocks), constant_values=REMOVED)
  masses = np.exp(np.asarray(logits, np.float64) - np.max(logits)).reshape(num_blocks, -1)
  block, margin = search(masses.sum(axis=1), float(uniforms[0]))
  entry, margin_within = search(masses[block], float(uniforms[1]))
  return block * masses.shape[1] + entry if min(margin, margin_within) > 1e-6 else None


@pytest.mark.parametrize(("size", "num_blocks"), [(5, 1), (130, 2), (264, 8), (1000, 8), (4096, 128), (4203, 128)])
def test_tokens_are_those_of_a_slow_loop(rng, size, num_blocks):
  logits = rng.normal(scale=3, size=(60, size)).astype(np.float32)
  logits[rng.random((60, size)) < 0.3] = REMOVED
  uniforms = rng.random((60, 2)).astype(np.float32)
  tokens = inverse_cdf_jit(jnp.asarray(logits), jnp.asarray(uniforms))
  expected = [reference(row, u, num_blocks) for row, u in zip(logits, uniforms)]
  compared = [(int(token), wanted) for token, wanted in zip(tokens, expected) if wanted is not None]
  assert len(compared) > 50
  assert [token for token, _ in compared] == [wanted for _, wanted in compared]
  assert np.all(inverse_cdf_jit(jnp.asarray(logits), jnp.ones((60, 2))) < size)


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}, {"top_p": 0.7, "temperature": 0.5}])
@pytest.mark.parametrize("size", few([5, 130, 1000], 1))
def test_frequencies_are_those_of_softmax(rng, key, size, settings):
  num_draws = 6_000
  logits = make_filter(**settings)(jnp.asarray(rng.normal(scale=1.5, size=size), jnp.float32))
  tokens, logprobs = draw_jit(jnp.tile(logits, (num_draws, 1)), jax.random.split(key, num_draws))
  counts = np.bincount(tokens, minlength=size)
  probs = np.asarray(jax.nn.softmax(logits), np.float64)
  assert np.all(counts[probs == 0] == 0)
  np.testing.assert_allclose(logprobs, jax.nn.log_softmax(logits)[tokens], rtol=1e-5, atol=1e-5)
  # Cells with an expected count below 5 are merged, as the chi-squared approximation requires.
  expected = probs * num_draws
  small = expected < 5
  expected, counts = np.append(expected[~small], expected[small].sum()), np.append(counts[~small], counts[small].sum())
  expected, counts = expected[expected > 1e-3], counts[expected > 1e-3]
  statistic, freedom = np.sum((counts - expected) ** 2 / expected), len(expected) - 1
  # Mean and five standard deviations of chi-squared.
  assert statistic < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [5, 130, 264, 4096, 4203])
@pytest.mark.parametrize("removed", [REMOVED, -np.inf, float(np.finfo(np.float32).min)])
def test_the_only_entry_with_mass_is_drawn_at_every_point(size, removed):
  edges = np.array([0, 1e-38, 0.5, LARGEST, 1], np.float32)
  uniforms = np.array([(u, v) for u in edges for v in edges])
  for only in {0, 1, size // 2, size - 1}:
    logits = np.full((len(uniforms), size), removed, np.float32)
    logits[:, only] = -3
    np.testing.assert_array_equal(inverse_cdf_jit(jnp.asarray(logits), jnp.asarray(uniforms)), only)


def test_every_token_drawn_has_mass(rng):
  for _ in range(3):
    logits = rng.normal(scale=8, size=(30, 1000)).astype(np.float32)
    logits[rng.random((30, 1000)) < 0.9] = REMOVED
    has_mass = np.exp(logits - logits.max(axis=1, keepdims=True)) > 0
    np.testing.assert_array_equal(inverse_cdf_jit(jnp.asarray(logits), jnp.zeros((30, 2))), has_mass.argmax(axis=1))
    for uniforms in (np.full((30, 2), LARGEST), np.ones((30, 2), np.float32), rng.random((30, 2)).astype(np.float32)):
      tokens = np.asarray(inverse_cdf_jit(jnp.asarray(logits), jnp.asarray(uniforms)))
      assert np.all(has_mass[np.arange(30), tokens])


def test_equal_masses_are_cut_evenly():
  """64 tokens of 4096 have mass, one in every second block.

  The sums are exact in float32, so every boundary is met exactly.
  """
  logits = np.full((64, 4096), REMOVED, np.float32)
  logits[:, 5::64] = 0
  points = np.arange(64, dtype=np.float32) / 64
  for v in (0, LARGEST):
    uniforms = np.stack([points, np.full(64, v)], axis=1).astype(np.float32)
    np.testing.assert_array_equal(inverse_cdf_jit(jnp.asarray(logits), jnp.asarray(uniforms)), np.arange(64) * 64 + 5)


def test_underflow_is_decided_once():
  """exp of these logits is below the smallest normal number.

  One program may keep such masses and another flush them, so that a drawn token would lack mass.
  """
  logits = np.full((5, 264), REMOVED, np.float32)
  logits[:, 3] = 0
  logits[:, 200] = [-87, -88, -95, -103, -120]
  np.testing.assert_array_equal(inverse_cdf_jit(jnp.asarray(logits), jnp.ones((5, 2))), [200, 3, 3, 3, 3])


def test_a_row_depends_only_on_itself(rng, key):
  logits = jnp.asarray(rng.normal(scale=2, size=(16, 1000)), jnp.float32)
  keys = jax.random.split(key, 16)
  tokens, logprobs = draw_jit(logits, keys)
  others = draw_jit(logits.at[1:].set(jnp.roll(logits[1:], 7, axis=1)), keys.at[1:].set(keys[:-1]))
  assert others[0][0] == tokens[0] and others[1][0] == logprobs[0]
  alone = draw_jit(logits[3:4], keys[3:4])
  assert alone[0][0] == tokens[3] and abs(alone[1][0] - logprobs[3]) < 1e-5
  assert len(set(tokens.tolist())) > 10


def test_a_sharded_vocabulary_draws_the_same(rng, key):
  logits, keys = jnp.asarray(rng.normal(scale=2, size=(8, 264)), jnp.float32), jax.random.split(key, 8)
  mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
  spread = jax.device_put(logits, NamedSharding(mesh, PartitionSpec("data", "tensor")))
  tokens, logprobs = draw_jit(spread, jax.device_put(keys, NamedSharding(mesh, PartitionSpec("data"))))
  expected = draw_jit(logits, keys)
  np.testing.assert_array_equal(tokens, expected[0])
  np.testing.assert_allclose(logprobs, expected[1], atol=1e-5)


def test_dtypes(key):
  tokens, logprobs = draw(jnp.zeros((3, 7), jnp.bfloat16), jax.random.split(key, 3))
  assert tokens.dtype == jnp.int32 and logprobs.dtype == jnp.float32
  np.testing.assert_allclose(logprobs, -np.log(7), rtol=1e-6)
