"""GPUs to compile for without one, described to XLA by their numbers.

The compiler is that of the package `jax-cuda13-plugin`, which needs no driver.
"""

import importlib.util
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
from jax.experimental import topologies

from experiments.benchmarks.roofline import datasheet
from experiments.pod.topology import Topology
from jaxrl_llm.devices import xla_flags
from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.models import attention

OF_HOST = 8
"""Most GPUs of one host, which NVLink joins."""


class Generation(NamedTuple):
  """What the compiler asks about the multiprocessors of a generation of GPUs.

  Attributes:
    capability: Compute capability, major and minor.
    threads: Most threads of a multiprocessor.
    units: Units for float32 of a multiprocessor.
    shared: Shared memory of a multiprocessor, in bytes.
    shared_of_block: Most of it that a block may ask for, in bytes.
  """

  capability: tuple[int, int]
  threads: int
  units: int
  shared: int
  shared_of_block: int


_AMPERE = Generation((8, 0), 2048, 64, 167_936, 166_912)
_ADA = Generation((8, 9), 1536, 128, 102_400, 101_376)
_HOPPER = Generation((9, 0), 2048, 128, 233_472, 232_448)


class Gpu(NamedTuple):
  """What the compiler asks about a GPU beside its generation.

  Attributes:
    kind: JAX's name of the device.
    generation: Generation of its multiprocessors.
    cores: Number of multiprocessors.
    clock_ghz: Clock rate, in GHz.
    memory: Memory, in bytes.
    bytes_per_s: Bandwidth of the memory, in bytes/s.
    l2: Size of the L2 cache, in bytes.
  """

  kind: str
  generation: Generation
  cores: int
  clock_ghz: float
  memory: int
  bytes_per_s: int
  l2: int


GPUS: Mapping[str, Gpu] = MappingProxyType(
  {
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", _ADA, 128, 2.52, 24 * 10**9, 1_008 * 10**9, 72 * 2**20),
    "a100": Gpu("NVIDIA A100 80GB", _AMPERE, 108, 1.41, 80 * 10**9, 2_040 * 10**9, 40 * 2**20),
    "h100": Gpu("NVIDIA H100", _HOPPER, 132, 1.98, 80 * 10**9, 3_350 * 10**9, 50 * 2**20),
    "h200": Gpu("NVIDIA H200", _HOPPER, 132, 1.98, 141 * 10**9, 4_800 * 10**9, 50 * 2**20),
  }
)
"""GPUs by name: NVIDIA's datasheets and tuning guides."""

WIRE, NETWORK = 450e9, 50e9
"""Bytes/s of an H100 or H200 in one direction: in its host by NVLink 4, to others by 400 Gbit/s."""

USABLE = 0.75
"""Share of a GPU's memory that JAX takes by default, `XLA_PYTHON_CLIENT_MEM_FRACTION`."""

# Without the driver's version, the compiler leaves loops and conditions out of the command buffers.
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {own.shared} shared_memory_per_block_optin: {own.shared_of_block}
  threads_per_core_limit: {own.threads} core_count: {gpu.cores} fpus_per_core: {own.units}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bytes_per_s} l2_cache_size: {gpu.l2} clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {own.capability[0]} minor: {own.capability[1]} }}
  runtime_version: "13.0.0" driver_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 }} runtime_version {{ major: 13 }}
device_description_str: "{gpu.kind}"
"""

# The compiler cannot time kernels here, and takes its default tiles of products instead.
_OFFLINE = {"xla_gpu_autotune_level": "0"}


def are_named(topology: str) -> bool:
  """Returns whether a topology is one of GPUs, whatever their number.

  Example:
    >>> are_named("h200:8"), are_named("v5p:4x4x4")
    (True, False)
  """
  return topology.lower().partition(":")[0] in GPUS


def parse(name: str) -> tuple[str, int]:
  """Parses a GPU and the number of them.

  Raises:
    ValueError: If there are no such GPUs. One line.

  Example:
    >>> parse("h200:8"), parse("h100")
    (('h200', 8), ('h100', 1))
    >>> parse("h200:12")
    Traceback (most recent call last):
    ...
    ValueError: found 'h200:12', expected 1 to 8 GPUs, or a multiple of 8, as in h200:16
  """
  kind, _, number = name.lower().partition(":")
  if kind not in GPUS:
    raise ValueError(f"found no GPU {kind!r}, expected one of {', '.join(GPUS)}{did_you_mean(kind, GPUS)}")
  count = int(number or "1") if re.fullmatch(r"\d*", number) else 0
  if not count or count > OF_HOST and count % OF_HOST:
    raise ValueError(f"found {name!r}, expected 1 to {OF_HOST} GPUs, or a multiple of {OF_HOST}, as in {kind}:16")
  return kind, count


def prepare() -> None:
  """Checks that the compiler is installed, and keeps JAX from looking for a GPU or for cuDNN.

  Attention that cuDNN would compute is compiled as XLA's, which holds T x T numbers.

  Raises:
    ValueError: If it is not.
  """
  if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
    raise ValueError(
      "compiling for GPUs needs XLA's compiler for CUDA (no GPU is needed): "
      "pip install jax-cuda13-plugin jax-cuda13-pjrt, in the version of jax"
    )
  jax.config.update("jax_platforms", "cpu")
  attention.BACKENDS["cudnn"] = attention.BACKENDS["xla"]


def describe(name: str) -> Topology:
  """Describes GPUs to compile for.

  Raises:
    ValueError: If there are no such GPUs.
  """
  kind, count = parse(name)
  gpu, hosts = GPUS[kind], -(-count // OF_HOST)
  target = _TARGET.format(gpu=gpu, own=gpu.generation)
  devices = topologies.get_topology_desc(kind, platform="cuda", target_config=target, topology=f"1x{hosts}x{count // hosts}").devices
  flags = _OFFLINE | xla_flags.unset_flags("gpu", os.environ)
  chip = datasheet(gpu.kind)._replace(memory_bytes=USABLE * gpu.memory, wire_bytes_per_s=WIRE, network_bytes_per_s=NETWORK)
  return Topology(f"{kind}:{count}", hosts, chip, (), devices, flags, "cuda")
