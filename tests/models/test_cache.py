"""Tests of attention through the cache: parts of the keys, prompts, writes, and precision."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels import columns_tpu
from jaxrl_llm.kernels.types import KeyValues, KeyValuesByToken
from jaxrl_llm.models import cache, make_model, preset
from jaxrl_llm.models.attention import packed, row_attention

ROWS, KV, GROUP, WIDTH = 6, 2, 3, 8


both_layouts = pytest.mark.parametrize("layout", [KeyValues, KeyValuesByToken])


def drawn(rng, tokens, rows=ROWS):
  return tuple(jnp.asarray(rng.standard_normal((rows, tokens, KV, WIDTH)), jnp.float32) for _ in range(2))


def has_wide_vectors():
  """Returns whether the processor may have vectors of 512 bits."""
  path = pathlib.Path("/proc/cpuinfo")
  return not path.exists() or "avx2" not in path.read_text() or "avx512" in path.read_text()


def softmax_loop(q, k, v, mask):
  """Computes attention one row, one head and one token at a time, in float64."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros(q.shape)
  for row, kv, head in np.ndindex(*q.shape[:3]):
    scores = np.array([q[row, kv, head] @ k[row, t, kv] * WIDTH**-0.5 if mask[row, t] else -np.inf for t in range(k.shape[1])])
    weights = np.exp(scores - scores.max())
    out[row, kv, head] = sum(w * v[row, t, kv] for t, w in enumerate(weights / weights.sum()))
  return out


@both_layouts
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("bfloat16", 2e-2), ("int8", 2e-2)])
def test_parts_of_the_keys_make_one_softmax(rng, dtype, error, layout):
  q = jnp.asarray(2 * rng.standard_normal((ROWS, KV, GROUP, WIDTH)), jnp.float32)
  k, v = drawn(rng, 9)
  mask = rng.random((ROWS, 9)) < 0.5
  mask[:, 4] = True
  mask[0, :4] = False  # The first row sees nothing of the first part.
  held = lambda a, b: cache.key_values(k[:, a:b], v[:, a:b], dtype, layout)
  parts = [cache.attend(q, held(a, b), jnp.asarray(mask[:, a:b])) for a, b in ((0, 4), (4, 5), (5, 9))]
  merged, expected = np.asarray(cache.merge(parts)), softmax_loop(q, k, v, mask)
  assert np.abs(merged - expected).max() < error and (dtype == "float32" or np.abs(merged - expected).max() > 1e-5)
  np.testing.assert_allclose(cache.merge(parts[::-1]), merged, atol=1e-6)


@pytest.mark.parametrize("length", [33, 64, 65, 256])
def test_spans_attend_as_whole_rows_do_to_the_last_bit(rng, length):
  """Whatever the blocks of the cache, and by spans of any length."""
  q, k, v = (jnp.asarray(rng.standard_normal((2, length, heads, 64)), jnp.float32) for heads in (6, 2, 2))
  attend = jax.jit(lambda *x: row_attention(*x, packed(jnp.ones((2, length), jnp.int32)), backend="auto", mesh=None))
  expected = np.asarray(attend(q, k, v))
  held = [cache.empty(2, size, num_kv_heads=2, head_dim=64, dtype="float32") for size in (64, 64, 192)]
  all_columns = jnp.tile(jnp.arange(length), (2, 1))
  held = cache.write_spans(held, cache.key_values(k, v, "float32"), cache.Spans(None, all_columns))
  for size in (32, 48):
    for start in range(0, length, size):
      here = slice(start, min(start + size, length))
      columns = jnp.full((2, size), cache.NOWHERE).at[:, : here.stop - start].set(all_columns[:, here])
      spans = cache.Spans(None, columns)
      queries = jnp.zeros((2, size, 6, 64)).at[:, : here.stop - start].set(q[:, here])
      mixed = np.asarray(jax.jit(cache.attend_spans)(queries, held, spans))[:, : here.stop - start]
      # Seen with vectors of 128 and 256 bits; wider ones may cut the sums elsewhere.
      np.testing.assert_allclose(mixed, expected[:, here], rtol=0, atol=1e-6 if has_wide_vectors() else 0)


@pytest.mark.parametrize("pieces", [1, 2])
def test_each_row_attends_to_its_own_prompt(rng, pieces):
  """Rows may decode any sequences in any order, or none."""
  num_prompts, group = 4, 3
  of_piece = num_prompts * group // pieces
  k, v = drawn(rng, 5, rows=num_prompts)
  mask = np.arange(5) >= np.array([0, 2, 4, 1])[:, None]
  rows = ROWS // pieces
  sequences = np.stack([rng.permutation(of_piece)[:rows] for _ in range(pieces)])
  sequences[0, 1] = of_piece  # This row decodes no sequence.
  served = np.zeros((pieces, of_piece), int)
  for piece, row in np.ndindex(pieces, rows):
    if sequences[piece, row] < of_piece:
      served[piece, sequences[piece, row]] = row
  q = jnp.asarray(rng.standard_normal((ROWS, KV, GROUP, WIDTH)), jnp.float32)
  view = cache.View(jnp.int32(0), (), jnp.ones(len(q), jnp.int32), (), jnp.asarray(mask), jnp.asarray(served), jnp.asarray(sequences))
  part = cache.attend_prompts(q, cache.key_values(k, v, "float32"), view)
  prompts = (np.arange(pieces)[:, None] * of_piece + np.minimum(sequences, of_piece - 1)).reshape(-1) // group
  expected = softmax_loop(q, np.asarray(k)[prompts], np.asarray(v)[prompts], mask[prompts])
  busy = (sequences < of_piece).reshape(-1)
  np.testing.assert_allclose(np.asarray(cache.merge([part]))[busy], expected[busy], atol=1e-6)


