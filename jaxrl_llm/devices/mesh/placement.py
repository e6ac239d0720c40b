"""Where arrays lie: the one table from logical axes to mesh axes, the shardings of a train state, and batches from host memory."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxrl_llm.types import TrainState

# Rows of a batch are split over all of these. fsdp splits weights as well, and gathers them layer by layer; expert splits the experts, and
# the tokens travel to them. context splits the slots of a row.
BATCH_AXES = ("data", "fsdp", "expert")

RULES: dict[str, str | None] = {
  "embed": "fsdp",
  "vocab": "tensor",
  "heads": "tensor",
  "kv_heads": "tensor",
  "mlp": "tensor",
  "expert": "expert",
  "router": None,  # A router's outputs: small, and every device needs all of them.
  "head_dim": None,
  "layers": None,
  "rank": None,
}


def num_row_shards(mesh: Mesh) -> int:
  """How many pieces the rows of a batch are split into."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def row_sharding(mesh: Mesh) -> NamedSharding:
  """Rows over data, fsdp and expert; everything else whole."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def token_sharding(mesh: Mesh) -> NamedSharding:
  """Rows over data, fsdp and expert, and their slots over context; everything else whole."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES, "context"))


def replicated(mesh: Mesh) -> NamedSharding:
  """The whole array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def param_shardings(mesh: Mesh, logical_axes: PyTree, shapes: PyTree, *, fields: Mapping[str, str] = MappingProxyType({})) -> PyTree:
  """Shardings of the params by `RULES`, as the params tree with a `NamedSharding` each.

  Args:
    logical_axes: the params tree with a tuple of logical axis names for each array.
    shapes: the params tree with something that has a `.shape`.
    fields: the setting that gives a mesh axis its size, where that is not the axis of the same name in `mesh`.

  Raises:
    ValueError: names the tensor, its axis and both sizes where a mesh axis does not divide a dimension; the tensor and its axes where two
      of them lie over one mesh axis; the setting where a mesh axis splits nothing.
  """

  def shard(path, axes, leaf):
    name = _name(path)
    if unknown := [axis for axis in axes if axis not in RULES]:
      raise ValueError(f"{name}: no rule says where its axis {unknown[0]!r} lies, expected one of {', '.join(RULES)}; add it to mesh.RULES")
    spec = [RULES[axis] for axis in axes]
    for mesh_axis in {x for x in spec if x is not None and spec.count(x) > 1}:
      both = " and ".join(repr(axis) for axis, x in zip(axes, spec, strict=True) if x == mesh_axis)
      raise ValueError(f"{name}: its axes {both} both lie over the mesh axis {mesh_axis!r}, which can split only one; change mesh.RULES")
    for axis, mesh_axis, size in zip(axes, spec, leaf.shape, strict=True):
      if mesh_axis is not None and size % mesh.shape[mesh_axis]:
        field = fields.get(mesh_axis, f"mesh.{mesh_axis}")
        raise ValueError(
          f"{field}={mesh.shape[mesh_axis]} does not divide axis {axis!r} of {name}, which has size {size}; "
          f"choose a {field} that divides {size}"
        )
    return NamedSharding(mesh, PartitionSpec(*spec))

  shardings = jax.tree_util.tree_map_with_path(shard, logical_axes, shapes, is_leaf=lambda x: isinstance(x, tuple))
  splitting = {axis for sharding in jax.tree.leaves(shardings) for axis in sharding.spec} | {*BATCH_AXES, "context"}
  for axis, size in mesh.shape.items():
    if size > 1 and axis not in splitting:
      raise ValueError(
        f"{fields.get(axis, f'mesh.{axis}')}={size}: this axis splits neither rows nor any tensor of this model, expected 1; its devices "
        "would all do the same work"
      )
  return shardings


def _name(path: tuple) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def state_shardings(
  mesh: Mesh, optimizer: optax.GradientTransformation, state: TrainState, params: PyTree, *, trained: PyTree | None = None,
  offload: bool = False,
) -> TrainState:
  """Shardings of a train state: optimizer moments lie where their parameter lies, counters everywhere.

  Args:
    optimizer: the transformation whose state it is.
    state: the state, concrete or abstract.
    params: shardings of the params.
    trained: of those that have moments; None is all.
    offload: keep moments in the memory of the hosts, each beside the devices of its pieces; see `jaxrl_llm.devices.offload`.
  """
  whole = replicated(mesh)
  place = (lambda _, sharding: sharding.with_memory_kind("pinned_host")) if offload else (lambda _, sharding: sharding)
  opt_state = optax.tree_utils.tree_map_params(
    optimizer, place, state.opt_state, params if trained is None else trained, transform_non_params=lambda _: whole
  )
  return TrainState(params=params, opt_state=opt_state, step=whole, skipped=whole)


def place_rows(mesh: Mesh, batch: Any) -> Any:
  """Places a tree of arrays from host memory, their rows split over the mesh.

  Every process has the whole batch, and places the pieces of its own devices.

  Raises:
    ValueError: names the array whose rows the mesh does not divide.
  """
  return _place(mesh, batch, row_sharding(mesh))


def place_tokens(mesh: Mesh, batch: Any) -> Any:
  """As `place_rows`, for arrays `[B, T, ...]` of packed rows, whose slots are split over `context`, and have to divide as well."""
  context = mesh.shape["context"]
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    if leaf.shape[1] % context:
      raise ValueError(
        f"mesh.context={context} does not divide the slots of {_name(path)}, which has shape {leaf.shape}; choose a mesh.context that "
        f"divides {leaf.shape[1]}"
      )
  return _place(mesh, batch, token_sharding(mesh))


def _place(mesh: Mesh, batch: Any, sharding: NamedSharding) -> Any:
  shards = num_row_shards(mesh)
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    if leaf.shape[0] % shards:
      raise ValueError(
        f"mesh: {leaf.shape[0]} rows of {_name(path)} cannot be split over data x fsdp x expert = {shards} devices; the nearest number "
        f"that can: {-(-leaf.shape[0] // shards) * shards}"
      )
  if jax.process_count() == 1:
    return jax.device_put(batch, sharding)

  def place(x):
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
      return jax.device_put(x, sharding)  # It spans the processes already.
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

  return jax.tree.map(place, batch)
