"""Attention of a decoding step that reads the tokens of its rows, against plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models import cache as cache_lib
from jaxrl_llm.models import ragged
from tests.marks import few

PLATFORMS = ("tpu", "gpu")


def emulated(platform):
  return ragged.KERNELS[platform]._replace(is_emulated=True)


def ring(columns, newest):
  """Returns the ages of columns that are written in turn, the newest last."""
  return jnp.asarray([(newest - i) % columns for i in range(columns)])


def held(rng, batch, heads, columns, width, dtype):
  k, v = (jnp.asarray(rng.standard_normal((batch, columns, heads, width)), jnp.float32) for _ in range(2))
  return cache_lib.key_values(k, v, dtype)


def visits(platform, ages, lengths):
  rows, columns = ragged.rows_per_group(len(lengths), platform), ragged.block_columns(len(ages), platform)
  return ragged.visits(ages, lengths, rows=rows, columns=columns)


def assert_as_plain(part, q, kv, ages, lengths, *, tolerance):
  """Asserts that a part is that of plain attention, and empty in rows that see nothing."""
  top, total, mix = part
  plain = cache_lib.attend(q, kv, ages < lengths[:, None])
  sees = np.asarray(lengths) > 0
  np.testing.assert_allclose(mix[sees] / total[sees, ..., None], plain.mix[sees] / plain.total[sees, ..., None], atol=tolerance)
  np.testing.assert_allclose((top + jnp.log(total))[sees], (plain.top + jnp.log(plain.total))[sees], atol=10 * tolerance)
  assert not np.any(mix[~sees]) and np.all(total[~sees] == 1)


@pytest.mark.parametrize("platform", few(PLATFORMS, 0))
@pytest.mark.parametrize(
  ("dtype", "shape", "columns", "tolerance"),
  few([
    ("float32", (4, 2, 8, 128), 512, 2e-6),
    ("float32", (6, 1, 1, 128), 384, 2e-6),
    ("bfloat16", (4, 2, 8, 128), 512, 1e-5),
    ("int8", (4, 2, 4, 256), 256, 1e-5),
    ("int8", (4, 1, 16, 128), 512, 1e-5),
  ], 0, 3),
)
def test_the_kernel_equals_plain_attention(platform, dtype, shape, columns, tolerance):
  rng = np.random.default_rng(0)
  batch, heads, _, width = shape
  kv = held(rng, batch, heads, columns, width, dtype)
  q = jnp.asarray(rng.standard_normal(shape), "float32" if dtype == "float32" else "bfloat16")
  ages = ring(columns, newest=columns // 3)
  lengths = jnp.asarray([1, columns, 0, columns // 2 + 5, 130, 17][:batch])
  part = ragged.attend(q, kv, ages, lengths, visits(platform, ages, lengths), kernel=emulated(platform))
  assert_as_plain(part, q, kv, ages, lengths, tolerance=tolerance)


@pytest.mark.parametrize("platform", few(PLATFORMS, 0))
def test_the_kernel_is_sharded_by_rows_and_heads(platform):
  rng, mesh = np.random.default_rng(1), mesh_lib.make_mesh(fsdp=2, expert=2, tensor=2)
  kv, q = held(rng, 8, 2, 128, 128, "float32"), jnp.asarray(rng.standard_normal((8, 2, 2, 128)), jnp.float32)
  ages, lengths = ring(128, newest=100), jnp.asarray([5, 100, 1, 128, 7, 64, 33, 2])
  read = ragged.visits(ages, lengths, rows=1, columns=ragged.block_columns(128, platform))
  kernel = emulated(platform)
  parts = jax.jit(lambda *x: ragged.attend(*x, kernel=kernel, mesh=mesh))(q, kv, ages, lengths, read)
  for got, expected in zip(parts, ragged.attend(q, kv, ages, lengths, read, kernel=kernel), strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(("platform", "rows", "overhead"), [("tpu", 16, 1.15), ("gpu", 1, 1.03)])
def test_only_blocks_that_hold_tokens_are_listed(platform, rows, overhead):
  """Lengths are log-normal with a long tail; plain attention would read all columns."""
  rng, columns, batch = np.random.default_rng(2), 16384, 64
  lengths = np.minimum(np.exp(rng.normal(np.log(2900), 0.8, batch)) * rng.uniform(0, 1, batch), columns).astype(int) + 1
  ages = ring(columns, newest=5000)
  read = visits(platform, ages, jnp.asarray(lengths))
  assert len(read.counts) == batch // rows
  size = ragged.block_columns(columns, platform)
  is_held = (np.asarray(ages)[None] < lengths[:, None]).reshape(batch, -1, size).any(axis=2)
  assert int(read.counts.sum()) == is_held.sum()
  assert is_held.sum() * size < overhead * (lengths + size).sum() < 0.2 * batch * columns
  for group, (blocks, count) in enumerate(zip(np.asarray(read.blocks), np.asarray(read.counts), strict=True)):
    expected = np.flatnonzero(is_held[rows * group : rows * (group + 1)].ravel())
    assert blocks[:count].tolist() == expected.tolist()


@pytest.mark.parametrize("platform", few(PLATFORMS, 0))
def test_other_blocks_are_not_read(platform):
  """Blocks without a token of a row hold NaNs, which plain attention would spread."""
  rng, columns, lengths = np.random.default_rng(3), 512, jnp.asarray([70, 0, 300, 1])
  kv, q = held(rng, 4, 1, columns, 128, "float32"), jnp.asarray(rng.standard_normal((4, 1, 2, 128)), jnp.float32)
  ages = ring(columns, newest=40)
  size = ragged.block_columns(columns, platform)
  is_held = jnp.repeat((ages < lengths[:, None]).reshape(4, -1, size).any(axis=2), size, axis=1)[:, None]
  spoilt = cache_lib.KeyValues(jnp.where(is_held[:, :, None], kv.k, jnp.nan), jnp.where(is_held[..., None], kv.v, jnp.nan))
  part = ragged.attend(q, spoilt, ages, lengths, visits(platform, ages, lengths), kernel=emulated(platform))
  assert_as_plain(part, q, kv, ages, lengths, tolerance=2e-6)


def test_a_cache_that_the_kernel_cannot_divide_is_refused():
  assert not ragged.is_used("auto", "tpu", 64, 256) and not ragged.is_used("xla", "tpu", 128, 256)
  message = "^config.serving.attention: found 'ragged' for heads of width 64 .* expected a multiple of 128 and a multiple of 128"
  with pytest.raises(ValueError, match=message):
    ragged.is_used("ragged", "cpu", 64, 256)
  with pytest.raises(ValueError, match="a block of 100 columns on a tpu"):
    ragged.is_used("ragged", "tpu", 128, 100)
  with pytest.raises(ValueError, match="heads of width 96 .* on a gpu, expected 64, 128 or 256 and a multiple of 64; choose 'xla'"):
    ragged.is_used("ragged", "gpu", 96, 128)


def test_gpus_use_the_kernel_and_cpus_only_on_request():
  assert ragged.is_used("auto", "gpu", 128, 256) and not ragged.is_used("auto", "gpu", 96, 256)
  assert ragged.is_used("ragged", "cpu", 128, 256) and not ragged.is_used("auto", "cpu", 128, 256)
