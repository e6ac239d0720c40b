"""TPU slices: the mesh flags that a trial on several slices needs, and checks before submission."""

import math
from collections.abc import Sequence

from jaxrl_llm.config import check, command_line

AXES = ("data", "fsdp", "expert", "context", "tensor")


def mesh_arguments(command: Sequence[str], num_slices: int) -> list[str]:
  """Returns the flags that a trial's command lacks to run on several slices.

  Only the mesh axis `data` crosses slices. If a config leaves `data` at 1, it is set to the number
  of slices. A chip then takes as many rows at a time as on one slice, and the loss is the same.

  Args:
    command: Command `python -m jaxrl_llm.main --config=...`.
    num_slices: Number of slices joined by a network.

  Returns:
    Flags for the end of the command; none if the config needs none.

  Raises:
    ValueError: If the config's `data` or `slices` contradicts the number of slices.

  Example:
    >>> mesh_arguments(["python", "-m", "jaxrl_llm.main", "--config=configs/gspo.py:qwen3-30b-a3b"], 2)
    ['--config.mesh.data=2']
  """
  _, overrides, _ = command_line.split(command[3:])
  config = command_line.parse(command[2:]).config
  mesh = config.mesh
  if mesh.slices not in (None, num_slices):
    raise ValueError(
      f"config.mesh.slices: found {mesh.slices}, but a trial has {num_slices} slice(s); set --num_slices or the field"
    )
  if mesh.data == -1 or mesh.data % num_slices == 0:
    return []
  if mesh.data != 1 or "mesh.data" in overrides:
    raise ValueError(
      f"config.mesh.data: found {mesh.data}, expected a multiple of the {num_slices} slices, which only data may cross, "
      f"or -1; for instance --config.mesh.data={num_slices}"
    )
  return [f"--config.mesh.data={num_slices}"]


def check_chips(command: Sequence[str], chips: int) -> None:
  """Refuses a config whose mesh does not fit a trial's chips, or whose rows they do not divide.

  Args:
    command: Command `python -m jaxrl_llm.main --config=...`.
    chips: Number of chips of all slices; each is one device.

  Raises:
    ValueError: If it does not fit. One line for each problem, with what would fit.
  """
  config = command_line.parse(command[2:]).config
  mesh = config.mesh
  sizes = {axis: mesh[axis] for axis in AXES}
  known, free = math.prod(size for size in sizes.values() if size != -1), [axis for axis in AXES if sizes[axis] == -1]
  left = chips - mesh.sampler
  if left % known if free else left != known:
    asked = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    needed = f"{'a multiple of ' if free else ''}{known} devices"
    raise ValueError(
      f"{asked}: {needed}, but a trial has {left} for the learner; mesh.fsdp=-1 takes the devices that remain"
    )
  for axis in free:  # At most one.
    sizes[axis] = left // known
  learner = sizes["data"] * sizes["fsdp"] * sizes["expert"]
  sampler = mesh.sampler // mesh.sampler_tensor or learner
  if problems := list(check.row_problems(config, learner, sampler, context=sizes["context"])):
    raise ValueError("\n".join(problems))