@both_layouts
@pytest.mark.parametrize("dtype", cache.CACHE_DTYPES)
def test_a_token_is_written_to_its_column_only(rng, dtype, layout):
  blocks = [cache.key_values(*drawn(rng, size), dtype, layout) for size in (2, 1, 3)]
  new = cache.key_values(*drawn(rng, 1), dtype, layout)
  axes = dict(zip(new._fields, new.token_axes if dtype == "int8" else new.token_axes[:2], strict=False))
  whole = lambda blocks, name: np.concatenate([np.asarray(getattr(block, name), np.float32) for block in blocks], axis=axes[name])
  for column in range(6):
    written, spans = cache.write(blocks, new, jnp.int32(column)), cache.Spans(None, jnp.full((ROWS, 1), column))
    jax.tree.map(np.testing.assert_array_equal, cache.write_spans(blocks, new, spans), written)
    assert {type(block) for block in written} == {layout}
    for name, axis in axes.items():
      before, after = whole(blocks, name), whole(written, name)
      np.testing.assert_array_equal(np.delete(after, column, axis), np.delete(before, column, axis))
      np.testing.assert_array_equal(np.take(after, [column], axis), whole([new], name))


@pytest.mark.parametrize("dtype", cache.CACHE_DTYPES)
def test_tpus_write_what_a_scatter_writes(rng, dtype):
  """Spans one after the other, some of one row, beyond the block, or empty; and a token per row."""
  drawn = lambda rows, tokens: [jnp.asarray(rng.standard_normal((rows, tokens, 2, 128)), jnp.float32) for _ in range(2)]
  block = cache.key_values(*drawn(4, 256), dtype)
  columns = jnp.asarray([[5, 6, 7], [126, 127, 128], [129, 130, 256], [256, 0, 1], [255, 256, 256], [256] * 3])
  spans = cache.key_values(*drawn(6, 3), dtype), jnp.asarray([2, 0, 0, 1, 3, 3]), columns
  jax.tree.map(np.testing.assert_array_equal, cache.put_windows(block, *spans), cache.put_tokens(block, *spans))
  new, columns = cache.key_values(*drawn(4, 1), dtype), jnp.asarray([0, 255, cache.NOWHERE, 130])
  expected = cache.put_tokens(block, new, jnp.arange(4), jnp.minimum(columns, 256)[:, None])
  jax.tree.map(np.testing.assert_array_equal, columns_tpu.put(block, new, columns, interpret=True), expected)
  assert np.any(np.asarray(expected.v != block.v), axis=(1, 3)).sum() == 3


def test_int8_is_exact_to_half_a_step(rng):
  k, v = drawn(rng, 4)
  held = cache.key_values(k.at[0, 0, 0].set(0.0), v, "int8")
  assert held.k.dtype == held.v.dtype == jnp.int8 and np.all(np.isfinite(held.k_scale))
  back = held.v.astype(jnp.float32) * held.v_scale[..., None]
  assert np.all(np.abs(back - v.transpose(0, 2, 1, 3)) <= 0.5001 * held.v_scale[..., None])
  assert np.all(np.abs(held.v).max(axis=-1) == 127) and np.all(held.k[0, 0, :, 0] == 0)


@both_layouts
def test_blocks_are_filled_from_the_right(rng, layout):
  prefilled = cache.key_values(*drawn(rng, 7), "float32", layout)
  parts = cache.filled([cache.key_values(*drawn(rng, size), "float32", layout) for size in (2, 3)], prefilled)
  np.testing.assert_array_equal(np.concatenate([part.v for part in parts], axis=2), prefilled.v[:, :, 2:])
  axis = prefilled.token_axes[0]
  np.testing.assert_array_equal(np.concatenate([part.k for part in parts], axis=axis), np.split(prefilled.k, [2], axis=axis)[1])


def test_num_bytes_is_the_size_of_the_arrays():
  model = make_model(preset("nano", vocab_size=264))
  for dtype in cache.CACHE_DTYPES:
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((3, 16), jnp.int32)
    held, _ = jax.eval_shape(lambda p, t, dtype=dtype: model.prefill(p, t, t > 0, dtype=dtype), params, tokens)
    held = jax.eval_shape(lambda c, dtype=dtype: model.grow(model.grow(c, 6, 5, dtype=dtype), 6, 7, dtype=dtype), held)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(held))
    assert size == cache.num_bytes(model.config, num_prompts=3, prompt_tokens=16, num_rows=6, new_tokens=12, dtype=dtype)
