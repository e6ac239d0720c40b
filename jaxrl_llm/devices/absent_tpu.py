"""JAX without libtpu on a machine that has no TPU, where it only complains and takes time."""

import importlib.util
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

# Google's virtual machines have its disks and network cards, with or without TPUs.
_GOOGLE, _NO_TPUS = "0x1ae0", ("0x001f", "0x0042")
_OTHERS = ("nvidia0", "nvidiactl", "dxg", "kfd")  # NVIDIA's, WSL's and AMD's.
# JAX and libtpu set these themselves, or they only change what libtpu prints.
_NOTHING_SAID = ("TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY", "TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL")


def skip_absent_tpu(environment: MutableMapping[str, str] = os.environ, *, root: Path = Path("/")) -> bool:
  """Has JAX use the CPU alone on a machine without accelerators; must run before devices start.

  JAX would take the CPU there anyway, once libtpu (the extra `tpu`) has failed to find a TPU, with
  thirty lines on the standard error. Nothing changes if JAX_PLATFORMS, JAX_FORCE_TPU_INIT or a
  variable of a TPU is set, if there is a device of Google, NVIDIA or AMD, or if JAX has another
  plugin. Compiling for remote TPUs (`experiments.compile_for_pod`) loads libtpu as a compiler, and
  needs no TPU either.

  Args:
    environment: Variables of the environment, to which JAX_PLATFORMS is added.
    root: Root of the file system.

  Returns:
    Whether JAX_PLATFORMS was set.

  Example:
    >>> skip_absent_tpu({"JAX_PLATFORMS": "tpu"})
    False
  """
  by_hand = environment.get("JAX_PLATFORMS") or "JAX_FORCE_TPU_INIT" in environment
  if (
    by_hand
    or _names_tpu(environment)
    or _has_accelerator(root)
    or importlib.util.find_spec("jax_plugins") is not None
  ):
    return False
  environment["JAX_PLATFORMS"] = "cpu"
  if environment is os.environ and "jax" in sys.modules:  # It has read the variable already.
    sys.modules["jax"].config.update("jax_platforms", "cpu")
  return True


def _names_tpu(environment: MutableMapping[str, str]) -> bool:
  """Returns whether a launcher, or the user, has described a TPU.

  What libtpu leaves in these variables is a warning, with spaces.
  """
  return any(
    name.startswith("TPU_") and name not in _NOTHING_SAID and " " not in value
    for name, value in environment.items()
  )


def _has_accelerator(root: Path) -> bool:
  devices = [root / "dev" / name for name in _OTHERS] + [
    *root.glob("dev/accel*"),
    *root.glob("dev/vfio/[0-9]*"),
  ]
  ids = [
    (device_text(vendor), device_text(vendor.with_name("device")))
    for vendor in root.glob("sys/bus/pci/devices/*/vendor")
  ]
  return any(device.exists() for device in devices) or any(
    maker == _GOOGLE and kind not in _NO_TPUS for maker, kind in ids
  )


def device_text(path: Path) -> str:
  """Returns the text of a device's file in `/sys`; empty if there is none."""
  try:
    return path.read_text().strip()
  except OSError:
    return ""
