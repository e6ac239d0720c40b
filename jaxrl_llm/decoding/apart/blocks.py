"""Arrays that process 0 has, on their way to the devices of all processes.

A block of entries of the first axis at a time goes to the devices of process 0, a part to each, and
from there to all: they sum up the bits of the parts, of which all others hold zeros.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped, UInt32

BLOCK_BYTES = 1 << 26
"""Largest number of bytes of a block of several entries."""


class BlockWriter:
  """Writes arrays of one kind, block by block. All processes make the same calls in the same order.

  Args:
    kind: Abstract array with a `NamedSharding`.
    block_bytes: Largest number of bytes of a block; an entry is never split.

  Attributes:
    size: Number of entries of the first axis in a block. It is all of them if that axis is split
      over devices.
  """

  def __init__(self, kind: jax.ShapeDtypeStruct, *, block_bytes: int = BLOCK_BYTES):
    self._kind, mesh = kind, kind.sharding.mesh
    devices, axes = list(mesh.devices.flat), PartitionSpec(mesh.axis_names)
    sources = [device for device in devices if device.process_index == 0]
    # Of each device, the part of a block that it contributes; beyond the last one, none.
    parts = np.array([sources.index(device) if device in sources else len(sources) for device in devices])
    is_whole = kind.ndim == 0 or kind.sharding.shard_shape(kind.shape)[0] < kind.shape[0]
    entry_bytes = kind.dtype.itemsize * math.prod(kind.shape[1:])
    self.size = len(self) if is_whole else min(len(self), max(1, block_bytes // entry_bytes))
    shape = kind.shape if is_whole else (self.size, *kind.shape[1:])
    count = math.prod(shape)
    num_words = -(-count * kind.dtype.itemsize // (4 * len(sources)))
    self._words, self._split = (len(sources), num_words), NamedSharding(mesh, axes)
    here = [device for device in devices if device.process_index == jax.process_index()]
    self._here = [(device, int(parts[devices.index(device)])) for device in here]

    def gathered(words: UInt32[Array, "1 m"]) -> UInt32[Array, "s m"]:
      own = jnp.asarray(parts)[jax.lax.axis_index(mesh.axis_names)]
      return jax.lax.psum(jnp.zeros(self._words, jnp.uint32).at[own].set(words[0], mode="drop"), mesh.axis_names)

    def write(whole: Shaped[Array, "..."], words: UInt32[Array, "d m"], start: Array) -> Shaped[Array, "..."]:
      bits = jax.shard_map(gathered, mesh=mesh, in_specs=axes, out_specs=PartitionSpec())(words).ravel()
      block = jax.lax.bitcast_convert_type(bits, kind.dtype).ravel()[:count].reshape(shape)
      block = jax.lax.with_sharding_constraint(block, kind.sharding)
      return block if is_whole else jax.lax.dynamic_update_slice_in_dim(whole, block, start, 0)

    split = jax.ShapeDtypeStruct((len(devices), num_words), jnp.uint32, sharding=self._split)
    jitted = jax.jit(write, donate_argnums=0, out_shardings=kind.sharding)
    self._write = jitted.lower(kind, split, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    self._begin = jax.jit(lambda: jnp.zeros(kind.shape, kind.dtype), out_shardings=kind.sharding).lower().compile()
    self._zeros = [jnp.zeros((1, num_words), jnp.uint32, device=device) for device, part in self._here if part == len(sources)]

  def whole(self, before: int, after: int) -> list[int]:
    """Returns the first entries of the blocks that the bytes from `before` to `after` complete."""
    entry_bytes = self._kind.size * self._kind.dtype.itemsize // len(self)
    return [start for start in self.starts() if before < (start + self.size) * entry_bytes <= after]

  def begin(self) -> Shaped[Array, "..."]:
    """Returns an array to write into."""
    return self._begin()

  def starts(self) -> Sequence[int]:
    """Returns the first entry of each block. The last one may overlap with the one before."""
    last = len(self) - self.size
    return [min(start, last) for start in range(0, len(self), self.size)]

  def __len__(self) -> int:
    """Returns the number of entries of the first axis."""
    return self._kind.shape[0] if self._kind.ndim else 1

  def block(self, x: Shaped[np.ndarray, "..."], start: int) -> Shaped[np.ndarray, "..."]:
    """Returns a block of an array."""
    return x[start : start + self.size] if x.ndim else x

  def write(self, whole: Shaped[Array, "..."], start: int, block: Shaped[np.ndarray, "..."] | None) -> Shaped[Array, "..."]:
    """Writes a block.

    Args:
      whole: Array to write into, donated.
      start: Number of its first entry.
      block: The block in process 0; ignored elsewhere.
    """
    own = iter(self._zeros)
    words = self._parts(block) if jax.process_index() == 0 else None
    placed = [next(own) if words is None else jax.device_put(words[part : part + 1], device) for device, part in self._here]
    shape = (self._split.mesh.size, self._words[1])
    return self._write(whole, jax.make_array_from_single_device_arrays(shape, self._split, placed), jnp.int32(start))

  def _parts(self, block: Any) -> UInt32[np.ndarray, "s m"]:
    data = np.zeros(4 * math.prod(self._words), np.uint8)
    own = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
    data[: len(own)] = own
    return data.view(np.uint32).reshape(self._words)
