"""Grouped products for TPUs: an interpreted kernel, and what libtpu compiles."""

import functools
import importlib.util
import itertools
import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.kernels import grouped_tpu
from jaxrl_llm.kernels.grouped import grouped_matmul_for
from jaxrl_llm.models.copies import sums_for
from jaxrl_llm.models.experts import Weights, dispatch
from tests.marks import few
from tests.runs import ROOT


def draw(rng, sizes, *, rest, width, hidden, dtype):
  """Draws rows, matrices and cotangents, which are not finite after the last group."""
  num_rows = sum(sizes) + rest
  shapes = ((num_rows, width), (len(sizes), width, hidden), (num_rows, hidden))
  rows, matrices, ct = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
  is_grouped = (jnp.arange(num_rows) < sum(sizes))[:, None]
  return jnp.where(is_grouped, rows, jnp.nan), matrices, jnp.where(is_grouped, ct, jnp.inf)


def by_a_loop(rows, matrices, ct, sizes):
  """Computes the product and both gradients of the grouped rows in float64."""
  rows, matrices, ct = (np.asarray(x, np.float64) for x in (rows, matrices, ct))
  groups = list(enumerate(itertools.pairwise(np.cumsum([0, *sizes]))))
  products = np.concatenate([rows[a:b] @ matrices[e] for e, (a, b) in groups])
  of_rows = np.concatenate([ct[a:b] @ matrices[e].T for e, (a, b) in groups])
  return products, of_rows, np.stack([rows[a:b].T @ ct[a:b] for _, (a, b) in groups])


def check_products(platform, rng, sizes, *, dtype, tolerance, **shape):
  """Compares an emulated product and its gradients with a loop over the groups.

  The tolerance is relative to the largest element. bfloat16 rounds each result by 2⁻⁹.

  Returns:
    The results for the rows after the last group, and their gradients.
  """
  rows, matrices, ct = draw(rng, sizes, dtype=dtype, **shape)
  product, num_grouped = grouped_matmul_for(platform, dense_bytes=0, interpret=True), sum(sizes)
  products, vjp = jax.vjp(jax.jit(lambda *x: product(*x, jnp.asarray(sizes, jnp.int32))), rows, matrices)
  of_rows, of_matrices = vjp(ct)
  assert products.dtype == of_rows.dtype == of_matrices.dtype == jnp.dtype(dtype)
  ours = (products[:num_grouped], of_rows[:num_grouped], of_matrices)
  for x, expected in zip(ours, by_a_loop(rows, matrices, ct, sizes), strict=True):
    largest = np.max(np.abs(expected), initial=1)
    np.testing.assert_allclose(np.asarray(x, np.float64), expected, rtol=0, atol=tolerance * largest)
  return products[num_grouped:], of_rows[num_grouped:]


@pytest.mark.parametrize(("dtype", "tolerance"), few([("float32", 2e-6), ("bfloat16", 8e-3)], 0))
@pytest.mark.parametrize(
  ("sizes", "rest", "width", "hidden"),
  [
    ((5, 0, 7, 1), 3, 6, 4),  # Groups within one tile, one of them empty.
    ((0, 130, 126, 0), 0, 24, 40),  # Empty groups at both ends, and one that crosses tiles.
    ((300, 1, 0, 83), 128, 136, 8),  # A whole tile that belongs to no group.
    ((0, 0, 0), 9, 8, 8),  # All experts of the rows are elsewhere.
    ((128, 256), 0, 1100, 16),  # Two tiles of a width that they do not divide.
  ],
)
def test_products_and_gradients_equal_a_loop_over_groups(rng, sizes, rest, width, hidden, dtype, tolerance):
  _, of_rest = check_products("tpu", rng, sizes, rest=rest, width=width, hidden=hidden, dtype=dtype, tolerance=tolerance)
  assert not np.any(of_rest)


