"""The meshes of learner and sampler, the table of shardings, and the placement of batches."""

from jaxrl_llm.devices.mesh.devices import AXES, SAMPLER_FIELDS, make_mesh, make_meshes, mesh_shape, platform_of, staging_mesh
from jaxrl_llm.devices.mesh.placement import (
  BATCH_AXES,
  RULES,
  num_row_shards,
  own_row_shards,
  param_shardings,
  place_rows,
  place_tokens,
  replicated,
  row_sharding,
  state_shardings,
  token_sharding,
)
from jaxrl_llm.devices.mesh.serving import EXPERT_AXES, Serving, choose_layout

__all__ = [
  "AXES", "BATCH_AXES", "EXPERT_AXES", "RULES", "SAMPLER_FIELDS", "Serving", "choose_layout", "make_mesh", "make_meshes", "mesh_shape",
  "num_row_shards", "own_row_shards", "param_shardings", "place_rows", "place_tokens", "platform_of", "replicated", "row_sharding",
  "staging_mesh", "state_shardings", "token_sharding",
]  # fmt: skip
