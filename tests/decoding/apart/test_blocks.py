"""Arrays of process 0 reach the devices of all processes block by block, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.decoding.apart.blocks import BlockWriter


@pytest.mark.parametrize(
  ("shape", "spec", "sizes"),
  [
    ((7, 12, 5), (None, "b"), {4: 1, 2: 2, 1: 5}),
    ((16, 3), ("a",), {4: 16, 2: 16, 1: 16}),  # Its first axis is split: a block is all of it.
    ((5, 6), (), {4: 5, 2: 5, 1: 5}),
    ((), (), {4: 1, 2: 1, 1: 1}),
  ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_blocks_arrive(shape, spec, sizes, dtype):
  """Also on a mesh whose devices are in another order than their numbers."""
  mesh = Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("a", "b"))
  x = np.asarray(np.random.default_rng(0).standard_normal(shape) * 50).astype(dtype)
  if x.ndim and x.dtype != np.int8:
    x[0, 0] = -0.0  # A sum of numbers would lose its sign.
  sharding = NamedSharding(mesh, PartitionSpec(*spec))
  writer, filled, held = BlockWriter(jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding), block_bytes=300), 0, None
  held = writer.begin()
  assert writer.size == sizes[x.dtype.itemsize]
  written = []
  while filled < x.nbytes:  # As pieces of 100 bytes arrive.
    before, filled = filled, min(filled + 100, x.nbytes)
    for start in writer.whole(before, filled):
      assert x.ndim == 0 or (start + writer.size) * x[0].nbytes <= filled
      held = writer.write(held, start, writer.block(x, start))
      written.append(start)
  assert written == list(writer.starts())
  assert held.sharding.is_equivalent_to(sharding, x.ndim)
  assert np.asarray(held).tobytes() == x.tobytes()
