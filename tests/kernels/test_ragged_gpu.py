"""The attention kernel for GPUs: emulated in many shapes, and lowered to Triton without a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.decoding.sampler import make_sampler, seeded
from jaxrl_llm.kernels import ragged_gpu
from jaxrl_llm.kernels.types import KeyValuesByToken
from jaxrl_llm.models import cache as cache_lib
from jaxrl_llm.models import make_model, preset, ragged
from tests.kernels.triton import kernels_of, lines, lowered
from tests.marks import few

KERNEL = ragged.KERNELS["gpu"]
TRITON = "custom_call @__gpu$xla.gpu.triton("


def step(seed, *, rows, heads=2, group=2, width=64, columns=256, dtype="float32", activations="float32", most=None):
  """Returns the arguments of the kernel for rows of random lengths, and the mask that they mean.

  The columns are written in turn, and the newest is a random one, so that most ranges wrap.
  """
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), activations)
  kv = cache_lib.key_values(normal(rows, columns, heads, width), normal(rows, columns, heads, width), dtype, KeyValuesByToken)
  ages = jnp.asarray((rng.integers(columns) - np.arange(columns)) % columns)
  lengths = jnp.asarray(rng.integers(0, (most or columns) + 1, rows) * (rng.random(rows) > 0.2))
  read = ragged.visits(ages, lengths, rows=1, columns=ragged.block_columns(columns, "gpu"))
  return (2 * normal(rows, heads, group, width), kv, ages, lengths, read), ages < lengths[:, None]


def assert_as_plain(arguments, mask, *, tolerance):
  """Asserts that rows that see something attend as in plain JAX, and that the others are empty."""
  part, plain = ragged_gpu.attend(*arguments, interpret=True), cache_lib.attend(*arguments[:2], mask)
  sees = np.asarray(mask.any(axis=1))
  # Beside another part, such as the prompt, so that the sizes of parts count too.
  other = cache_lib.Partial(jnp.zeros_like(part.top), jnp.ones_like(part.total), jnp.ones_like(part.mix))
  merged, expected = cache_lib.merge([part, other]), cache_lib.merge([plain, other])
  np.testing.assert_allclose(merged[sees], expected[sees], atol=tolerance)
  np.testing.assert_allclose(part.top[sees], plain.top[sees], atol=tolerance)
  np.testing.assert_allclose(part.total[sees], plain.total[sees], rtol=tolerance)
  np.testing.assert_array_equal(merged[~sees], other.mix[~sees])


@pytest.mark.parametrize(
  "shape",
  few([
    dict(rows=1),
    dict(rows=1, heads=1, group=1, columns=64),
    dict(rows=1, columns=4096),
    dict(rows=24, columns=512),
    dict(rows=200, heads=2, columns=128),
    dict(rows=5, group=3, columns=192),
    dict(rows=3, group=16, width=128),
    dict(rows=2, group=24, width=128),
    dict(rows=4, group=8, width=256),
    dict(rows=7, columns=2304, most=90),
  ], 1, 5, rest="exhaustive"),
  ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_float32_activations_equal_plain_attention(shape, dtype):
  assert_as_plain(*step(0, dtype=dtype, **shape), tolerance=1e-5)


@pytest.mark.parametrize("programs", [1, 512])
@pytest.mark.parametrize("seed", few(range(8), 0, 1, rest="exhaustive"))
def test_random_ranges_equal_plain_attention(seed, programs, monkeypatch):
  """A row has one program, which reads all of its blocks, or as many as it has blocks."""
  monkeypatch.setattr(ragged_gpu, "_PROGRAMS", programs)
  assert_as_plain(*step(seed, rows=6, columns=320), tolerance=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("columns", few([64, 1024], 0))
def test_bfloat16_activations_equal_plain_attention(dtype, columns, monkeypatch):
  """Rounded to bfloat16, weights relative to another maximum would differ by 4e-3."""
  monkeypatch.setattr(ragged_gpu, "_PROGRAMS", 1)
  arguments, mask = step(1, rows=6, group=4, width=128, columns=columns, dtype=dtype, activations="bfloat16")
  assert_as_plain(arguments, mask, tolerance=1e-5)


def test_rows_that_see_nothing_are_empty():
  arguments, _ = step(2, rows=4)
  read = cache_lib.Visits(arguments[-1].blocks, jnp.zeros(4, jnp.int32))
  part = ragged_gpu.attend(*arguments[:3], jnp.zeros(4, jnp.int32), read, interpret=True)
  assert not np.any(part.mix) and np.all(part.total == 1) and np.all(part.top < -1e38)


def test_shares_fill_a_gpu_and_bound_the_longest_row():
  for rows, heads, columns in [(1, 8, 16384), (32, 8, 4096), (512, 8, 16384), (512, 4, 64), (1, 1, 64)]:
    blocks = columns // 64
    shares = ragged_gpu.num_shares(rows * heads, blocks)
    assert shares <= blocks <= 32 * shares
    assert rows * heads * shares >= min(512, rows * heads * blocks)


@pytest.mark.parametrize("shares", few([1, 3, 4], 1))
def test_the_number_of_shares_changes_nothing(shares, monkeypatch):
  arguments, mask = step(3, rows=5)
  monkeypatch.setattr(ragged_gpu, "num_shares", lambda programs, blocks: shares)
  assert_as_plain(arguments, mask, tolerance=1e-5)


@pytest.mark.parametrize(
  ("shape", "warps"),
  few([
    (dict(rows=4, group=4, width=128, columns=512, dtype="bfloat16", activations="bfloat16"), 4),
    (dict(rows=4, group=7, width=64, columns=192), 4),
    (dict(rows=4, group=1, width=128, columns=192), 8),
    (dict(rows=4, group=24, width=256, columns=512, dtype="int8", activations="bfloat16"), 8),
    (dict(rows=4, group=2, width=128, columns=512, dtype="int8"), 8),
  ], 0),
  ids=str,
)
def test_the_kernel_lowers_to_triton(shape, warps):
  arguments, _ = step(0, **shape)
  program = lowered(ragged_gpu.attend, *arguments)
  (kernel,) = kernels_of(program)
  shares = ragged_gpu.num_shares(8, shape["columns"] // 64)
  assert (kernel.grid, kernel.warps, kernel.stages) == ((shares, 2, 4), warps, 3)
  # The cache goes into the kernel as it is, and is read in its own dtype.
  call = next(line for line in program.as_text().splitlines() if TRITON in line)
  assert all(f"%arg{i}" in call for i in range(len(jax.tree.leaves(arguments))))
  held = {"float32": "f32", "bfloat16": "bf16", "int8": "i8"}[shape.get("dtype", "float32")]
  # Keys, too, are read token by token.
  loads = lines(kernel.text, "tt.load")
  assert sum(f"tensor<64x{shape['width']}x!tt.ptr<{held}>>" in line for line in loads) == 2, loads
  # Triton pipelines only the loops whose number of turns is known before the first one.
  assert len(lines(kernel.text, "scf.for")) == 1 and not lines(kernel.text, "scf.while")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_products_of_float32_are_not_rounded_to_tf32(dtype):
  arguments, _ = step(0, rows=2, dtype=dtype)
  products = lines(kernels_of(lowered(ragged_gpu.attend, *arguments))[0].text, "tt.dot")
  assert len(products) == 2 and all(line.count("xf32>") == 3 and "tf32" not in line for line in products), products


def test_what_pads_the_queries_is_not_stored():
  """A store without a mask, which is its third operand, would overwrite the results of others."""
  arguments, _ = step(0, rows=2, group=3)
  stores = lines(kernels_of(lowered(ragged_gpu.attend, *arguments))[0].text, "tt.store")
  assert len(stores) == 3 and all(line.partition(" : ")[0].count("%") == 3 for line in stores), stores


def test_a_whole_sampler_lowers_to_triton(monkeypatch):
  """One kernel for each layer and stretch of decoding that reads a block."""
  monkeypatch.setitem(ragged.KERNELS, "cpu", KERNEL)
  for module in ("decoding", "transformer"):
    monkeypatch.setattr(f"jaxrl_llm.models.{module}.layout_of", lambda mesh: KeyValuesByToken)
  shape = preset("nano", vocab_size=264)._replace(num_layers=2, head_dim=64, decode_attention="ragged")
  model = make_model(shape)
  sampler = make_sampler(model, group_size=2, max_new_tokens=128, cache_blocks=(64, 64), stop_ids=(1,), pad_id=0)
  prompts = jax.ShapeDtypeStruct((2, 6), jnp.int32), jax.ShapeDtypeStruct((2, 6), jnp.bool)
  program = lowered(sampler, jax.eval_shape(model.init, jax.random.key(0)), *prompts, seeded(jax.random.key(0), 4))
  assert program.as_text().count(TRITON) == 2 * (1 + 2)


def test_int8_arrays_that_triton_would_misread_are_refused():
  """Triton's offsets are signed, and JAX chooses 32 bits for them up to 4 GiB."""
  arguments, _ = step(0, rows=4, dtype="int8")
  grown = lambda x: jax.ShapeDtypeStruct((1 << 17, *x.shape[1:]), x.dtype)
  q, kv, ages, lengths, read = arguments
  assert grown(kv.k).size > 1 << 31
  with pytest.raises(ValueError, match=r"^config.rollout.slots: found int8 keys of 4294967296 entries .* more rollout.cache_blocks"):
    jax.eval_shape(ragged_gpu.attend, grown(q), jax.tree.map(grown, kv), ages, grown(lengths), jax.tree.map(grown, read))


