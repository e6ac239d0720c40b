"""Attention by kernels for TPUs, emulated, against plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels import flash, flash_tpu
from jaxrl_llm.kernels.flash_tpu import ACTIVE, FIRST_OF_KEYS, FIRST_OF_QUERIES, LAST_OF_KEYS, LAST_OF_QUERIES, WHOLE
from jaxrl_llm.models.attention import packed, xla_attention
from jaxrl_llm.models.remat import rematerialised
from tests.kernels.windows import window_of
from tests.marks import few

LENGTH = 380  # Three blocks of 128; the last is not full.
TOLERANCE = {"float32": dict(rtol=2e-5, atol=6e-6), "bfloat16": dict(rtol=4e-2, atol=4e-2)}


def row(*runs):
  """Lays out one row of runs, each given as (segment, prefix, number of tokens)."""
  return tuple(jnp.asarray(np.repeat([run[i] for run in runs], [run[2] for run in runs])[None], jnp.int32) for i in (0, 1))


ROWS = {
  "one sequence": row((1, 0, LENGTH)),
  "packed": row(*((i + 1, 0, 38) for i in range(10))),
  # No sequence ends at the end of a block. Some blocks are visited for the prefix alone.
  "shared prompts": row((1, 0, 80), (2, 1, 150), (3, 0, 20), (4, 3, 70), (5, 1, 60)),
  # The second block sees all of the first, and nothing else.
  "a prompt of one block": row((1, 0, 128), (2, 1, 128), (3, 1, 124)),
  "padding": row((0, 0, 140), (4, 0, 30), (2, 4, 50), (0, 0, 160)),
  "nothing": row((0, 0, LENGTH)),
}
BATCH = [jnp.concatenate(ids) for ids in zip(*(ROWS[name] for name in ("padding", "shared prompts", "nothing")), strict=True)]
"""Segments and prefixes of three rows."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
  monkeypatch.setattr(flash, "_BLOCKS", (128,))


def arrays(rng, num_heads=4, num_kv_heads=2, width=64, dtype="float32", batch=1):
  shapes = [(batch, LENGTH, heads, width) for heads in (num_heads, num_kv_heads, num_kv_heads, num_heads)]
  return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def with_gradients(attend, q, k, v, d_out):
  y, gradients = jax.vjp(attend, q, k, v)
  return y, *gradients(d_out)


def compare(inputs, segments, prefixes, dtype="float32", size=None, **options):
  """Compares attention and its gradients with plain attention in float32.

  `size` is that of a sliding window.
  """
  window = size and window_of(segments, prefixes, size)
  q, k, v, d_out = inputs
  d_out = jnp.where((segments > 0)[..., None, None], d_out, 0)

  @jax.jit
  def run(q, k, v, d_out, segments, prefixes):
    attend = lambda q, k, v: flash.flash_attention(q, k, v, segments, prefixes, window=window, interpret=True, **options)
    return with_gradients(attend, q, k, v, d_out)

  @jax.jit
  def plain(q, k, v, d_out, segments, prefixes):
    mask = packed(segments, prefixes).mask
    mask = mask if window is None else mask & window.sees()
    return with_gradients(lambda *x: xla_attention(*x, mask), q, k, v, d_out)

  y, *gradients = run(q, k, v, d_out, segments, prefixes)
  expected_y, *expected = plain(*(x.astype(jnp.float32) for x in (q, k, v, d_out)), segments, prefixes)
  real = np.asarray(segments > 0)
  assert {x.dtype for x in (y, *gradients)} == {jnp.dtype(dtype)}
  np.testing.assert_allclose(np.asarray(y, np.float32)[real], np.asarray(expected_y)[real], **TOLERANCE[dtype])
  assert not np.any(y[~real])
  for name, x, expected_x in zip("qkv", gradients, expected, strict=True):
    np.testing.assert_allclose(np.asarray(x, np.float32), expected_x, **TOLERANCE[dtype], err_msg=f"gradient of {name}")
    assert not np.any(x[~real])


def compare_part(inputs, slots, **options):
  """Compares attention of some slots of a row to all of it, and the gradients."""
  segments, prefixes = ROWS["shared prompts"]  # Without padding.
  q, k, v, d_out = inputs

  def attend(q, k, v):
    own = (segments[:, slots], prefixes[:, slots])
    return flash.flash_attention(q, k, v, *own, keys=segments, slots=slots, interpret=True, **options)

  actual = jax.jit(lambda *x: with_gradients(attend, *x))(q[:, slots], k, v, d_out[:, slots])
  mask = packed(segments, prefixes).mask[:, slots]
  expected = with_gradients(lambda *x: xla_attention(*x, mask), q[:, slots], k, v, d_out[:, slots])
  for x, expected_x in zip(actual, expected, strict=True):
    np.testing.assert_allclose(x, expected_x, **TOLERANCE["float32"])


