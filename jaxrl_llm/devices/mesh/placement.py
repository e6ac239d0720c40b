"""Placement of arrays: the table of shardings, train states, and batches from host memory."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxrl_llm.types import TrainState

# The rows of a batch are split over all of these axes. `fsdp` also splits weights, which are
# gathered layer by layer. `expert` also splits the experts, to which the tokens travel. The slots
# of a row are split over `context`.
BATCH_AXES = ("data", "fsdp", "expert")

# The only table from logical axes to mesh axes.
RULES: dict[str, str | None] = {
  "embed": "fsdp",
  "vocab": "tensor",
  "heads": "tensor",
  "kv_heads": "tensor",
  "mlp": "tensor",
  "expert": "expert",
  "router": None,  # A router's outputs are small, and every device needs all of them.
  "head_dim": None,
  "patch": None,
  "layers": None,
  "rank": None,
}

# The kernels that multiply experts read a weight in tiles of 8 x 128 numbers of its last two axes.
# If `fsdp` cuts the last axis into pieces that fill no whole tiles, a copy of a layer's experts
# follows each gather of them, their gradients are summed whole on every chip, and the sum over
# micro-batches is padded to whole tiles. Of experts, `fsdp` therefore splits the hidden layer in
# such a case, or, if that leaves no whole tiles either, the experts themselves. It does not always
# split them, because XLA then pads their gradients before it scatters them (Qwen3-235B-A22B on 128
# TPU v5p: 0.75 GiB more, and 5% more memory traffic).
# XLA's own products read a gathered weight as it lies, so all other weights stay:
# - Over the hidden layer of a dense model, XLA would exchange tokens instead of gathering weights
#   (Qwen2.5-32B on 64 TPU v5p: 251 s of communication in an update that computes for 100 s).
# - Over the vocabulary, each lookup would gather the embedding (Qwen3-30B-A3B on 32 TPU v6e: 3.1 GB
#   per micro-batch, where the states of its tokens are 0.2 GB).
_TILE = (8, 128)


def num_row_shards(mesh: Mesh) -> int:
  """Returns the number of pieces into which the rows of a batch are split."""
  return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def own_row_shards(mesh: Mesh) -> list[int]:
  """Returns the numbers of those pieces that devices of this process hold, in order.

  Example:
    >>> from jaxrl_llm.devices.mesh import make_mesh
    >>> own_row_shards(make_mesh(devices=jax.devices()[:1]))
    [0]
  """
  shards = num_row_shards(mesh)
  held = row_sharding(mesh).addressable_devices_indices_map((shards,))
  return sorted({rows.indices(shards)[0] for (rows,) in held.values()})


def row_sharding(mesh: Mesh) -> NamedSharding:
  """Shards rows over data, fsdp and expert, and no other axis."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def token_sharding(mesh: Mesh) -> NamedSharding:
  """Shards rows over data, fsdp and expert, their slots over context, and no other axis."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES, "context"))


def replicated(mesh: Mesh) -> NamedSharding:
  """Keeps the whole array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def param_shardings(
  mesh: Mesh,
  logical_axes: PyTree,
  shapes: PyTree,
  *,
  rules: Mapping[str, str | tuple[str, ...] | None] = RULES,
  fields: Mapping[str, str] = MappingProxyType({}),
) -> PyTree:
  """Makes the shardings of the params by rules.

  If `fsdp` would cut the last axis of experts into pieces of no multiple of 128 numbers, it splits
  the axis before instead. If that would leave no multiple of 8 numbers there, it splits the axis of
  the experts, unless it does not divide their number.

  Args:
    mesh: Mesh of the params.
    logical_axes: Params tree with a tuple of logical axis names for each array.
    shapes: Params tree of arrays, or of other objects with a `.shape`.
    rules: Mesh axis, or axes, of each logical axis; None is no axis.
    fields: Setting that sizes a mesh axis, by axis; missing axes have `mesh.` and their name.

  Returns:
    Params tree with a `NamedSharding` for each array.

  Raises:
    ValueError: If a mesh axis does not divide a dimension (the message names the tensor, its axis
      and both sizes), two axes of a tensor lie over one mesh axis (it names the tensor and its
      axes), or a mesh axis splits nothing (it names the setting).
  """

  def shard(path, axes, leaf):
    name = _name(path)
    if unknown := [axis for axis in axes if axis not in rules]:
      known = ", ".join(rules)
      raise ValueError(
        f"{name}: found axis {unknown[0]!r} without a rule, expected one of {known}; add it to mesh.RULES"
      )
    splits = [_as_tuple(rules[axis]) for axis in axes]
    every = [mesh_axis for split in splits for mesh_axis in split]
    for mesh_axis in {x for x in every if every.count(x) > 1}:
      both = " and ".join(repr(axis) for axis, split in zip(axes, splits, strict=True) if mesh_axis in split)
      raise ValueError(f"{name}: its axes {both} both lie over the mesh axis {mesh_axis!r}, which can split only one; change mesh.RULES")
    splits = _in_whole_tiles(mesh, axes, splits, leaf.shape)
    for axis, split, size in zip(axes, splits, leaf.shape, strict=True):
      parts = _num_parts(mesh, split)
      if size % parts:
        field = " x ".join(fields.get(mesh_axis, f"mesh.{mesh_axis}") for mesh_axis in split)
        raise ValueError(
          f"{field}={parts} does not divide axis {axis!r} of {name}, which has size {size}; choose a {field} that divides {size}"
        )
    return NamedSharding(mesh, PartitionSpec(*(split[0] if len(split) == 1 else split or None for split in splits)))

  shardings = jax.tree_util.tree_map_with_path(shard, logical_axes, shapes, is_leaf=lambda x: isinstance(x, tuple))
  splitting = {axis for sharding in jax.tree.leaves(shardings) for part in sharding.spec for axis in _as_tuple(part)}
  splitting |= {*BATCH_AXES, "context"}
  for axis, size in mesh.shape.items():
    if size > 1 and axis not in splitting:
      raise ValueError(
        f"{fields.get(axis, f'mesh.{axis}')}={size}: this axis splits neither rows nor any tensor of this model, expected 1; its devices "
        "would all do the same work"
      )
  return shardings


