"""Shared properties of every function with a mask: junk outside it, NaN under it, padding, dtypes.

Here the functions run under jit, in the other files without it.
"""

import jax
import numpy as np
import pytest

from jaxrl_llm.advantages import (
  explained_variance,
  generalized_advantages,
  length_adaptive_lambda,
  otb_advantages,
  returns_to_go,
  state_advantages,
  step_advantages,
  token_rewards,
  whiten,
)

MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 1], [0, 1, 0, 0, 0], [1, 0, 1, 1, 0]], bool)
ENDS = np.array([[0, 1, 0, 0, 1], [1, 1, 0, 0, 1], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0]], bool)

STATES = np.array([[0, 1, 0, 0, 0], [0, 1, 0, 0, 2], [0, 2, 0, 0, 0], [2, 0, 0, 0, 0]])

# Each is a function of two float arrays [N, R] and the mask.
FUNCTIONS = {
  "step_advantages": lambda x, y, mask: step_advantages(x, ENDS if mask.shape == ENDS.shape else padded(ENDS), mask, 2),
  "state_advantages": lambda x, y, mask: state_advantages(
    x, ENDS if mask.shape == ENDS.shape else padded(ENDS), STATES if mask.shape == ENDS.shape else padded(STATES), mask, gamma=0.9
  ),
  "otb_advantages": lambda x, y, mask: otb_advantages(np.array([1, 0, 2, 0.5], x.dtype), x * x, mask, 2),
  "token_rewards": lambda x, y, mask: token_rewards(np.arange(4.0, dtype=x.dtype), mask, y, 0.5),
  "returns_to_go": lambda x, y, mask: returns_to_go(x, mask, gamma=0.9),
  "generalized_advantages": lambda x, y, mask: generalized_advantages(x, y, mask, gamma=0.9, lam=length_adaptive_lambda(mask, alpha=0.5)),
  "whiten": lambda x, y, mask: whiten(x, mask),
  "whiten_without_shift": lambda x, y, mask: whiten(x, mask, shift_mean=False),
  "explained_variance": lambda x, y, mask: explained_variance(x, y, mask),
}
# One jit compiles once; the functions by themselves would compile a dozen times.
JITTED = {name: jax.jit(fn) for name, fn in FUNCTIONS.items()}
NAMES = sorted(FUNCTIONS)
READS_X = sorted(set(FUNCTIONS) - {"token_rewards"})
READS_Y = ["explained_variance", "generalized_advantages", "token_rewards"]


def padded(x, fill=0):
  return np.pad(x, ((0, 0), (0, 3)), constant_values=fill)


@pytest.fixture
def arrays(rng):
  return rng.standard_normal((2, *MASK.shape)).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf, 1e4])
def test_junk_outside_the_mask_changes_nothing(arrays, name, junk):
  x, y = arrays
  actual = JITTED[name](np.where(MASK, x, junk).astype(np.float32), np.where(MASK, y, junk).astype(np.float32), MASK)
  expected = JITTED[name](x, y, MASK)
  np.testing.assert_array_equal(actual, expected)
  assert np.all(np.isfinite(actual)) and (actual.ndim == 0 or np.all(np.asarray(actual)[~MASK] == 0))


@pytest.mark.parametrize(("name", "which"), [(name, 0) for name in READS_X] + [(name, 1) for name in READS_Y])
def test_a_nan_under_the_mask_surfaces(arrays, name, which):
  arrays[which][3, 2] = np.nan
  actual = np.asarray(JITTED[name](*arrays, MASK))
  assert np.isnan(actual if actual.ndim == 0 else actual[3, 2])
  if name in ("token_rewards", "returns_to_go", "generalized_advantages"):
    assert np.all(np.isfinite(actual[:3])) and np.isfinite(actual[3, 3])


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing(arrays, name):
  actual = JITTED[name](*(padded(x, np.nan) for x in arrays), padded(MASK))
  expected = np.asarray(JITTED[name](*arrays, MASK))
  np.testing.assert_allclose(actual, padded(expected) if expected.ndim else expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_precision_and_kinds_of_masks(arrays, name):
  x, y = arrays
  expected = JITTED[name](x, y, MASK)
  assert expected.dtype == np.float32
  low_precision = (jax.ShapeDtypeStruct(x.shape, jax.numpy.bfloat16) for x in arrays)
  assert jax.eval_shape(FUNCTIONS[name], *low_precision, MASK.astype(np.int32)).dtype == np.float32
  np.testing.assert_array_equal(JITTED[name](x, y, MASK.astype(np.float32)), expected)
  with jax.enable_x64(True):
    exact = JITTED[name](x.astype(np.float64), y.astype(np.float64), MASK)
    assert exact.dtype == np.float64
    assert jax.eval_shape(FUNCTIONS[name], x, y, MASK).dtype == np.float32
  np.testing.assert_allclose(expected, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_counted_tokens(arrays, name):
  assert np.all(np.asarray(JITTED[name](*arrays, np.zeros_like(MASK))) == 0)
