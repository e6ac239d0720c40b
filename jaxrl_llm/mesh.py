"""The meshes of learner and sampler, the one table from logical axes to mesh axes, and the placement of state and batches."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxrl_llm.types import TrainState

AXES = ("data", "fsdp", "expert", "tensor")
_AUTO = (AxisType.Auto,) * len(AXES)  # The compiler partitions; `make_mesh` by itself asks for axes in the types.

# Rows of a batch are split over all of these. fsdp splits weights as well, and gathers them layer by layer; expert splits the experts, and
# the tokens travel to them.
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


def mesh_shape(num_devices: int, *, data: int, fsdp: int, tensor: int, expert: int = 1, sampler: int = 0) -> tuple[int, ...]:
  """Sizes of the axes of the learner's mesh, with -1 filled in.

  Args:
    num_devices: devices there are.
    data: size of the axis, or -1 for what the others leave.
    fsdp: as `data`.
    tensor: as `data`.
    expert: as `data`.
    sampler: devices that only sample, which the learner's mesh leaves out.

  Returns:
    Sizes in the order of `AXES`; their product is the number of the learner's devices.

  Raises:
    ValueError: sizes that do not make up the devices.

  Example:
    >>> mesh_shape(8, data=-1, fsdp=4, tensor=1)
    (2, 4, 1, 1)
    >>> mesh_shape(8, data=-1, fsdp=1, tensor=1, sampler=2)
    (6, 1, 1, 1)
  """
  if sampler and sampler >= num_devices:
    raise ValueError(
      f"mesh.sampler: found {sampler} with {num_devices} device(s), expected at most {num_devices - 1}, so that one is left for the "
      f"learner; lower it, or simulate devices with XLA_FLAGS=--xla_force_host_platform_device_count={sampler + 1}"
    )
  there = f"{num_devices}" if not sampler else f"{num_devices - sampler} ({num_devices} less mesh.sampler={sampler})"
  num_devices -= sampler
  sizes = {"data": data, "fsdp": fsdp, "expert": expert, "tensor": tensor}
  asked = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
  open_axes = [axis for axis, size in sizes.items() if size == -1]
  wrong = [axis for axis, size in sizes.items() if size < 1 and size != -1]
  if wrong:
    raise ValueError(f"mesh.{wrong[0]}: found {sizes[wrong[0]]}, expected a positive size, or -1 for the devices the others leave")
  if len(open_axes) > 1:
    raise ValueError(f"mesh: found -1 on {' and '.join(open_axes)}, expected it on one axis at the most")
  known = int(np.prod([size for size in sizes.values() if size != -1]))
  if open_axes and num_devices % known == 0:
    sizes[open_axes[0]] = num_devices // known
  shape = tuple(sizes[axis] for axis in AXES)
  if int(np.prod(shape)) != num_devices or -1 in shape:
    fix = "raise an axis or set mesh.data=-1" if known < num_devices else "lower an axis"
    if open_axes and known < num_devices:
      fix = f"choose sizes that divide {num_devices}"
    raise ValueError(
      f"mesh: {asked} needs {'a multiple of ' if open_axes else ''}{known} devices, found {there}; {fix}, "
      f"or simulate devices with XLA_FLAGS=--xla_force_host_platform_device_count={known + sampler}"
    )
  return shape


def make_mesh(*, data: int = -1, fsdp: int = 1, tensor: int = 1, expert: int = 1) -> Mesh:
  """A mesh over all devices; see `mesh_shape` for the sizes."""
  learner, _ = make_meshes(data=data, fsdp=fsdp, tensor=tensor, expert=expert)
  return learner


def make_meshes(
  *, data: int = -1, fsdp: int = 1, tensor: int = 1, expert: int = 1, sampler: int = 0, sampler_tensor: int = 1
) -> tuple[Mesh, Mesh]:
  """The learner's mesh over the first devices, and the sampler's over the last: one and the same where no device only samples.

  Args:
    data: as the rest, of the learner's mesh; see `mesh_shape`.
    fsdp: see `mesh_shape`.
    tensor: see `mesh_shape`.
    expert: see `mesh_shape`.
    sampler: devices that only sample; 0 is none.
    sampler_tensor: how many of them share one copy of the weights; prompts are split over the copies.

  Raises:
    ValueError: sizes that do not make up the devices.

  Note:
    The devices are those of one process: weights and rollouts pass through it.
  """
  shape = mesh_shape(jax.device_count(), data=data, fsdp=fsdp, tensor=tensor, expert=expert, sampler=sampler)
  if not sampler:
    mesh = jax.make_mesh(shape, AXES, axis_types=_AUTO)
    return mesh, mesh
  devices = jax.devices()[: jax.device_count()]
  copies = (sampler // sampler_tensor, 1, 1, sampler_tensor)
  return _mesh_of(devices[:-sampler], shape), _mesh_of(devices[-sampler:], copies)


def _mesh_of(devices: Sequence[jax.Device], shape: tuple[int, ...]) -> Mesh:
  try:
    return jax.make_mesh(shape, AXES, axis_types=_AUTO, devices=devices)
  except (AssertionError, NotImplementedError):  # JAX orders TPU chips by their place in the torus, where they make up a cuboid.
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=_AUTO)


def staging_mesh(learner: Mesh, sampler: Mesh) -> Mesh:
  """The learner's devices in the sampler's arrangement.

  Weights that are laid out over it can be copied to the sampler's devices as they are: every piece that one of these wants lies whole on
  one of the learner's. `jax.device_put` passes a piece that does not through the memory of the host.

  Args:
    learner: mesh of the learner.
    sampler: mesh of the sampler.

  Returns:
    The mesh; the learner's own, where its devices are no multiple of those that share a copy.
  """
  tensor = sampler.shape["tensor"]
  if learner.size % tensor:
    return learner
  return Mesh(learner.devices.reshape(learner.size // tensor, 1, 1, tensor), AXES, axis_types=_AUTO)


def num_row_shards(mesh: Mesh) -> int:
  """How many pieces the rows of a batch are split into."""
  return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))


def row_sharding(mesh: Mesh) -> NamedSharding:
  """Rows over data, fsdp and expert; everything else whole."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
  """The whole array on every device."""
  return NamedSharding(mesh, PartitionSpec())