def _in_whole_tiles(
  mesh: Mesh, axes: Sequence[str], splits: Sequence[tuple[str, ...]], shape: Sequence[int]
) -> Sequence[tuple[str, ...]]:
  """Moves `fsdp` from the last axis of experts to another one if that fills whole tiles.

  `splits` has the mesh axes of each of the tensor's axes, by the rules, and so has the result.
  """
  if "expert" not in axes or "fsdp" not in splits[-1] or mesh.shape["fsdp"] == 1:
    return splits
  fits = lambda axis, unit: shape[axis] % (_num_parts(mesh, tuple(dict.fromkeys((*splits[axis], "fsdp")))) * unit) == 0
  rows, lanes = _TILE
  options = ((len(axes) - 1, lanes), (len(axes) - 2, rows), (axes.index("expert"), 1))
  axis = next((axis for axis, unit in options if fits(axis, unit)), len(axes) - 1)
  without = [tuple(x for x in split if x != "fsdp") for split in splits]
  return [(*split, "fsdp") if i == axis else split for i, split in enumerate(without)]


def _num_parts(mesh: Mesh, split: tuple[str, ...]) -> int:
  return math.prod(mesh.shape[mesh_axis] for mesh_axis in split)


def _as_tuple(mesh_axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
  return (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ()


def _name(path: tuple) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


def state_shardings(
  mesh: Mesh, optimizer: optax.GradientTransformation, state: TrainState, params: PyTree, *, trained: PyTree | None = None,
  offload: bool = False,
) -> TrainState:
  """Makes the shardings of a train state.

  Optimizer moments lie where their parameter lies; counters lie on every device.

  Args:
    mesh: Mesh of the state.
    optimizer: Transformation to which the optimizer state belongs.
    state: Train state, concrete or abstract.
    params: Shardings of the params.
    trained: Shardings of the params that have moments; None is all.
    offload: Whether to keep moments in the memory of the hosts, each piece beside its device; see
      `jaxrl_llm.devices.offload`.
  """
  whole = replicated(mesh)
  place = (lambda _, sharding: sharding.with_memory_kind("pinned_host")) if offload else (lambda _, sharding: sharding)
  opt_state = optax.tree_utils.tree_map_params(
    optimizer, place, state.opt_state, params if trained is None else trained, transform_non_params=lambda _: whole
  )
  return TrainState(params=params, opt_state=opt_state, step=whole, skipped=whole)


def place_rows(mesh: Mesh, batch: Any) -> Any:
  """Places a tree of arrays from host memory, with their rows split over the mesh.

  Every process has the whole batch, and places the pieces of its own devices.

  Raises:
    ValueError: If the mesh does not divide the rows of an array, which the message names.
  """
  return _place(mesh, batch, row_sharding(mesh), range(num_row_shards(mesh)))


def place_tokens(mesh: Mesh, batch: Any) -> Any:
  """Places arrays `[B, T, ...]` of packed rows, with their slots split over `context` as well.

  Every process has the rows of its `own_row_shards` alone, in order, and all of their slots.

  Raises:
    ValueError: If the mesh does not divide the rows or slots of an array, which the message names.
  """
  context = mesh.shape["context"]
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    if leaf.shape[1] % context:
      raise ValueError(
        f"mesh.context={context} does not divide the slots of {_name(path)}, which has shape {leaf.shape}; choose a mesh.context that "
        f"divides {leaf.shape[1]}"
      )
  return _place(mesh, batch, token_sharding(mesh), own_row_shards(mesh))


def _place(mesh: Mesh, batch: Any, sharding: NamedSharding, held: Sequence[int]) -> Any:
  """Places arrays that have the rows of the held shards."""
  shards = num_row_shards(mesh)
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    if leaf.shape[0] % len(held):
      raise ValueError(
        f"mesh: {leaf.shape[0]} rows of {_name(path)} cannot be split over data x fsdp x expert = {shards} devices; the nearest number "
        f"that can: {-(-leaf.shape[0] // shards) * shards}"
      )
  if jax.process_count() == 1:
    return jax.device_put(batch, sharding)

  def place(x):
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
      return jax.device_put(x, sharding)  # It spans the processes already.
    x, size = np.asarray(x), len(x) // len(held)

    def piece(index):
      begin = held.index(index[0].indices(size * shards)[0] // size) * size
      return x[begin : begin + size, *index[1:]]

    return jax.make_array_from_callback((size * shards, *x.shape[1:]), sharding, piece)

  return jax.tree.map(place, batch)
