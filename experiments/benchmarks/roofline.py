"""Upper bound on the speed of sampling: operations and bytes of every step, against the peaks.

A step cannot end before its matrix products are done nor before its bytes have moved, so

  time ≥ Σ over steps of max(FLOPs / peak FLOP/s, bytes / peak bytes/s).

The counts include the matrix products (with the head, attention and the experts that a token
visits) and the least traffic: weights once per step, keys and values written once and read once per
step (those of a prompt once for all live samples), logits written and read once. Norms, rotary
embedding, softmax and the draw itself count nothing, so that no implementation can reach the bound.
"""

import heapq
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxrl_llm.devices.memory import chip_memory
from jaxrl_llm.models import ModelConfig

LOGITS_BYTES = 4  # Logits are always float32.

# Device kind in JAX, bytes/s, FLOP/s of dense bfloat16 matrix products, and source. float32 is
# slower on all of these devices, so that the bound is only looser for it.
_NVIDIA, _TPU = "NVIDIA's datasheet", "Google Cloud's TPU documentation"
DATASHEETS = (
  (r"H200", 4.8e12, 989e12, _NVIDIA),
  (r"H100 PCIe", 2.0e12, 756e12, _NVIDIA),
  (r"H100 NVL", 3.9e12, 835e12, _NVIDIA),
  (r"H100", 3.35e12, 989e12, _NVIDIA),
  (r"RTX 4090", 1.008e12, 165e12, _NVIDIA),
  (r"A100.*80GB", 2.04e12, 312e12, _NVIDIA),
  (r"A100", 1.555e12, 312e12, _NVIDIA),
  (r"TPU v5 ?lite|TPU v5e", 0.819e12, 197e12, _TPU),
  (r"TPU v5p?$", 2.765e12, 459e12, _TPU),
  (r"TPU v6 ?lite|TPU v6e", 1.64e12, 918e12, _TPU),
  (r"TPU7x", 3.69e12, 1153.5e12, _TPU),  # Half a chip, as JAX has it.
)

# Numbers of TPUs: bytes/s in one direction of each wire to a neighbour, and bytes/s of a chip to
# other slices. They come from the documentation (a chip's total over its 4 or 6 wires).
NETWORKS = (
  (r"TPU v5 ?lite|TPU v5e", 50e9, 3.125e9),
  (r"TPU v5p?$", 100e9, 6.25e9),
  (r"TPU v6 ?lite|TPU v6e", 112e9, 12.5e9),
  # What both devices of a chip need may arrive once, so that each counts the whole wire. The
  # network carries different data for each.
  (r"TPU7x", 100e9, 6.25e9),
)

MATMULS = ((128, 2048, 8192), (1024, 1024, 4096))
"""Rows, inner size and columns of the matrix products that measure an unknown machine."""


class Machine(NamedTuple):
  """Peaks of one device.

  Attributes:
    kind: Name of the device.
    flops_per_s: Peak FLOP/s of matrix products.
    bytes_per_s: Peak bandwidth of the memory, in bytes/s.
    source: Source of these two peaks.
    memory_bytes: Memory that a program may use, in bytes; None if unknown, like the next two.
    wire_bytes_per_s: Bandwidth to one neighbour in the torus in one direction, in bytes/s.
    network_bytes_per_s: Bandwidth to devices of other slices, in bytes/s.
  """

  kind: str
  flops_per_s: float
  bytes_per_s: float
  source: str
  memory_bytes: float | None = None
  wire_bytes_per_s: float | None = None
  network_bytes_per_s: float | None = None


class Work(NamedTuple):
  """Work to do in each step.

  Attributes:
    flops: Floating-point operations of each step; a multiplication and an addition count as two.
    num_bytes: Number of bytes that each step moves.
  """

  flops: np.ndarray
  num_bytes: np.ndarray


class Bound(NamedTuple):
  """Least time of some work on a machine.

  Attributes:
    seconds: Σ max(compute, memory) over the steps, in s.
    compute_seconds: Time of the operations alone, in s.
    memory_seconds: Time of the memory traffic alone, in s.
    steps: Number of steps, including the prefill.
    flops: Operations of all steps.
    num_bytes: Bytes of all steps.
  """

  seconds: float
  compute_seconds: float
  memory_seconds: float
  steps: int
  flops: float
  num_bytes: float


def datasheet(kind: str) -> Machine | None:
  """Returns the published peaks of a device, or None if they are not listed here.

  Args:
    kind: JAX's name of the device, `device.device_kind`.

  Example:
    >>> datasheet("NVIDIA H100 80GB HBM3").bytes_per_s
    3350000000000.0
    >>> datasheet("cpu") is None
    True
  """
  for pattern, bytes_per_s, flops_per_s, source in DATASHEETS:
    if re.search(pattern, kind, re.IGNORECASE):
      network = next((numbers for known, *numbers in NETWORKS if re.search(known, kind, re.IGNORECASE)), ())
      return Machine(kind, flops_per_s, bytes_per_s, source, chip_memory(kind), *network)
  return None


