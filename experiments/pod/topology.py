"""Topologies of TPUs and GPUs by name, described by their compilers without such a device."""

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.benchmarks.roofline import Machine, datasheet
from jaxrl_llm.devices import xla_flags
from jaxrl_llm.messages import did_you_mean

GENERATIONS = {
  "v5e": ("TPU v5 lite", 2, 256),
  "v5p": ("TPU v5", 3, 8960),
  "v6e": ("TPU v6 lite", 2, 256),
  "tpu7x": ("TPU7x", 3, 9216),
}
"""JAX's name of a device, number of dimensions of its torus, and chips of the largest slice.

A chip of tpu7x is two devices.
"""

SIZES = {
  2: ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
  3: (
    (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8),
    (4, 8, 8), (8, 8, 8), (8, 8, 16), (8, 16, 16), (16, 16, 16),
  ),
}  # fmt: skip
"""Shapes of the slices on offer, by the number of dimensions of the torus."""

# Any values keep libtpu from querying the metadata server of a machine with a TPU.
_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_ACCELERATOR_TYPE": "v5e-4",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # Several processes may run at once, since none takes a chip.
  "JAX_PLATFORMS": "cpu",
}


class Topology(NamedTuple):
  """Remote chips to compile for.

  Attributes:
    name: Name of one slice in libtpu, such as "v5p:4x4x4", or a GPU and a number, as in "h200:8".
    slices: Number of slices joined by a network; of GPUs, the hosts.
    chip: Peaks of one device, a chip or half of one.
    shape: Number of chips of a slice along each dimension of its torus; empty for GPUs, which a
      switch joins.
    devices: Devices of JAX to compile for.
    flags: Flags of XLA to compile with, those of a run on these chips.
    platform: Platform to lower for, "tpu" or "cuda".
  """

  name: str
  slices: int
  chip: Machine
  shape: tuple[int, ...]
  devices: Sequence[Any]
  flags: Mapping[str, str] = MappingProxyType({})
  platform: str = "tpu"

  def slices_of_devices(self, devices: Sequence[Any]) -> list[int]:
    """Returns the number of the slice of each device; of a GPU, that of its host."""
    if self.platform == "cuda":
      return [device.process_index for device in devices]
    return [getattr(device, "slice_index", 0) or 0 for device in devices]

  def lowering(self) -> contextlib.AbstractContextManager:
    """Returns the context in which programs are lowered: kernels for a GPU ask for its kind."""
    if self.platform == "tpu":
      return contextlib.nullcontext()
    import jax

    device = jax.sharding.AbstractDevice(device_kind=self.chip.kind, num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))

  @property
  def devices_per_chip(self) -> int:
    """Number of devices of JAX that a chip is."""
    return max(len(self.devices) // (math.prod(self.shape) * self.slices), 1) if self.shape else 1


def parse(name: str) -> tuple[str, tuple[int, ...]]:
  """Parses the generation and the shape of a slice.

  Raises:
    ValueError: If there is no such slice. One line, with similar and valid names.

  Example:
    >>> parse("v5p:4x4x4")
    ('v5p', (4, 4, 4))
    >>> parse("v5p:4x4x5")
    Traceback (most recent call last):
    ...
    ValueError: --topology: found no slice 'v5p:4x4x5', expected one such as v5p:4x4x4, ...
  """
  generation, _, size = name.lower().partition(":")
  match = re.fullmatch(r"\d+(x\d+)*", size)
  shape = tuple(int(x) for x in size.split("x")) if match else ()
  if generation in GENERATIONS and _exists(generation, shape):
    return generation, shape
  valid = [spell(g, shape) for g, (_, dimensions, _) in GENERATIONS.items() for shape in SIZES[dimensions]]
  hint = did_you_mean(name.lower(), valid, "; did you mean {}?", cutoff=0.5)
  if generation not in GENERATIONS:
    expected = "a generation and a size, such as v5e:4x4, v5p:4x4x4, v6e:8x16 or tpu7x:4x4x4, or GPUs, such as h200:8"
  else:
    sizes = SIZES[GENERATIONS[generation][1]]
    if shape and math.prod(shape):  # Suggest a slice with a similar number of chips.
      nearest = min(sizes, key=lambda x: abs(math.log(math.prod(x) / math.prod(shape))))
      hint = f"; did you mean {spell(generation, nearest)}?"
    middle = spell(generation, (4, 4) if len(sizes[0]) == 2 else (4, 4, 4))
    expected = f"one such as {middle}, {spell(generation, sizes[0])} to {spell(generation, sizes[-1])}"
  raise ValueError(f"--topology: found no slice {name!r}, expected {expected}{hint}")


def slices_of(generation: str) -> list[str]:
  """Lists the slices of a generation, from the smallest on.

  Raises:
    ValueError: If there is no such generation. One line.

  Example:
    >>> slices_of("v6e")
    ['v6e:2x2', 'v6e:2x4', 'v6e:4x4', 'v6e:4x8', 'v6e:8x8', 'v6e:8x16', 'v6e:16x16']
  """
  if generation not in GENERATIONS:
    raise ValueError(f"--topology: found no generation {generation!r}, expected one of {', '.join(GENERATIONS)}")
  return [spell(generation, shape) for shape in SIZES[GENERATIONS[generation][1]]]


def host_of(name: str) -> str:
  """Returns the name of the slice that consists of one host of a larger slice.

  Example:
    >>> host_of("v5p:4x4x4"), host_of("v6e:2x4")
    ('v5p:2x2x1', 'v6e:2x2')
  """
  generation, _ = parse(name)
  return spell(generation, SIZES[GENERATIONS[generation][1]][0])


def num_hosts(name: str) -> int:
  """Returns the number of hosts of a slice.

  Example:
    >>> num_hosts("v5p:4x4x4"), num_hosts("v5p:2x2x1")
    (16, 1)
  """
  return math.prod(parse(name)[1]) // math.prod(parse(host_of(name))[1])


def spell(generation: str, shape: tuple[int, ...]) -> str:
  """Formats the name of a slice."""
  return f"{generation}:{'x'.join(map(str, shape))}"


def _exists(generation: str, shape: tuple[int, ...]) -> bool:
  """Returns whether a slice exists: a shape of the table, or a larger torus of whole cubes.

  Such tori can be requested although they have no name of their own.
  """
  _, dimensions, most = GENERATIONS[generation]
  if shape in SIZES[dimensions]:
    return True
  cubes = dimensions == 3 and len(shape) == 3 and all(x and x % 4 == 0 for x in shape)
  return cubes and list(shape) == sorted(shape) and math.prod(shape) <= most


def prepare() -> None:
  """Finds libtpu and tells it that there is no TPU here; must run before JAX starts.

  Raises:
    ValueError: If libtpu is not installed.
  """
  spec = importlib.util.find_spec("libtpu")
  if spec is None or not spec.submodule_search_locations:
    raise ValueError(
      "compile_for_pod needs the package libtpu, the compiler for TPUs (no TPU is needed): pip install libtpu"
    )
  library = Path(next(iter(spec.submodule_search_locations))) / "libtpu.so"
  for name, value in {**_ENVIRONMENT, "TPU_LIBRARY_PATH": str(library)}.items():
    os.environ.setdefault(name, value)


def describe(name: str, *, slices: int = 1) -> Topology:
  """Describes a topology to compile for.

  Args:
    name: Name of one slice.
    slices: Number of slices.

  Raises:
    ValueError: If there is no such slice, libtpu refuses it, or a change of the flags has no
      effect.
  """
  generation, shape = parse(name)
  if slices < 1:
    raise ValueError(f"--slices: found {slices}, expected 1 or more")
  from jax.errors import JaxRuntimeError
  from jax.experimental import topologies

  options = {"num_slices": slices} if slices > 1 else {}
  try:
    description = topologies.get_topology_desc(platform="tpu", topology_name=name.lower(), **options)
  except JaxRuntimeError as error:
    raise ValueError(f"--topology: libtpu refuses {name!r}: {str(error).splitlines()[0]}") from error
  flags = xla_flags.unset_flags(generation, os.environ)
  return Topology(name.lower(), slices, datasheet(GENERATIONS[generation][0]), shape, description.devices, flags)