@pytest.mark.parametrize("room", few(["all copies", "some copies"], rest="slow", by_hand=(0,)))
def test_rows_that_the_kernel_leaves_unwritten_change_no_gradient(room, rng, monkeypatch):
  """Four of eight experts are here, so every token has copies after the last group."""
  product, names = jax.lax.ragged_dot, ("x", "gates", "weights")
  unwritten = lambda rows, matrices, sizes, **options: jnp.where(
    (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None], product(rows, matrices, sizes, **options), jnp.nan
  )
  x, gates = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((120, 16), (120, 4)))
  experts = jnp.asarray(np.stack([rng.permutation(8)[:4] for _ in range(120)]), jnp.int32)
  weights = Weights(*(jnp.asarray(0.2 * rng.standard_normal(shape), jnp.float32) for shape in ((4, 16, 8), (4, 16, 8), (4, 8, 16))))
  num_experts = None if room == "all copies" else 8
  layer = functools.partial(dispatch, num_experts=num_experts, first=2, sums=sums_for("tpu", interpret=True))
  loss = lambda product: lambda x, gates, weights: jnp.sum(jnp.sin(layer(x, gates, experts, weights, product=product)))
  gradients = lambda product: jax.grad(loss(product), argnums=(0, 1, 2))(x, gates, weights)
  expected = gradients(grouped_matmul_for("cpu"))
  monkeypatch.setattr(jax.lax, "ragged_dot", unwritten)
  for name, ours, theirs in zip(names, gradients(grouped_matmul_for("tpu", interpret=True)), expected, strict=True):
    chex.assert_trees_all_close(ours, theirs, rtol=1e-5, atol=1e-5, custom_message=name)


def test_more_tiles_than_one_call_may_count_are_summed_over_calls(rng, monkeypatch):
  monkeypatch.setattr(grouped_tpu, "_MOST_TILES", 2)
  sizes = (200, 0, 300, 150, 50)  # Groups begin and end in each of three calls of 256 rows.
  rows, _, ct = draw(rng, sizes, rest=20, width=16, hidden=8, dtype="float32")
  of_matrices = grouped_tpu.of_matrices(rows, ct, jnp.asarray(sizes, jnp.int32), interpret=True)
  np.testing.assert_allclose(of_matrices, by_a_loop(rows, np.zeros((5, 16, 8)), ct, sizes)[2], rtol=0, atol=1e-4)


def test_a_call_has_fewer_tiles_than_the_kernel_can_count():
  """The kernel finds the tiles that it visits with this histogram in float32."""
  counts = lambda tiles: np.asarray(jnp.histogram(jnp.arange(tiles), bins=tiles, range=(0, tiles - 1))[0])
  assert all(np.all(counts(tiles) == 1) for tiles in (1, 2, 513, grouped_tpu._MOST_TILES, 2 * grouped_tpu._MOST_TILES))
  assert not np.all(counts(4 * grouped_tpu._MOST_TILES) == 1)


LAYER = """
import os, re, sys
from experiments.pod import topology
topology.prepare()
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxrl_llm.models.experts import Weights, dispatch
from jaxrl_llm.kernels.grouped import grouped_matmul_for

where = SingleDeviceSharding(topology.describe("v5p:2x2x1").devices[0])
N, K, E, D, F = 1024, 8, 32, 2048, 768
of = lambda shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
weights = Weights(of((E, D, F)), of((E, D, F)), of((E, F, D)))

def layer(x, gates, experts, weights, ct):
  product = grouped_matmul_for("tpu")
  y, vjp = jax.vjp(lambda x, w: dispatch(x, gates, experts, w, product=product), x, weights)
  return y, vjp(ct)

arguments = (of((N, D)), of((N, K), jnp.float32), of((N, K), jnp.int32), weights, of((N, D)))
compiled = jax.jit(layer).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
needed = 3 * 3 * 2 * N * K * D * F
print(compiled.cost_analysis()["flops"] / needed)
print(len(re.findall(rf"\\[{E},{N * K},\\d+\\]", compiled.as_text())))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the package libtpu is not installed")
def test_a_layer_of_experts_compiles_to_the_operations_that_it_needs():
  """No product of all rows with each matrix is left.

  libtpu 0.0.42 makes one of `ragged_dot`'s own gradient, 11 times as many operations in all.
  """
  environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  result = subprocess.run([sys.executable, "-c", LAYER], cwd=ROOT, env=environment, capture_output=True, text=True)
  assert result.returncode == 0, result.stderr[-2000:]
  ratio, dense = map(float, result.stdout.split()[-2:])
  assert 1 <= ratio <= 1.05 and dense == 0
