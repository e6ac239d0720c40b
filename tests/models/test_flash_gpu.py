"""Attention kernels for GPUs over packed rows: emulated, and lowered to Triton without a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import flash, flash_gpu
from jaxrl_llm.models.attention import packed, xla_attention
from jaxrl_llm.models.flash_gpu import Sizes, Tiles
from tests.models.test_flash import LENGTH, ROWS, TOLERANCE, arrays, with_gradients

flash_attention = functools.partial(flash.flash_attention, platform="gpu", interpret=True)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
  """Sizes of which each kernel has its own, so that no list fits another."""
  sizes = Sizes(Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2), Tiles(64, 128, 4, 2))
  monkeypatch.setattr(flash_gpu, "_SIZES", dict.fromkeys(flash_gpu._SIZES, sizes))


def compare(inputs, segments, prefixes, dtype="float32", **options):
  """Compares attention and its gradients with plain attention in float32."""
  q, k, v, d_out = inputs
  d_out = jnp.where((segments > 0)[..., None, None], d_out, 0)
  run = lambda q, k, v: flash_attention(q, k, v, segments, prefixes, **options)
  y, *gradients = jax.jit(lambda *x: with_gradients(run, *x))(q, k, v, d_out)
  plain = lambda *x: xla_attention(*x, packed(segments, prefixes).mask)
  expected_y, *expected = jax.jit(lambda *x: with_gradients(plain, *x))(*(x.astype(jnp.float32) for x in (q, k, v, d_out)))
  real = np.asarray(segments > 0)
  assert y.dtype == gradients[0].dtype == gradients[1].dtype == gradients[2].dtype == jnp.dtype(dtype)
  np.testing.assert_allclose(np.asarray(y, np.float32)[real], np.asarray(expected_y)[real], **TOLERANCE[dtype])
  assert not np.any(y[~real])
  for name, x, expected_x in zip("qkv", gradients, expected, strict=True):
    np.testing.assert_allclose(np.asarray(x, np.float32), expected_x, **TOLERANCE[dtype], err_msg=f"gradient of {name}")
    assert not np.any(x[~real])


@pytest.mark.parametrize("name", ROWS)
def test_the_kernels_equal_plain_attention(name, rng):
  compare(arrays(rng), *ROWS[name])
