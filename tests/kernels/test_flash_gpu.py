"""Attention kernels for GPUs over packed rows: emulated, and lowered to Triton without a GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels import flash, flash_gpu
from jaxrl_llm.kernels.flash_gpu import Sizes, Tiles
from jaxrl_llm.kernels.visibility import Window
from jaxrl_llm.models import make_model, preset
from jaxrl_llm.models.attention import packed
from jaxrl_llm.models.remat import rematerialised
from tests.kernels import test_flash
from tests.kernels.test_flash import BATCH, LENGTH, ROWS, arrays, with_gradients
from tests.kernels.triton import kernels_of, lines, lowered, shapes
from tests.marks import few

flash_attention = functools.partial(flash.flash_attention, platform="gpu", interpret=True)


SMALL = Sizes(Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2), Tiles(64, 128, 4, 2))
"""Sizes of which each kernel has its own, so that no list fits another kernel."""


@pytest.fixture
def small_tiles(monkeypatch):
  monkeypatch.setattr(flash_gpu, "_SIZES", dict.fromkeys(flash_gpu._SIZES, SMALL))


compare = functools.partial(test_flash.compare, platform="gpu")


@pytest.mark.parametrize("name", [name if name == "shared prompts" else pytest.param(name, marks=pytest.mark.slow) for name in ROWS])
def test_the_kernels_equal_plain_attention(name, rng, small_tiles):
  compare(arrays(rng), *ROWS[name])


def test_tokens_see_a_window(rng, small_tiles):
  compare(arrays(rng), *ROWS["shared prompts"], size=50)


def test_rows_without_prefixes_need_none(rng, small_tiles):
  compare(arrays(rng), ROWS["padding"][0], None)


@pytest.mark.parametrize("num_heads, num_kv_heads, width, dtype", [
  pytest.param(2, 2, 128, "float32", marks=pytest.mark.slow),  # Every query head has its own keys.
  (3, 1, 128, "bfloat16"),
  pytest.param(4, 2, 64, "float32", marks=pytest.mark.slow),
  pytest.param(8, 1, 64, "bfloat16", marks=pytest.mark.slow),
  pytest.param(2, 1, 256, "float32", marks=pytest.mark.slow),
  pytest.param(2, 1, 256, "bfloat16", marks=pytest.mark.slow),
])  # fmt: skip
def test_heads_of_all_shapes_in_their_own_tiles(num_heads, num_kv_heads, width, dtype, rng):
  compare(arrays(rng, num_heads, num_kv_heads, width, dtype), *ROWS["shared prompts"], dtype=dtype)


@pytest.mark.slow
def test_rows_of_a_batch_are_apart(rng, small_tiles):
  compare(arrays(rng, 2, 1, 64, batch=3), *BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("start", [64, 192])
def test_queries_may_be_a_part_of_a_row(start, rng, small_tiles):
  """As on a mesh that splits rows: the queries are a slice, the keys are all of the row."""
  test_flash.compare_part(arrays(rng), start + jnp.arange(160), platform="gpu")


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("by_keys", [False, True])
def test_each_block_lists_what_it_sees_and_masks_what_is_not_whole(name, by_keys):
  segments, prefixes = (jnp.pad(x, ((0, 0), (0, -LENGTH % 128))) for x in ROWS[name])
  lists = flash.KERNELS["gpu"].lists(segments, prefixes, segments, jnp.arange(segments.shape[1]), SMALL)
  listed, tiles = (lists.of_keys, SMALL.of_keys) if by_keys else (lists.forward, SMALL.forward)
  seen = np.asarray(packed(segments, prefixes).mask)[0].reshape(-1, tiles.queries, 384 // tiles.keys, tiles.keys).swapaxes(1, 2)
  some, every = (x.T if by_keys else x for x in (seen.any((2, 3)), seen.all((2, 3))))
  for block, (whole, count) in enumerate(np.asarray(listed.counts[0])):
    visited = np.asarray(listed.blocks[0, block, :count])
    assert set(visited) >= set(np.flatnonzero(some[block])) and len(set(visited)) == count
    masked_too = set(np.flatnonzero(every[block])) - set(visited[:whole])
    assert set(visited[:whole]) <= set(np.flatnonzero(every[block])) and not (name == "one sequence" and masked_too)


@pytest.mark.parametrize("policy, expected", [("full", (2, 1, 1)), ("none", (1, 1, 1))])
def test_a_layer_launches_three_kernels(policy, expected, rng, small_tiles):
  """And the first of them twice where the policy recomputes, but it sorts their blocks once."""
  segments, prefixes = ROWS["shared prompts"]
  q, k, v, _ = arrays(rng)

  def loss(q, k, v):
    layer = lambda q, _: (flash_attention(q, k, v, segments, prefixes), None)
    return jax.lax.scan(rematerialised(layer, policy), q, None, length=2)[0].sum()

  program = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v))
  names = ("flash_forward", "flash_backward_of_queries", "flash_backward_of_keys")
  assert tuple(len(re.findall(rf"name={name}\b", program)) for name in names) == expected
  assert len(re.findall(r" = sort\[", program)) == 3


def test_heads_of_other_widths_are_refused():
  heads, ids = jax.ShapeDtypeStruct((1, 128, 2, 80), "bfloat16"), jax.ShapeDtypeStruct((1, 128), "int32")
  message = "^model.attention: found 'flash' with heads of width 80, expected 64, 128 or 256 on a gpu; set model.attention='auto'"
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(flash_attention, heads, heads, heads, ids)


def layer(dtype, width, *, length=4096, num_heads=8, num_kv_heads=2, size=None):
  """Returns a layer's attention with all gradients, and its arguments' shapes.

  `size` is that of a sliding window.
  """
  heads = lambda num: jax.ShapeDtypeStruct((1, length, num, width), dtype)
  ids = jax.ShapeDtypeStruct((1, length), "int32")

  def run(q, k, v, d_out, segments, prefixes):
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), segments.shape)
    window = size and Window(positions - size + 1, positions)
    attend = lambda q, k, v: flash.flash_attention(q, k, v, segments, prefixes, window=window, platform="gpu")
    return with_gradients(attend, q, k, v, d_out)

  return run, (heads(num_heads), heads(num_kv_heads), heads(num_kv_heads), heads(num_heads), ids, ids)


@pytest.mark.parametrize("width", flash_gpu.WIDTHS)
@pytest.mark.parametrize("dtype, size", few([("bfloat16", None), ("bfloat16", 512), ("float32", None)], 0, 1))
def test_the_kernels_lower_to_triton(dtype, size, width):
  run, arguments = layer(dtype, width, size=size)
  program = lowered(run, *arguments)
  kernels = kernels_of(program)
  assert [kernel.name for kernel in kernels] == ["flash_forward", "flash_backward_of_queries", "flash_backward_of_keys"]
  sizes = flash_gpu._SIZES[width, jnp.dtype(dtype).itemsize]
  grids = [(8, 4096 // sizes[0].queries, 1), (8, 4096 // sizes[1].queries, 1), (2, 4096 // sizes[2].keys, 1)]
  for kernel, tiles, grid, products in zip(kernels, sizes, grids, (2, 3, 4), strict=True):
    assert (kernel.grid, kernel.warps, kernel.stages) == (grid, tiles.warps, tiles.stages)
    # One loop without a mask, and one with; Triton reads ahead only where it knows their ends.
    assert len(lines(kernel.text, "scf.for")) == 2 and not lines(kernel.text, "scf.while")
    dots = lines(kernel.text, "tt.dot")
    operands = r" \* ".join([rf"tensor<\d+x\d+x{dict(bfloat16='bf16', float32='f32')[dtype]}>"] * 2)
    assert len(dots) == 2 * products and all(re.search(operands, line) for line in dots)
    assert dtype == "bfloat16" or not any("tf32" in line for line in dots)
  # No array of two axes of tokens, such as a mask or a bias.
  assert not [shape for shape in shapes(program) if shape.count(4096) > 1]


def test_auto_takes_the_kernels_for_long_rows(monkeypatch):
  """A whole model with its gradient, lowered for a GPU."""
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  model = make_model(preset("nano", vocab_size=264)._replace(num_layers=2, head_dim=64, dtype="bfloat16"))
  params = jax.eval_shape(model.init, jax.random.key(0))
  loss = lambda params, tokens: model.logits(params, tokens, tokens, tokens).sum()
  program = lowered(jax.grad(loss), params, jax.ShapeDtypeStruct((1, 4096), "int32"))
  assert {kernel.name for kernel in kernels_of(program)} == {"flash_forward", "flash_backward_of_queries", "flash_backward_of_keys"}