@pytest.mark.parametrize("name", few(ROWS, 0, 1, 2))
def test_the_kernels_equal_plain_attention(name, rng):
  compare(arrays(rng), *ROWS[name])


@pytest.mark.parametrize("name, size", few([("one sequence", 40), ("shared prompts", 100), ("a prompt of one block", 129)], 1))
def test_tokens_see_a_window(name, size, rng):
  """Shorter than a block, and longer than some sequences; blocks before it are not visited."""
  compare(arrays(rng), *ROWS[name], size=size)
  visible = lambda window: flash._visible(*ROWS[name], ROWS[name][0], jnp.arange(LENGTH), 20, 20, window)[0]
  every, near = visible(None), visible(window_of(*ROWS[name], size))
  assert near.sum() < every.sum() and not np.any(near & ~every)


@pytest.mark.parametrize("name", ["packed", "padding"])
def test_rows_without_prefixes_need_none(name, rng):
  compare(arrays(rng), ROWS[name][0], None)


@pytest.mark.parametrize("num_heads, num_kv_heads, width, dtype", few([
  (2, 2, 128, "float32"),  # Every query head has its own keys.
  (4, 1, 64, "float32"),  # In the backward pass, two parts of two heads each.
  (16, 1, 16, "float32"),
  (3, 1, 128, "bfloat16"),
  (4, 2, 64, "bfloat16"),
], 0, 3))  # fmt: skip
def test_heads_of_all_shapes(num_heads, num_kv_heads, width, dtype, rng):
  compare(arrays(rng, num_heads, num_kv_heads, width, dtype), *ROWS["shared prompts"], dtype=dtype)


def test_rows_of_a_batch_are_apart(rng):
  compare(arrays(rng, 2, 1, 16, batch=3), *BATCH)


@pytest.mark.slow
def test_keys_of_long_rows_come_in_parts(rng, monkeypatch):
  monkeypatch.setattr(flash, "_SUMS", 8 * 128 * 256)
  calls, backward = [], flash_tpu.backward
  monkeypatch.setattr(flash_tpu, "backward", lambda *x, **options: calls.append(x[1].shape[2]) or backward(*x, **options))
  compare(arrays(rng), *ROWS["shared prompts"])
  assert calls == [256, 128]


@pytest.mark.parametrize(
  ("parts", "stripe"),
  few([(((0, 160),), None), (((128, 288),), None), (((192, 352),), None),
   (((0, 128), (256, 380)), 128), (((64, 128), (192, 240), (300, 350)), 64)], 1, 2),
)  # fmt: skip
def test_queries_may_be_parts_of_a_row(parts, stripe, rng):
  """As on a mesh that splits rows: the queries are some slots, the keys are all of the row."""
  compare_part(arrays(rng), jnp.concatenate([jnp.arange(*part) for part in parts]), stripe=stripe)


def test_gradients_of_padding_are_finite(rng):
  """A loss that reads padding has a finite gradient."""
  segments, prefixes = ROWS["padding"]
  q, k, v, d_out = arrays(rng)
  y, *gradients = with_gradients(lambda *x: flash.flash_attention(*x, segments, prefixes, interpret=True), q, k, v, d_out)
  assert all(np.isfinite(x).all() for x in (y, *gradients))
  assert not np.any(gradients[0][np.asarray(segments == 0)])


def test_rows_with_too_many_pairs_of_blocks_are_refused():
  shape = lambda *sizes, dtype="bfloat16": jax.ShapeDtypeStruct(sizes, dtype)
  heads, ids = shape(1, 32768, 1, 64), shape(1, 32768, dtype="int32")
  message = "^model.attention: found 'flash' with 65536 pairs of blocks on a device .1 x 32768 queries, 32768 keys .* at most 50000; set a"
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(flash.flash_attention, heads, heads, heads, ids)


def visited(pairs):
  count = int(pairs.count)
  return [np.asarray(x)[:count] for x in pairs[:-1]]


