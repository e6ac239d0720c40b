"""The meshes of learner and sampler, the table of shardings, and the placement of batches."""

from jaxrl_llm.devices.mesh.devices import AXES, make_mesh, make_meshes, mesh_shape, staging_mesh
from jaxrl_llm.devices.mesh.placement import (
  BATCH_AXES,
  RULES,
  num_row_shards,
  param_shardings,
  place_rows,
  place_tokens,
  replicated,
  row_sharding,
  state_shardings,
  token_sharding,
)

__all__ = [
  "AXES", "BATCH_AXES", "RULES", "make_mesh", "make_meshes", "mesh_shape", "num_row_shards", "param_shardings", "place_rows",
  "place_tokens", "replicated", "row_sharding", "staging_mesh", "state_shardings", "token_sharding",
]  # fmt: skip
