"""The memory of devices: from the table, from the device, or unknown."""

from typing import NamedTuple

import jax
import pytest

from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.devices.memory import chip_memory, device_memory


class Device(NamedTuple):
  """A device with the attributes that are read."""

  device_kind: str
  limit: int | None

  def memory_stats(self):
    if self.limit is None:
      raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: MemoryStats is only supported for addressable PjRt devices.")
    return {"bytes_limit": self.limit}


@pytest.mark.parametrize(
  ("device", "memory"),
  [
    (Device("TPU v5 lite", None), 15.75 * 2**30),
    (Device("TPU v5", 10**9), chip_memory("TPU v5p")),  # What was planned for the absent chip.
    (Device("NVIDIA H200", 10**11), 10**11),
    (Device("TPU v9", None), None),
  ],
)
def test_the_table_comes_before_what_a_device_reports(device, memory, monkeypatch):
  monkeypatch.setattr(jax, "local_devices", lambda: [device])
  assert device_memory(None) == memory


def test_the_memory_of_a_cpu_is_unknown():
  assert device_memory(None) is None and device_memory(mesh_lib.make_mesh()) is None