@pytest.mark.parametrize("name", ROWS)
def test_pairs_say_what_is_seen_and_what_is_complete(name):
  segments, prefixes = (jnp.pad(x, ((0, 0), (0, -LENGTH % 128))) for x in ROWS[name])
  pairs, windows = flash._pairs(segments, prefixes, segments, jnp.arange(384), flash._Sizes(128, 128, 4096))
  assert windows == [pairs]
  rows, queries, keys, leaving, flags = visited(pairs)
  seen = np.asarray(packed(segments, prefixes).mask)[0].reshape(3, 128, 3, 128).swapaxes(1, 2)
  assert not rows.any() and len(set(zip(queries, keys, strict=True))) == len(queries)
  assert sorted(set(queries)) == sorted(set(keys)) == [0, 1, 2] and (np.diff(queries) >= 0).all()
  active = {(i, j) for i, j, bits in zip(queries, keys, flags, strict=True) if bits & ACTIVE}
  assert active >= {(i, j) for i, j in np.ndindex(3, 3) if seen[i, j].any()}
  whole = {(i, j) for i, j, bits in zip(queries, keys, flags, strict=True) if bits & WHOLE}
  assert whole == {(i, j) for i, j in np.ndindex(3, 3) if seen[i, j].all()}
  for of, first, last in ((queries, FIRST_OF_QUERIES, LAST_OF_QUERIES), (keys, FIRST_OF_KEYS, LAST_OF_KEYS)):
    for block in range(3):
      turns = np.flatnonzero(of == block)
      assert [bool(flags[turn] & first) for turn in turns] == [turn == turns[0] for turn in turns]
      assert [bool(flags[turn] & last) for turn in turns] == [turn == turns[-1] for turn in turns]
  ends = [step for step in range(len(flags)) if flags[step] & LAST_OF_KEYS]
  assert leaving.tolist() == [keys[min(end for end in ends if end >= step)] for step in range(len(flags))]


@pytest.mark.exhaustive
def test_nearly_all_steps_have_work():
  """Rows of 18,432 tokens: groups of responses with log-normal lengths and a shared prompt."""
  rng, length, rows = np.random.default_rng(0), 18432, []
  while len(rows) < 4:
    runs, left, ids = [], length, iter(range(1, 1000))
    while left > 600:
      prompt = next(ids)
      runs, left = [*runs, (prompt, 0, 300)], left - 300
      for tokens in np.minimum(np.exp(rng.normal(np.log(2900), 0.8, 4)), 16384).astype(int):
        if tokens < left:
          runs, left = [*runs, (next(ids), prompt, tokens)], left - tokens
    rows.append(row(*runs, (0, 0, left)))
  segments, prefixes = (jnp.concatenate(x) for x in zip(*rows, strict=True))
  pairs, _ = flash._pairs(segments, prefixes, segments, jnp.arange(length), flash._Sizes(1024, 1024, 24576))
  *_, flags = visited(pairs)
  blocks = jax.jit(lambda *x: packed(*x).mask.reshape(18, 1024, 18, 1024).any((1, 3)))
  sees = np.stack([blocks(*x) for x in rows])
  assert sees.sum() / len(flags) >= 0.95 and sees.sum() < 0.6 * 4 * 171


@pytest.mark.parametrize("policy, expected", [("full", (2, 1)), ("none", (1, 1))])
def test_a_layer_launches_one_kernel_per_pass(policy, expected, rng):
  """Two forward passes where the policy recomputes, and one backward pass for all gradients."""
  segments, prefixes = ROWS["shared prompts"]
  q, k, v, _ = arrays(rng)
  layer = lambda q, _: (flash.flash_attention(q, k, v, segments, prefixes, interpret=True), None)
  loss = lambda q: jax.lax.scan(rematerialised(layer, policy), q, None, length=2)[0].sum()
  program = str(jax.make_jaxpr(jax.grad(loss))(q))
  assert tuple(program.count(f"name=flash_{name}") for name in ("forward", "backward")) == expected


@pytest.mark.slow
@pytest.mark.parametrize("num_cores", few([1, 2], 0))
def test_no_memory_is_read_before_it_is_written(num_cores, rng):
  """With copies between memories simulated, and the heads split over the cores of a chip."""
  from jax.experimental.pallas import tpu as pltpu

  segments, prefixes = ROWS["shared prompts"]
  q, k, v, d_out = arrays(rng, width=16)
  simulator = pltpu.InterpretParams(num_cores_or_threads=num_cores, uninitialized_memory="nan")
  actual = with_gradients(lambda *x: flash.flash_attention(*x, segments, prefixes, interpret=simulator), q, k, v, d_out)
  expected = with_gradients(lambda *x: xla_attention(*x, packed(segments, prefixes).mask), q, k, v, d_out)
  for x, expected_x in zip(actual, expected, strict=True):
    np.testing.assert_allclose(x, expected_x, **TOLERANCE["float32"])
