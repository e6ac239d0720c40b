"""Memory of the devices that a program is made for, whether they are present or not."""

import re

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

_GIB = 2**30

_CHIPS = ((r"TPU v5 ?lite|TPU v5e", 15.75), (r"TPU v5p?$", 95.74), (r"TPU v6 ?lite|TPU v6e", 31.25), (r"TPU7x", 94.74))
"""Kinds of devices, and the GiB that a program may use according to the TPU compiler."""


def chip_memory(kind: str) -> int | None:
  """Returns the bytes of a kind of chip that a program may use; None if the table lacks it.

  Args:
    kind: JAX's name of the chip, `device.device_kind`.

  Example:
    >>> chip_memory("TPU v6 lite") / 2**30, chip_memory("NVIDIA H200")
    (31.25, None)
  """
  return next((int(size * _GIB) for pattern, size in _CHIPS if re.search(pattern, kind, re.IGNORECASE)), None)


def device_memory(mesh: Mesh | None) -> int | None:
  """Returns the bytes of each device that a program may use; None if unknown, as on CPUs.

  The table comes before what a device reports, so that a program planned for absent chips is the
  program that runs on them.

  Args:
    mesh: Device mesh; None is the default device.
  """
  device = jax.local_devices()[0] if mesh is None else mesh.local_devices[0]
  try:
    return chip_memory(device.device_kind) or (device.memory_stats() or {}).get("bytes_limit")
  except JaxRuntimeError:  # An absent chip reports nothing.
    return None
