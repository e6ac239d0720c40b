"""Grouped products for GPUs: emulated, and lowered to Triton without a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels import grouped, grouped_gpu
from jaxrl_llm.models.experts import Weights, dispatch
from tests.kernels.test_grouped_tpu import check_products
from tests.kernels.triton import kernels_of, lines, lowered, shapes


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 8e-3)])
@pytest.mark.parametrize(
  ("sizes", "rest", "width", "hidden"),
  [
    pytest.param((5, 0, 7, 1), 3, 6, 4, marks=pytest.mark.slow),  # Parts of a tile, one empty.
    pytest.param((0, 130, 126, 0), 0, 24, 40, marks=pytest.mark.slow),  # Empty groups at both ends.
    ((300, 1, 0, 83), 128, 136, 8),  # Whole tiles that belong to no group.
    pytest.param((0, 0, 0), 9, 8, 8, marks=pytest.mark.slow),  # No row is of a group.
    ((70, 128), 0, 128, 64),  # Widths without masks.
    pytest.param((70, 128), 0, 320, 160, marks=pytest.mark.slow),  # Uneven widths.
  ],
)
def test_products_and_gradients_equal_a_loop_over_groups(rng, sizes, rest, width, hidden, dtype, tolerance):
  rest, of_rest = check_products("gpu", rng, sizes, rest=rest, width=width, hidden=hidden, dtype=dtype, tolerance=tolerance)
  assert not np.any(rest) and not np.any(of_rest)


@pytest.mark.parametrize(("sizes", "num_rows"), [((0, 33, 16, 0, 1), 60), ((0, 0), 5), ((64,), 64), ((15, 15, 15), 45), ((0,), 32)])
def test_tiles_cover_each_row_once_and_stay_in_its_group(sizes, num_rows):
  groups, starts, ends = (np.asarray(x) for x in grouped_gpu._tiled(jnp.asarray(sizes), num_rows, 16))
  covered = [(row, group) for group, start, end in zip(groups, starts, ends, strict=True) for row in range(start, min(start + 16, end))]
  assert covered == list(enumerate(np.repeat(np.arange(len(sizes) + 1), [*sizes, num_rows - sum(sizes)])))


def layer(dtype, *, tokens=1024, top_k=8, experts=32, width=2048, hidden=768):
  """Returns a layer of experts with all gradients, and its arguments' shapes."""
  of = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
  weights = Weights(of(experts, width, hidden), of(experts, width, hidden), of(experts, hidden, width))

  def run(x, gates, chosen, weights, ct, product):
    y, vjp = jax.vjp(lambda x, weights: dispatch(x, gates, chosen, weights, product=product), x, weights)
    return y, vjp(ct)

  tokens_by_copies = of(tokens, top_k, dtype="float32"), of(tokens, top_k, dtype="int32")
  return run, (of(tokens, width), *tokens_by_copies, weights, of(tokens, width))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_layer_of_experts_lowers_to_triton_without_a_dense_product(dtype):
  """Each of three projections is one kernel, and two more in the backward pass."""
  run, arguments = layer(dtype)
  program = lowered(functools.partial(run, product=grouped.grouped_matmul_for("gpu")), *arguments)
  kernels = kernels_of(program)
  assert sorted(kernel.name for kernel in kernels) == ["grouped_products"] * 6 + ["grouped_sums"] * 3
  for kernel in kernels:
    assert len(lines(kernel.text, "scf.for")) == 1 and not lines(kernel.text, "scf.while")
    (dot,) = lines(kernel.text, "tt.dot")
    assert ("xbf16> * " in dot) == (dtype == "bfloat16") and (dtype == "bfloat16" or "tf32" not in dot)
  assert (32, 8192, 2048) not in shapes(program) and (32, 8192, 768) not in shapes(program)


def test_small_arrays_take_no_kernel():
  run, arguments = layer("float32", tokens=64, experts=4, width=256, hidden=128)
  assert not kernels_of(lowered(functools.partial(run, product=grouped.grouped_matmul_for("gpu")), *arguments))
