"""Whitening and explained variance, over the counted entries of the whole batch."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jaxrl_llm.advantages import explained_variance, whiten
from jaxrl_llm.advantages.statistics import centred

MASK = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 0]], bool)


@pytest.mark.parametrize("eps", [0.0, 1e-8, 0.5])
def test_whiten_matches_its_formula(x64, rng, eps):
  x = 3 + 2 * rng.standard_normal(MASK.shape)
  kept = x[MASK]
  mean, var = kept.mean(), kept.var(ddof=1)
  expected = np.where(MASK, (x - mean) / np.sqrt(var + eps), 0)
  np.testing.assert_allclose(whiten(x, MASK, eps=eps), expected, rtol=1e-10)
  np.testing.assert_allclose(whiten(x, MASK, shift_mean=False, eps=eps), np.where(MASK, expected + mean, 0), rtol=1e-10)
  # The shape may be any; only the counted entries matter.
  np.testing.assert_allclose(whiten(x.ravel(), MASK.ravel(), eps=eps), expected.ravel(), rtol=1e-10)


def test_whitened_entries_have_mean_zero_and_variance_one(x64, rng):
  y = np.asarray(whiten(1e4 + rng.standard_normal(MASK.shape), MASK, eps=0.0))[MASK]
  np.testing.assert_allclose(y.mean(), 0, atol=1e-11)
  np.testing.assert_allclose(y.var(ddof=1), 1, rtol=1e-10)


@pytest.mark.parametrize("x", [0.1, 1 / 3, -7.3e5, 0.0])
@pytest.mark.parametrize("num_counted", [0, 1, 2, 3, 7, 12])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_equal_entries_whiten_to_exact_zeros_or_to_themselves(x, num_counted, eps):
  x, mask = np.full((3, 4), x, np.float32), (np.arange(12) < num_counted).reshape(3, 4)
  assert np.all(whiten(x, mask, eps=eps) == 0)
  np.testing.assert_array_equal(whiten(x, mask, shift_mean=False, eps=eps), np.where(mask, x, 0))


def test_centred_along_an_axis(x64, rng):
  x = rng.standard_normal(MASK.shape)
  y, mean = centred(jax.numpy.asarray(x), jax.numpy.asarray(MASK), axis=1)
  assert np.all(np.asarray(y)[~MASK] == 0) and mean.shape == (3, 1)
  for row in (0, 2):
    np.testing.assert_allclose(y[row, MASK[row]], x[row, MASK[row]] - x[row, MASK[row]].mean(), rtol=1e-10)
    np.testing.assert_allclose(mean[row, 0], x[row, MASK[row]].mean(), rtol=1e-10)


def test_explained_variance_matches_its_formula(x64, rng):
  values, returns = rng.standard_normal((2, *MASK.shape))
  expected = 1 - np.var((returns - values)[MASK]) / np.var(returns[MASK])
  np.testing.assert_allclose(explained_variance(values, returns, MASK), expected, rtol=1e-10)
  for offset in (0.0, 5.0):  # A constant error has no variance.
    np.testing.assert_allclose(explained_variance(returns + offset, returns, MASK), 1, rtol=1e-10)
  np.testing.assert_allclose(explained_variance(np.full_like(returns, 2.0), returns, MASK), 0, atol=1e-12)
  np.testing.assert_allclose(explained_variance(-returns, returns, MASK), -3, rtol=1e-10)


@hypothesis.given(st.integers(0, 2**32 - 1), st.integers(-30, 30), st.integers(-30, 30), st.lists(st.booleans(), min_size=12, max_size=12))
def test_explained_variance_is_finite(seed, value_scale, return_scale, mask):
  values, returns = np.random.default_rng(seed).integers(-2, 3, (2, 12)).astype(np.float32)
  explained = explained_variance(
    values * np.float32(10.0**value_scale), returns * np.float32(10.0**return_scale), np.array(mask)
  )
  assert explained.dtype == np.float32 and np.isfinite(explained) and explained <= 1


@pytest.mark.parametrize("num_counted", [0, 1, 2, 5])
def test_returns_that_do_not_vary_explain_nothing(num_counted):
  values, returns = np.arange(5, dtype=np.float32), np.full(5, 0.1, np.float32)
  assert explained_variance(values, returns, np.arange(5) < num_counted) == 0


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda x: whiten(x, MASK[0]), r"^mask: found shape \(4,\), expected \(3, 4\), the shape of x$"),
    (lambda x: whiten(x, MASK, eps=-1.0), "^eps: found -1.0, expected a number >= 0$"),
    (lambda x: whiten(x.astype(complex), MASK), "^x: found complex64, expected real numbers$"),
    (lambda x: explained_variance(x, x[0], MASK), r"^returns: found shape \(4,\), expected \(3, 4\), the shape of values$"),
    (lambda x: explained_variance(x, x, MASK[0]), r"^mask: found shape \(4,\), expected \(3, 4\), the shape of values$"),
  ],
)
def test_refusals(call, message):
  with pytest.raises(ValueError, match=message):
    call(np.ones(MASK.shape, np.float32))