@pytest.mark.parametrize("dtype", cache_lib.CACHE_DTYPES)
def test_the_rows_of_a_prompt_read_it_together(dtype, rng, monkeypatch):
  """With rows in any order, prompts of all lengths, and one of no cached token."""
  monkeypatch.setitem(ragged.KERNELS, "cpu", KERNEL._replace(is_emulated=True))
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  held = cache_lib.key_values(normal(4, 128, 2, 64), normal(4, 128, 2, 64), dtype, KeyValuesByToken)
  lengths = jnp.asarray([128, 1, 0, 70])
  seen = jnp.arange(128) >= 128 - lengths[:, None]
  rows = jnp.asarray(rng.permutation(12))
  read = ragged.last_visits(lengths, 128, columns=64)
  np.testing.assert_array_equal(read.counts, ragged.visits(jnp.arange(128)[::-1], lengths, rows=1, columns=64).counts)
  view = cache_lib.View(jnp.int32(0), (), lengths, (), seen, rows[None], jnp.argsort(rows)[None], read)
  q, other = 2 * normal(12, 2, 3, 64), cache_lib.nothing_of(normal(12, 2, 3, 64))._replace(total=jnp.ones((12, 2, 3)))
  part, plain = (ragged.attend_prompts(q, held, x, mesh=None) for x in (view, view._replace(prompt_reads=None)))
  # Beside another part, as in a step, that a row without a prompt is left with.
  other = other._replace(top=jnp.zeros_like(other.top))
  np.testing.assert_allclose(cache_lib.merge([part, other]), cache_lib.merge([plain, other]), atol=1e-5)
