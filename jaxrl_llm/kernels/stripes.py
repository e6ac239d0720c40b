"""The order in which devices that share a row hold its slots; see `models.striping`."""

from functools import lru_cache
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, Shaped

_SIZES, _LEAST = (512, 256, 128), 8
"""Slots of a stripe, and the least number of stripes per device for which a size is chosen.

Smaller stripes balance packed rows better. But a kernel's block of queries lies within one stripe,
and each block reads all keys that it sees from memory.
"""


class Stripes(NamedTuple):
  """The stripes of a row over the devices of the axis `context`.

  Attributes:
    length: Number of slots of the row.
    parts: Number of devices.

  Example:
    >>> stripes = Stripes(length=10, parts=2)
    >>> stripes.size, stripes.slots.tolist()
    (2, [0, 1, 6, 7, 8, 2, 3, 4, 5, 9])
    >>> [Stripes(length, 4).size for length in (18432, 4096, 1024, 40)]
    [512, 128, 128, 5]
  """

  length: int
  parts: int

  @property
  def size(self) -> int:
    """Number of slots of a stripe. The last stripe of each device may be shorter."""
    held = self.length // self.parts
    return next((size for size in _SIZES if _LEAST * size <= held), min(_SIZES[-1], held // 2))

  @property
  def slots(self) -> Int[np.ndarray, " T"]:
    """Slots of the row in the order in which the devices hold them."""
    return _dealt(*self, self.size)

  def joined(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
    """Puts the slots of all devices, gathered on one of them, in the order of the row.

    It is a concatenation of stripes, and so is its gradient.
    """
    starts = np.flatnonzero(np.diff(self.slots, prepend=-2) != 1)
    stripes = jax.lax.split(x, np.diff(starts, append=self.length).tolist(), axis=1)
    return jax.lax.concatenate([stripes[i] for i in np.argsort(self.slots[starts])], 1)


@lru_cache
def _dealt(length: int, parts: int, size: int) -> Int[np.ndarray, " T"]:
  rounds = np.split(np.arange(length, dtype=np.int32), range(parts * size, length, parts * size))
  held = [np.split(slots, parts)[:: -1 if turn % 2 else 1] for turn, slots in enumerate(rounds)]
  return np.concatenate([stripes[device] for device in range(parts) for stripes in held])
