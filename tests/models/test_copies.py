"""Copies of tokens and sums over them, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.copies import BLOCK, Copies, copied, summed, sums_by_place, sums_by_product, sums_for
from tests.marks import few

SUMS = {"place": sums_by_place, "blocks": sums_for("tpu", interpret=True), "product": sums_by_product}


def draw(rng, *, num_tokens, top_k, num_rows, num):
  """Draws which `num` of the copies lie in which rows."""
  copies = rng.permutation(num_tokens * top_k)
  tokens = np.where(np.arange(num_rows) < num, copies[:num_rows] // top_k, rng.integers(num_tokens, size=num_rows))
  places = np.argsort(copies)
  return Copies(jnp.asarray(tokens), jnp.asarray(places), jnp.asarray(num))


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize(
  ("num_tokens", "top_k", "num_rows", "num"),
  few([
    (2 * BLOCK, 2, 300, 300),  # Whole blocks, all rows used.
    (BLOCK + 7, 3, 256, 100),  # A block that is not full.
    (5, 4, 20, 0),  # All experts are elsewhere.
  ], 1),
)
def test_copies_and_sums_are_each_others_transposes(rng, name, num_tokens, top_k, num_rows, num):
  """Small integers, so that sums are exact in any order. Rows without a copy are not finite."""
  copies = draw(rng, num_tokens=num_tokens, top_k=top_k, num_rows=num_rows, num=num)
  rows = jnp.asarray(rng.integers(-9, 9, size=(num_rows, 6)), jnp.float32).at[num:].set(jnp.nan)
  x = jnp.asarray(rng.integers(-9, 9, size=(num_tokens, 6)), jnp.float32)
  expected = np.zeros((num_tokens, 6))
  for row in range(num):
    expected[copies.tokens[row]] += rows[row]
  y, of_rows = jax.vjp(lambda rows: summed(rows, copies, num_tokens, SUMS[name]), rows)
  copy, of_tokens = jax.vjp(lambda x: copied(x, copies, SUMS[name]), x)
  np.testing.assert_array_equal(y, expected)
  np.testing.assert_array_equal(copy[:num], x[copies.tokens[:num]])
  np.testing.assert_array_equal(of_rows(x)[0][:num], x[copies.tokens[:num]])
  np.testing.assert_array_equal(of_tokens(rows)[0], expected)


@pytest.mark.parametrize("name", SUMS)
def test_copies_in_half_precision_are_summed_in_float32(name):
  """256 + 1 + 1 is 258, but 256 in bfloat16, whose next number is 258, after each addition."""
  copies = Copies(jnp.zeros(3, jnp.int32), jnp.arange(3), jnp.asarray(3))
  rows = jnp.asarray([[256.0], [1.0], [1.0]], jnp.bfloat16)
  assert summed(rows, copies, 1, SUMS[name]).tolist() == [[258.0]]
