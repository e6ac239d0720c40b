"""The residual stream of whole rows, sharded by width over the mesh axis tensor.

Attention and feed-forward layers are sharded by heads and hidden units, and add up what the devices
of `tensor` compute. Between them each device keeps, normalises and, for the backward pass, saves
only its part of the width. An all-reduce becomes a reduce-scatter before the residual sum and an
all-gather after the norm, which send as many bytes.
"""

from functools import partial

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float


def is_sharded(shape: tuple[int, ...], mesh: Mesh | None) -> bool:
  """Returns whether a residual stream of shape [B, T, D] is sharded by width.

  It is not for a single token per row, whose collectives cost more time than bytes.

  Example:
    >>> from jaxrl_llm.devices.mesh import make_mesh
    >>> mesh = make_mesh(fsdp=4, tensor=2, devices=jax.devices()[:8])
    >>> [is_sharded(shape, mesh) for shape in ((4, 16, 32), (4, 1, 32), (4, 16, 33))]
    [True, False, False]
  """
  _, length, width = shape
  return mesh is not None and mesh.shape["tensor"] > 1 and length > 1 and width % mesh.shape["tensor"] == 0


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def scattered(x: Float[Array, "B T D"], mesh: Mesh | None) -> Float[Array, "B T D"]:
  """Shards states by width, and gathers their gradient.

  Of a sum over the devices of `tensor`, each device receives only its part.

  References:
    Reducing activation recomputation in large transformer models, arXiv:2205.05198, 2022.

  Note:
    The paper shards the slots of a row. libtpu compiles a reduce-scatter over slots to an
    all-reduce, of which each device keeps a part (0.0.42.1, groups of 4 TPU v6e).
  """
  return _constrained(x, mesh, "tensor")


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(x: Float[Array, "B T D"], mesh: Mesh | None) -> Float[Array, "B T D"]:
  """Gathers the whole width of states, and shards their gradient; inverts `scattered`."""
  return _constrained(x, mesh, None)


def whole(x: Float[Array, "B T D"], mesh: Mesh | None) -> Float[Array, "B T D"]:
  """Keeps the whole width of states, and of their gradient, on each device."""
  return _constrained(x, mesh, None)


def _constrained(x: Array, mesh: Mesh | None, width: str | None) -> Array:
  if not is_sharded(x.shape, mesh):
    return x
  spec = PartitionSpec(PartitionSpec.UNCONSTRAINED, PartitionSpec.UNCONSTRAINED, width)
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


scattered.defvjp(lambda x, mesh: (scattered(x, mesh), None), lambda mesh, _, ct: (_constrained(ct, mesh, None),))
gathered.defvjp(lambda x, mesh: (gathered(x, mesh), None), lambda mesh, _, ct: (_constrained(ct, mesh, "tensor"),))
