"""Construction of meshes: sizes by name, slices along `data`, and devices that only sample."""

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

# From the axis that may cross the slowest links (between slices, a network) to the axis that needs
# the fastest ones.
AXES = ("data", "fsdp", "expert", "context", "tensor")
# Settings that size the axes of a sampler with its own devices.
SAMPLER_FIELDS = MappingProxyType({"expert": "mesh.sampler_expert", "tensor": "mesh.sampler_tensor"})
# The compiler partitions. The default of `jax.make_mesh` would put the axes into the types.
_AUTO = (AxisType.Auto,) * len(AXES)


def platform_of(mesh: Mesh | None) -> str:
  """Returns the platform of a mesh: "cpu", "gpu" or "tpu"; None is the default device.

  A mesh may be of remote chips, of another platform than the default device.
  """
  return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def mesh_shape(
  num_devices: int, *, data: int, fsdp: int, tensor: int, expert: int = 1, context: int = 1, sampler: int = 0
) -> tuple[int, ...]:
  """Computes the sizes of the axes of the learner's mesh, with -1 filled in.

  Args:
    num_devices: Number of all devices.
    data, fsdp, tensor, expert, context: Sizes of the axes; -1 for the devices that the others
      leave.
    sampler: Number of devices that only sample, which the learner's mesh leaves out.

  Returns:
    Sizes in the order of `AXES`; their product is the number of the learner's devices.

  Raises:
    ValueError: If the sizes do not make up the devices.

  Example:
    >>> mesh_shape(8, data=-1, fsdp=4, tensor=1)
    (2, 4, 1, 1, 1)
    >>> mesh_shape(8, data=-1, fsdp=1, tensor=1, sampler=2)
    (6, 1, 1, 1, 1)
  """
  if sampler and sampler >= num_devices:
    raise ValueError(
      f"mesh.sampler: found {sampler} with {num_devices} device(s), expected at most {num_devices - 1}, so that one is left for the "
      f"learner; lower it, or simulate devices with XLA_FLAGS=--xla_force_host_platform_device_count={sampler + 1}"
    )
  there = f"{num_devices}" if not sampler else f"{num_devices - sampler} ({num_devices} less mesh.sampler={sampler})"
  num_devices -= sampler
  sizes = {"data": data, "fsdp": fsdp, "expert": expert, "context": context, "tensor": tensor}
  asked = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
  open_axes = [axis for axis, size in sizes.items() if size == -1]
  wrong = [axis for axis, size in sizes.items() if size < 1 and size != -1]
  if wrong:
    raise ValueError(f"mesh.{wrong[0]}: found {sizes[wrong[0]]}, expected a positive size, or -1 for the devices the others leave")
  if len(open_axes) > 1:
    raise ValueError(f"mesh: found -1 on {' and '.join(open_axes)}, expected it on at most one axis")
  known = math.prod(size for size in sizes.values() if size != -1)
  if open_axes and num_devices % known == 0:
    sizes[open_axes[0]] = num_devices // known
  shape = tuple(sizes[axis] for axis in AXES)
  if math.prod(shape) != num_devices or -1 in shape:
    fix = "raise an axis or set mesh.data=-1" if known < num_devices else "lower an axis"
    if open_axes and known < num_devices:
      fix = f"choose sizes that divide {num_devices}"
    raise ValueError(
      f"mesh: {asked} needs {'a multiple of ' if open_axes else ''}{known} devices, found {there}; {fix}, "
      f"or simulate devices with XLA_FLAGS=--xla_force_host_platform_device_count={known + sampler}"
    )
  return shape