def param_shardings(mesh: Mesh, logical_axes: PyTree, shapes: PyTree, *, fields: Mapping[str, str] = MappingProxyType({})) -> PyTree:
  """Shardings of the params by `RULES`.

  Args:
    mesh: the mesh.
    logical_axes: the params tree with a tuple of logical axis names for each array.
    shapes: the params tree with something that has a `.shape`.
    fields: the setting that gives a mesh axis its size, where that is not the axis of the same name in `mesh`.

  Returns:
    The params tree with a `NamedSharding` each.

  Raises:
    ValueError: names the tensor, its axis and both sizes where a mesh axis does not divide a dimension.
  """

  def shard(path, axes, leaf):
    spec = [RULES[axis] for axis in axes]
    for axis, mesh_axis, size in zip(axes, spec, leaf.shape, strict=True):
      if mesh_axis is not None and size % mesh.shape[mesh_axis]:
        name, field = "/".join(str(key.key) for key in path), fields.get(mesh_axis, f"mesh.{mesh_axis}")
        raise ValueError(
          f"{field}={mesh.shape[mesh_axis]} does not divide axis {axis!r} of {name}, which has size {size}; "
          f"choose a {field} that divides {size}"
        )
    return NamedSharding(mesh, PartitionSpec(*spec))

  return jax.tree_util.tree_map_with_path(shard, logical_axes, shapes, is_leaf=lambda x: isinstance(x, tuple))


def state_shardings(
  mesh: Mesh, optimizer: optax.GradientTransformation, state: TrainState, params: PyTree, *, trained: PyTree | None = None
) -> TrainState:
  """Shardings of a train state: optimizer moments lie where their parameter lies, counters everywhere.

  Args:
    mesh: the mesh.
    optimizer: the transformation whose state it is.
    state: the state, concrete or abstract.
    params: shardings of the params.
    trained: of those that have moments; None is all.
  """
  whole = replicated(mesh)
  opt_state = optax.tree_utils.tree_map_params(
    optimizer, lambda _, sharding: sharding, state.opt_state, params if trained is None else trained, transform_non_params=lambda _: whole
  )
  return TrainState(params=params, opt_state=opt_state, step=whole, skipped=whole)


def place_rows(mesh: Mesh, batch: Any) -> Any:
  """A batch from host memory, its rows split over the mesh.

  Raises:
    ValueError: a number of rows that the mesh does not divide.
  """
  shards = num_row_shards(mesh)
  for leaf in jax.tree.leaves(batch):
    if leaf.shape[0] % shards:
      raise ValueError(f"mesh: {leaf.shape[0]} rows cannot be split over data x fsdp x expert = {shards} devices")
  return jax.device_put(batch, row_sharding(mesh))