def find_machine(device, num_bytes: int) -> Machine:
  """Returns the peaks of a device: the published ones, or measured ones if it is unknown.

  Args:
    device: Device of JAX.
    num_bytes: Number of bytes that a step reads, such as the size of the weights. Memory is
      measured with arrays of this size, since smaller arrays may stay in a cache.
  """
  return datasheet(device.device_kind) or measure(device, num_bytes)


def measure(device, num_bytes: int) -> Machine:
  """Measures the peaks of a device by float32 matrix products and by sums and copies of an array.

  The fastest of a few repetitions counts.

  Args:
    device: Device of JAX.
    num_bytes: Size of the array in bytes, clipped to 8 MB and 512 MB.
  """
  import jax
  import jax.numpy as jnp

  matmul = jax.jit(jnp.matmul)
  flops_per_s = 0.0
  for rows, inner, columns in MATMULS:
    a, b = (
      jax.device_put(np.ones(shape, np.float32), device) for shape in ((rows, inner), (inner, columns))
    )
    flops_per_s = max(
      flops_per_s, 2 * rows * inner * columns / fastest(lambda a=a, b=b: jax.block_until_ready(matmul(a, b)))
    )

  size = int(np.clip(num_bytes, 8e6, 512e6)) // 4
  if device.platform == "cpu":
    bytes_per_s = _host_bytes_per_s(size)
  else:
    x, copy = jax.device_put(np.ones(size, np.float32), device), jax.jit(lambda x: x + 1)
    bytes_per_s = 8 * size / fastest(lambda: jax.block_until_ready(copy(x)))
  return Machine(
    device.device_kind,
    flops_per_s,
    bytes_per_s,
    f"measured here: float32 matmul, sum and copy of {4 * size / 1e6:.0f} MB",
  )


def _host_bytes_per_s(size: int) -> float:
  """Measures the memory bandwidth with NumPy in one thread per core.

  On a CPU this is faster than XLA's sum or copy.
  """
  a, b = np.ones(size, np.float32), np.ones(size, np.float32)
  num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
  edges = np.linspace(0, size, num_threads + 1).astype(int)
  parts = [slice(start, end) for start, end in zip(edges[:-1], edges[1:])]
  with ThreadPoolExecutor(num_threads) as pool:
    total = fastest(lambda: list(pool.map(lambda part: a[part].sum(), parts)))
    copied = fastest(lambda: list(pool.map(lambda part: np.copyto(b[part], a[part]), parts)))
  return max(4 * size / total, 8 * size / copied)


def fastest(call: Callable[[], object], repeats: int = 20) -> float:
  """Returns the seconds of the fastest call after a first one that warms up."""
  call()
  seconds = []
  for _ in range(repeats):
    started = time.perf_counter()
    call()
    seconds.append(time.perf_counter() - started)
  return min(seconds)


def layer_weights(config: ModelConfig) -> tuple[int, int, int]:
  """Counts the weights that matrix products read, over all layers.

  Returns:
    The weights shared by all tokens, those of one expert in all layers, and those of the head.

  Example:
    >>> from jaxrl_llm.models import preset
    >>> layer_weights(preset("nano", vocab_size=264))
    (18432, 0, 8448)
  """
  d, c = config.d_model, config.head_dim
  attention = d * c * (2 * config.num_heads + 2 * config.num_kv_heads)
  shared = config.num_layers * attention + len(config.dense_layers) * 3 * d * config.d_ff
  expert = 0
  if config.experts:
    shared += len(config.sparse_layers) * d * config.experts.num_experts  # The router.
    expert = len(config.sparse_layers) * 3 * d * config.experts.d_ff
  return shared, expert, d * config.vocab_size


def _step(config: ModelConfig, *, tokens, pairs, heads, cache_tokens, itemsize: int) -> Work:
  """Counts the work of steps.

  Args:
    config: Config of the model.
    tokens: Number of tokens that pass through the layers.
    pairs: Number of pairs of query and key.
    heads: Number of rows of logits.
    cache_tokens: Number of tokens whose keys and values are read or written.
    itemsize: Bytes of a weight and of an entry of the cache.
  """
  shared, expert, head = layer_weights(config)
  active, touched = 0, 0
  if config.experts:
    e, k = config.experts.num_experts, config.experts.top_k
    # The number of visited experts assumes that routes are spread evenly.
    active, touched = k * expert, e * (1 - (1 - k / e) ** tokens) * expert
  flops = (
    2 * tokens * (shared + active)
    + 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    + 2 * heads * head
  )
  cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize * cache_tokens
  num_bytes = (shared + touched + head) * itemsize + cache + 2 * LOGITS_BYTES * heads * config.vocab_size
  return Work(np.asarray(flops, np.float64), np.asarray(num_bytes, np.float64))