def make_mesh(
  *, data: int = -1, fsdp: int = 1, tensor: int = 1, expert: int = 1, context: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
  """Makes the learner's mesh if no device only samples; see `make_meshes`."""
  learner, _ = make_meshes(data=data, fsdp=fsdp, tensor=tensor, expert=expert, context=context, devices=devices)
  return learner


def make_meshes(
  *, data: int = -1, fsdp: int = 1, tensor: int = 1, expert: int = 1, context: int = 1, slices: int | None = None,
  sampler: int = 0, sampler_expert: int = 1, sampler_tensor: int = 1, devices: Sequence[Any] | None = None,
) -> tuple[Mesh, Mesh]:
  """Makes the learner's mesh over the first devices, and the sampler's over the last.

  In a run of several processes these are the first and the last ones of each. If no device only
  samples, both are the same mesh.

  Args:
    data, fsdp, tensor, expert, context: Sizes of the learner's axes; see `mesh_shape`.
    slices: Number of slices of TPUs that a network connects, which must be the number of the
      devices' slices; None accepts any.
    sampler: Number of devices that only sample; 0 is none.
    sampler_expert, sampler_tensor: Sizes of the axes `expert` and `tensor` of the sampler's mesh,
      whose product is the number of devices that share one copy of the weights; `data` is the
      number of copies. Prompts are split over data and expert.
    devices: Devices of both meshes, such as those of a described topology to compile for; None is
      all devices of the run.

  Raises:
    ValueError: If the sizes do not make up the devices or their slices.
  """
  # The sort is stable, so the order inside a slice stays.
  devices = sorted(jax.devices()[: jax.device_count()] if devices is None else devices, key=_slice)
  num_slices = len(set(map(_slice, devices)))
  if slices is not None and slices != num_slices:
    raise ValueError(
      f"mesh.slices: found {slices}, but the {len(devices)} device(s) make up {num_slices} slice(s); "
      f"expected {num_slices}, or None for any number"
    )
  shape = mesh_shape(len(devices), data=data, fsdp=fsdp, tensor=tensor, expert=expert, context=context, sampler=sampler)
  if not sampler:
    mesh = _mesh_of(devices, shape, whose="learner")
    return mesh, mesh
  if sampler % sampler_tensor:
    raise ValueError(f"mesh.sampler_tensor: found {sampler_tensor}, expected a divisor of mesh.sampler={sampler}")
  copies, left = divmod(sampler // sampler_tensor, sampler_expert)
  if left:
    raise ValueError(
      f"mesh.sampler_expert: found {sampler_expert}, expected a divisor of {sampler // sampler_tensor} (mesh.sampler / mesh.sampler_tensor)"
    )
  of_sampler = (copies, 1, sampler_expert, 1, sampler_tensor)
  drawing = devices[-sampler:]
  if (count := jax.process_count()) > 1:
    # Each process computes for both sides, and weights pass from one to the other inside of it.
    if sampler % count:
      raise ValueError(f"mesh.sampler: found {sampler} in a run of {count} processes, expected a multiple of {count}: as many in each")
    by_process = [[x for x in devices if x.process_index == process] for process in range(count)]
    drawing = [x for own in by_process for x in own[len(own) - sampler // count :]]
  learning = [x for x in devices if x not in drawing]
  return _mesh_of(learning, shape, whose="learner"), _mesh_of(drawing, of_sampler, whose="sampler")


def _slice(device: Any) -> int:
  return getattr(device, "slice_index", 0)  # Only devices that can form several slices have one.


def _mesh_of(devices: Sequence[Any], shape: tuple[int, ...], *, whose: str) -> Mesh:
  slices = Counter(map(_slice, devices))
  if len(slices) == 1:
    return Mesh(_arranged(devices, shape), AXES, axis_types=_AUTO)
  if len(set(slices.values())) > 1:
    raise ValueError(
      f"mesh: the {whose}'s {len(devices)} devices lie in slices of {' and '.join(map(str, slices.values()))}, expected equal parts; "
      f"choose a mesh.sampler that leaves whole slices"
    )
  data, *inner = shape
  if data % len(slices):
    of_sampler = f"choose {' and '.join(SAMPLER_FIELDS.values())} that fit into a slice"
    fix = f"choose a mesh.data that {len(slices)} divides" if whose == "learner" else of_sampler
    raise ValueError(
      f"mesh: the data axis of the {whose} has size {data}, expected a multiple of its {len(slices)} slices, which only data may cross: "
      f"the other axes would gather weights and tokens over the network in every layer; {fix}"
    )
  # Slices follow each other along data: a reduction over data is then one inside each slice and a
  # short one between them.
  inside = (data // len(slices), *inner)
  per_slice = len(devices) // len(slices)
  parts = [_arranged(devices[start : start + per_slice], inside) for start in range(0, len(devices), per_slice)]
  return Mesh(np.concatenate(parts, axis=0), AXES, axis_types=_AUTO)


def _arranged(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
  """Arranges the devices of one slice so that neighbours along an axis are linked directly."""
  # First along whole axes of the torus; if that is impossible, along parts of them.
  for split in (False, True):
    # Chips that do not form a cuboid have no place in a torus.
    with contextlib.suppress(AssertionError, NotImplementedError):
      return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split)
  return np.array(devices).reshape(shape)


def staging_mesh(learner: Mesh, sampler: Mesh) -> Mesh:
  """Arranges the learner's devices as the sampler's mesh does.

  Weights that are laid out over this mesh can be copied to the sampler's devices as they are: every
  piece that a sampler's device needs lies whole on one of the learner's devices. `jax.device_put`
  passes any other piece through the memory of the host. If the number of the learner's devices is
  no multiple of the number that share a copy, this is the learner's own mesh.
  """
  expert, tensor = sampler.shape["expert"], sampler.shape["tensor"]
  copies, left = divmod(learner.size, expert * tensor)
  return learner if left else Mesh(learner.devices.reshape(copies, 1, expert, 1, tensor), AXES, axis_types=_AUTO)
