"""Stripes of rows, with which the devices of the mesh axis `context` share attention evenly.

Under causal attention the cost of a token grows with its position. If each of n devices held one
contiguous part of a long sequence, the last one would have 2 - 1/n times the mean work. A row is
therefore cut into stripes, which are dealt to the devices in turn, forth and back: 0, 1, 2, 2, 1,
0, 0, 1, ... All layers and the output head compute in the order of the stripes. Before and after
them, only ids and numbers per token change places.

References:
  Striped attention, arXiv:2311.09431, 2023 (stripes of one token); The Llama 3 herd of models,
  arXiv:2407.21783, 2024, section 3.3.2 (two stripes per device, whose keys all devices gather).
"""

from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Shaped

from jaxrl_llm.devices.mesh import BATCH_AXES, num_row_shards
from jaxrl_llm.kernels.stripes import Stripes


def stripes_of(length: int, mesh: Mesh | None) -> Stripes | None:
  """Returns the stripes of rows of `length` slots; None if no two devices share one.

  That is so if the axis `context` has one device or does not divide the slots.
  """
  parts = 1 if mesh is None else mesh.shape["context"]
  return Stripes(length, parts) if parts > 1 and length % parts == 0 and length > parts else None


def striped(x: Shaped[Array, "B T ..."], mesh: Mesh | None) -> Shaped[Array, "B T ..."]:
  """Moves slots between devices, from the order of the row to that of its stripes.

  It gathers whole rows on each device, so it is meant for few numbers per token. Rows without
  stripes stay as they are.
  """
  return x if stripes_of(x.shape[1], mesh) is None else _moved(x, mesh, False)


def in_row_order(x: Shaped[Array, "B T ..."], mesh: Mesh | None) -> Shaped[Array, "B T ..."]:
  """Inverts `striped`."""
  return x if stripes_of(x.shape[1], mesh) is None else _moved(x, mesh, True)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(x: Array, mesh: Mesh, is_back: bool) -> Array:
  slots = stripes_of(x.shape[1], mesh).slots
  order = np.argsort(slots) if is_back else slots
  rows = PartitionSpec(BATCH_AXES if len(x) % num_row_shards(mesh) == 0 else None, "context")

  @partial(jax.shard_map, mesh=mesh, in_specs=(rows, PartitionSpec("context")), out_specs=rows, check_vma=False)
  def move(x, order):
    return jax.lax.all_gather(x, "context", axis=1, tiled=True)[:, order]

  return move(x, order)


# The gradient of a permutation is its inverse; JAX's own would be a scatter.
_moved.defvjp(
  lambda x, mesh, is_back: (_moved(x, mesh, is_back), None), lambda mesh, is_back, _, ct: (_moved(ct, mesh, not is_back),)
)
