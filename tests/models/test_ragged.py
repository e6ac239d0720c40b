"""Attention of a decoding step that reads the tokens of its rows, against plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import cache as cache_lib
from jaxrl_llm.models import ragged

STEP = 900


def ring(columns, newest):
  """Returns the ages of columns that are written in turn, the newest last."""
  return jnp.asarray([(newest - i) % columns for i in range(columns)])


def held(rng, batch, heads, columns, width, dtype):
  k, v = (jnp.asarray(rng.standard_normal((batch, columns, heads, width)), jnp.float32) for _ in range(2))
  return cache_lib.key_values(k, v, dtype)


@pytest.mark.parametrize(
  ("dtype", "shape", "columns", "tolerance"),
  [
    ("float32", (4, 2, 8, 128), 512, 2e-6),
    ("float32", (6, 1, 1, 128), 384, 2e-6),
    ("bfloat16", (4, 2, 8, 128), 512, 2e-3),
    ("int8", (4, 2, 4, 256), 256, 2e-3),
  ],
)
def test_the_kernel_equals_plain_attention(dtype, shape, columns, tolerance):
  rng = np.random.default_rng(0)
  batch, heads, _, width = shape
  kv = held(rng, batch, heads, columns, width, dtype)
  q = jnp.asarray(rng.standard_normal(shape), "float32" if dtype == "float32" else "bfloat16")
  ages = ring(columns, newest=columns // 3)
  lengths = jnp.asarray([1, columns, 0, columns // 2 + 5, 130, 17][:batch])
  read = ragged.visits(ages, lengths, rows=ragged.rows_per_group(batch))
  top, total, mix = ragged.attend(q, kv, ages, lengths, read, interpret=True)
  plain = cache_lib.attend(q, kv, ages < lengths[:, None])
  sees = np.asarray(lengths) > 0
  np.testing.assert_allclose(mix[sees] / total[sees, ..., None], plain.mix[sees] / plain.total[sees, ..., None], atol=tolerance)
  np.testing.assert_allclose((top + jnp.log(total))[sees], (plain.top + jnp.log(plain.total))[sees], atol=10 * tolerance)
  assert not np.any(mix[~sees]) and np.all(total[~sees] == 1)


def test_the_kernel_is_sharded_by_rows_and_heads():
  rng, mesh = np.random.default_rng(1), mesh_lib.make_mesh(fsdp=2, expert=2, tensor=2)
  kv, q = held(rng, 8, 2, 128, 128, "float32"), jnp.asarray(rng.standard_normal((8, 2, 2, 128)), jnp.float32)
  ages, lengths = ring(128, newest=100), jnp.asarray([5, 100, 1, 128, 7, 64, 33, 2])
  read = ragged.visits(ages, lengths, rows=1)
  parts = jax.jit(lambda *x: ragged.attend(*x, mesh=mesh, interpret=True))(q, kv, ages, lengths, read)
  for got, expected in zip(parts, ragged.attend(q, kv, ages, lengths, read, interpret=True), strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_only_blocks_that_hold_tokens_are_read():
  """Lengths are log-normal with a long tail; plain attention would read all columns."""
  rng, columns, batch = np.random.default_rng(2), 16384, 64
  lengths = np.minimum(np.exp(rng.normal(np.log(2900), 0.8, batch)) * rng.uniform(0, 1, batch), columns).astype(int) + 1
  ages = ring(columns, newest=5000)
  read = ragged.visits(ages, jnp.asarray(lengths), rows=16)
  size = ragged.block_columns(columns)
  is_held = (np.asarray(ages)[None] < lengths[:, None]).reshape(batch, -1, size).any(axis=2)
  assert int(read.counts.sum()) == is_held.sum()
  assert is_held.sum() * size < 1.15 * (lengths + size).sum() < 0.2 * batch * columns
  for group, (blocks, count) in enumerate(zip(np.asarray(read.blocks), np.asarray(read.counts), strict=True)):
    expected = np.flatnonzero(is_held[16 * group : 16 * (group + 1)].ravel())
    assert blocks[:count].tolist() == expected.tolist()


def test_a_cache_that_the_kernel_cannot_divide_is_refused():
  assert not ragged.is_used("auto", "tpu", 64, 256) and not ragged.is_used("xla", "tpu", 128, 256)
  message = "^config.serving.attention: found 'ragged' for heads of width 64 .* expected multiples of 128 on a TPU"
  with pytest.raises(ValueError, match=message):
    ragged.is_used("ragged", "cpu", 64, 256)
  with pytest.raises(ValueError, match="a block of 100 columns on a tpu"):
    ragged.is_used("ragged", "tpu", 128, 100)
