"""What the numbers of a run depend on besides its config: packages, source, devices and flags."""

import functools
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.devices import cores

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorflow-datasets", "numpy", "ml-collections")

_ENVIRONMENT = ("CUBLAS_", "CUDNN_", "LIBTPU_", "MKL_", "NVIDIA_", "OMP_", "OPENBLAS_", "TF_", "XLA_")
# Other variables of these names, such as NVIDIA_API_KEY and Terraform's TF_TOKEN_, may be secrets.
_RECORDED = ("CUBLAS_", "CUDNN_", "LIBTPU_", "MKL_", "NVIDIA_TF32_", "OMP_", "OPENBLAS_", "TF_CUDNN_", "TF_ENABLE_", "TF_XLA_", "XLA_")
# In names of JAX's settings.
_WITHOUT_EFFECT = re.compile(r"cache|dir|dump|log|path|profil|traceback")


def machine() -> dict[str, Any]:
  """Returns what the bits of an update depend on besides its program: devices, processor, flags."""
  device = jax.devices()[0]
  return {
    "devices": [jax.device_count(), device.device_kind, device.client.platform_version],
    "processor": [*_processor(), cores.num_cores()],
    "environment": {name: x for name, x in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)},
    "jax": {name: x for name, x in sorted(jax.config.values.items()) if not _WITHOUT_EFFECT.search(name)},
  }


def numeric_variables(environment: Mapping[str, str]) -> dict[str, str]:
  """Returns the variables of an environment that may change the bits of a computation.

  None of them is a secret, so a run may record them.

  Example:
    >>> numeric_variables({"XLA_FLAGS": "--xla_another=1", "TF_TOKEN_example": "secret", "LANG": "C"})
    {'XLA_FLAGS': '--xla_another=1'}
  """
  return {name: x for name, x in sorted(environment.items()) if name.startswith(_RECORDED)}


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the packages that compute, by name."""
  return {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}


@functools.cache
def processor_name() -> str | None:
  """Returns the model of the host's processor, or None if the system does not tell."""
  names = [line.partition(":")[2].strip() for line in _processor() if line.startswith("model name")]
  return names[0] if names else platform.processor() or None


def _processor() -> list[str]:
  try:
    text = Path("/proc/cpuinfo").read_text()
  except OSError:
    return []
  return sorted(set(re.findall(r"^(?:model name|flags)\s*:.*$", text, flags=re.MULTILINE)))