def prefill(config: ModelConfig, prompt_lengths: Sequence[int], *, itemsize: int) -> Work:
  """Counts the work of the step that reads all prompts, each once.

  Args:
    config: Config of the model.
    prompt_lengths: Length of each prompt, in tokens.
    itemsize: Bytes of a weight and of an entry of the cache.
  """
  p = np.asarray(prompt_lengths, np.int64)
  work = _step(
    config, tokens=p.sum(), pairs=np.sum(p * (p + 1) // 2), heads=len(p), cache_tokens=p.sum(), itemsize=itemsize
  )
  return Work(*(np.atleast_1d(x) for x in work))


def schedule(steps: Sequence[int], slots: int) -> np.ndarray:
  """Returns the start of each sequence if the next one in order takes the first free slot.

  Args:
    steps: Number of steps for which each sequence holds its slot.
    slots: Number of slots.

  Example:
    >>> schedule([5, 1, 1, 3], 2).tolist()
    [0, 0, 1, 2]
  """
  free, starts = [0] * min(slots, len(steps)), []
  for length in steps:
    starts.append(heapq.heappop(free))
    heapq.heappush(free, starts[-1] + int(length))
  return np.array(starts, np.int64)


def decode(
  config: ModelConfig,
  prompt_lengths: Sequence[int],
  response_lengths: Sequence[int],
  *,
  slots: int | None = None,
  itemsize: int,
) -> Work:
  """Counts the work of all steps after the prefill, which draws the first token of each response.

  Args:
    config: Config of the model.
    prompt_lengths: Length of each prompt, in tokens (n).
    response_lengths: Length of each response, in tokens (n·G); G consecutive ones per prompt.
    slots: Number of responses in progress at a time; None means all of them.
    itemsize: Bytes of a weight and of an entry of the cache.
  """
  responses = np.asarray(response_lengths, np.int64)
  owner = np.arange(len(responses)) // (len(responses) // len(prompt_lengths))
  steps = np.maximum(responses - 1, 0)
  starts = schedule(steps, slots or len(steps))
  num_steps = int(np.max(starts + steps, initial=0))
  rows, own, of_prompts, shared = (np.zeros(num_steps, np.int64) for _ in range(4))
  for prompt, prompt_tokens in enumerate(np.asarray(prompt_lengths)):
    live = np.zeros(num_steps, np.int64)
    for i in np.flatnonzero(owner == prompt):
      span = slice(starts[i], starts[i] + steps[i])
      live[span] += 1
      # The drawn tokens that a step attends to, including the one that it reads.
      own[span] += np.arange(1, steps[i] + 1)
    rows += live
    of_prompts += live * prompt_tokens
    shared += (live > 0) * prompt_tokens
  # A step reads all of a row's own tokens but the last, whose keys and values it writes.
  return _step(config, tokens=rows, pairs=own + of_prompts, heads=rows, cache_tokens=own + shared, itemsize=itemsize)


def rollout(
  config: ModelConfig,
  prompt_lengths: Sequence[int],
  response_lengths: Sequence[int],
  *,
  slots: int | None = None,
  itemsize: int,
) -> Work:
  """Counts the work of the prefill and all steps after it; the arguments are those of `decode`."""
  first = prefill(config, prompt_lengths, itemsize=itemsize)
  rest = decode(config, prompt_lengths, response_lengths, slots=slots, itemsize=itemsize)
  return Work(*(np.concatenate(pair) for pair in zip(first, rest)))


def update_flops(config: ModelConfig, *, tokens: int, pairs: int, scored: int) -> float:
  """Counts the floating-point operations of one update.

  They are those of the forward pass, and twice as many for the gradients of inputs and weights.

  Recomputation to save memory counts nothing, and neither does the optimizer.

  Args:
    config: Config of the model.
    tokens: Number of tokens that pass through the layers.
    pairs: Number of pairs of query and key, summed over the sequences.
    scored: Number of tokens whose logits are needed.
  """
  return 3 * float(_step(config, tokens=tokens, pairs=pairs, heads=scored, cache_tokens=0, itemsize=0).flops)


def bound(work: Work, machine: Machine) -> Bound:
  """Bounds the time of some work from below, step by step.

  Example:
    >>> work = Work(flops=np.array([10.0, 1.0]), num_bytes=np.array([1.0, 8.0]))
    >>> bound(work, Machine("toy", flops_per_s=10.0, bytes_per_s=4.0, source="")).seconds
    3.0
  """
  compute, memory = work.flops / machine.flops_per_s, work.num_bytes / machine.bytes_per_s
  return Bound(
    seconds=float(np.sum(np.maximum(compute, memory))),
    compute_seconds=float(np.sum(compute)),
    memory_seconds=float(np.sum(memory)),
    steps=len(work.flops),
    flops=float(np.sum(work.flops)),
    num_bytes=float(np.sum(work.num_bytes)),
  )
