"""Grouped products for GPUs: emulated, and lowered to Triton without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import grouped_gpu
from tests.models.test_grouped_tpu import by_a_loop, draw


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 8e-3)])
@pytest.mark.parametrize(
  ("sizes", "rest", "width", "hidden"),
  [
    ((5, 0, 7, 1), 3, 6, 4),  # Groups of less than a tile, one of them empty.
    ((0, 130, 126, 0), 0, 24, 40),  # Empty groups at both ends, and no row after the last.
    ((300, 1, 0, 83), 128, 136, 8),  # Whole tiles that belong to no group.
    ((0, 0, 0), 9, 8, 8),  # All experts of the rows are elsewhere.
    ((70, 128), 0, 320, 160),  # Several tiles on each axis, which they do not divide.
    ((70, 128), 0, 128, 64),  # Widths that tiles divide, which no mask checks.
  ],
)
def test_products_and_gradients_equal_a_loop_over_groups(rng, sizes, rest, width, hidden, dtype, tolerance):
  """The tolerance is relative to the largest element. bfloat16 rounds each result by 2⁻⁹."""
  rows, matrices, ct = draw(rng, sizes, rest=rest, width=width, hidden=hidden, dtype=dtype)
  product = lambda rows, matrices: grouped_gpu.grouped_matmul(rows, matrices, jnp.asarray(sizes, jnp.int32), interpret=True)
  products, vjp = jax.vjp(jax.jit(product), rows, matrices)
  of_rows, of_matrices = vjp(ct)
  assert products.dtype == of_rows.dtype == of_matrices.dtype == jnp.dtype(dtype)
  num_grouped = sum(sizes)
  ours = (products[:num_grouped], of_rows[:num_grouped], of_matrices)
  for x, expected in zip(ours, by_a_loop(rows, matrices, ct, sizes), strict=True):
    largest = np.max(np.abs(expected), initial=1)
    np.testing.assert_allclose(np.asarray(x, np.float64), expected, rtol=0, atol=tolerance * largest)
  assert not np.any(products[num_grouped:]) and not np.any(of_rows[num_grouped:])
