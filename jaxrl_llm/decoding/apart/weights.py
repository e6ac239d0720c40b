"""Weights on their way from a learner to samplers in other processes.

The learner offers the checksums of all weights, a sampler answers which it lacks, and gets those in
pieces. It puts them on its devices beside the weights that it draws with, and takes them over when
its own checksums agree:

  Snapshot (learner) -> offer -> lacking -> pieces -> HeldWeights (sampler) -> engine.update

Process 0 of a sampler of several processes does so for all of them; see `shared_weights`.
"""

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, UInt8

from jaxrl_llm.decoding.apart.blocks import BlockWriter
from jaxrl_llm.decoding.engine.requests import Engine
from jaxrl_llm.devices import hosts
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.messages import shown
from jaxrl_llm.models import lower_precision
from jaxrl_llm.models.checksums import double_checksum
from jaxrl_llm.types import Params

PIECE_BYTES = 1 << 18
"""Largest number of bytes of a piece. Python reads larger ones into ever new memory."""


class WeightsRefused(Exception):
  """A sampler cannot take the weights that it is offered. One line."""


class Offer(NamedTuple):
  """A weight that a learner offers.

  Attributes:
    name: Path in the tree.
    dtype: Name of its dtype.
    shape: Sizes of its axes.
    sums: Checksums; see `double_checksum`.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  sums: tuple[int, ...]


def offers_of(leaves: Sequence[Sequence[Any]]) -> list[Offer]:
  """Returns what a message offers."""
  return [Offer(name, dtype, tuple(shape), tuple(sums)) for name, dtype, shape, sums in leaves]


def names_of(params: Params) -> list[str]:
  """Returns the names of all weights, in the order of the tree's leaves.

  Example:
    >>> names_of({"layers": {"up": 1}, "final": 2})
    ['final', 'layers/up']
  """
  return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(params)]


@partial(jax.jit, static_argnames="dtype")
def copies_and_sums(params: Params, dtype: str | None) -> tuple[Params, list[Array]]:
  """Returns copies of weights in the dtype in which they travel, and their checksums."""
  lowered = params if dtype is None else lower_precision(params, dtype)
  # Copies, because a jitted function returns an unchanged argument itself.
  return jax.tree.map(jnp.copy, lowered), [double_checksum(x) for x in jax.tree.leaves(lowered)]


def leaving(params: Params, dtype: str | None) -> tuple[Params, list[Any]]:
  """Returns what leaves the devices: copies of weights and their checksums.

  In a learner of several processes all call this, and process 0 gets the copies, on its host.
  """
  copies, sums = copies_and_sums(params, dtype)
  return (copies, sums) if jax.process_count() == 1 else (jax.tree.map(hosts.to_main, copies), hosts.to_host(sums))


class Snapshot:
  """Weights of one version, copied on the devices at once and to the host in the background.

  Args:
    params: Weights, read before this returns: they may be donated afterwards.
    version: Number that no other weights have.
    dtype: Dtype to which they are cast first; None keeps theirs.
    earlier: Snapshot of earlier weights. What has not changed since is not copied again.

  Attributes:
    version: Number of the weights.
  """

  def __init__(self, params: Params, version: int, *, dtype: str | None = None, earlier: "Snapshot | None" = None):
    self.version = version
    copies, sums = leaving(params, dtype)
    self._leaves: dict[str, Array] = dict(zip(names_of(copies), jax.tree.leaves(copies), strict=True))
    self._host: dict[str, np.ndarray] = {}
    self._offer, self._error, self._changed = None, None, threading.Condition()
    threading.Thread(target=self._copy, args=[sums, earlier], name="weights to the host", daemon=True).start()

  def _copy(self, sums: Sequence[Array], earlier: "Snapshot | None") -> None:
    try:
      sums_of = zip(self._leaves.items(), sums, strict=True)
      offer = [Offer(name, x.dtype.name, tuple(x.shape), tuple(np.asarray(own).tolist())) for (name, x), own in sums_of]
      before = {} if earlier is None else earlier.copied()
      with self._changed:
        self._offer = offer
        self._changed.notify_all()
      for own in offer:
        x = before[own.name][1] if before.get(own.name, (None,))[0] == own else np.asarray(self._leaves[own.name])
        with self._changed:
          self._host[own.name] = x
          del self._leaves[own.name]
          self._changed.notify_all()
    except Exception as error:  # Any failure must wake the sender.
      with self._changed:
        self._error = error
        self._changed.notify_all()

  def copied(self) -> dict[str, tuple[Offer, np.ndarray]]:
    """Returns the weights that are on the host by now."""
    with self._changed:
      return {own.name: (own, self._host[own.name]) for own in self._offer or () if own.name in self._host}

  def offer(self, seconds: float | None = None) -> list[Offer] | None:
    """Waits for the checksums of all weights; None if they are not there in time."""
    return self._wait(lambda: self._offer, seconds)

  def leaf(self, name: str, seconds: float | None = None) -> np.ndarray | None:
    """Waits for a weight on the host; None if it is not there in time."""
    return self._wait(lambda: self._host.get(name), seconds)

  def _wait(self, get: Any, seconds: float | None) -> Any:
    with self._changed:
      self._changed.wait_for(lambda: self._error is not None or get() is not None, seconds)
      if self._error is not None:
        raise self._error
      return get()


def pieces(x: np.ndarray, size: int = PIECE_BYTES) -> Iterator[tuple[int, UInt8[np.ndarray, " n"]]]:
  """Yields the bytes of a weight in pieces, each with the position of its first one.

  Example:
    >>> [(start, piece.tolist()) for start, piece in pieces(np.int16([1, 2]), size=3)]
    [(0, [1, 0, 2]), (3, [0])]
  """
  data = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
  for start in range(0, len(data), size):
    yield start, data[start : start + size]


class HeldWeights:
  """Weights of a sampler: those that it draws with, and those that arrive beside them.

  Args:
    template: Abstract weights, with the shardings on the sampler's devices if there are any.
  """

  def __init__(self, template: PyTree):
    leaves = dict(zip(names_of(template), jax.tree.leaves(template), strict=True))
    self._template, self._tree = leaves, jax.tree.structure(template)
    self._held: dict[str, tuple[tuple[int, ...], Array]] = {}
    self._offered: dict[str, Offer] = {}
    self._staged: dict[str, tuple[tuple[int, ...], Array]] = {}
    self._buffers: dict[str, tuple[np.ndarray, int]] = {}
    # Nothing compiles while samplers draw.
    sums, writers, key = {}, {}, lambda x: (x.shape, x.dtype, x.sharding)
    for x in leaves.values():
      if key(x) not in sums:
        kind, is_here = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), x.sharding is None or x.sharding.is_fully_addressable
        summed = jax.jit(double_checksum) if is_here else jax.jit(double_checksum, out_shardings=mesh_lib.replicated(x.sharding.mesh))
        sums[key(x)], writers[key(x)] = summed.lower(kind).compile(), None if is_here else BlockWriter(kind)
    self._sums, self._writers = ({name: of[key(x)] for name, x in leaves.items()} for of in (sums, writers))

  def lacking(self, offered: Sequence[Offer]) -> list[str]:
    """Returns the names of weights that this sampler does not hold, and expects them from now on.

    Raises:
      WeightsRefused: If they belong to another model.
    """
    kinds = {name: (x.dtype.name, tuple(x.shape)) for name, x in self._template.items()}
    others = {own.name: (own.dtype, tuple(own.shape)) for own in offered}
    if wrong := [name for name in {**kinds, **others} if kinds.get(name) != others.get(name)]:
      told = lambda kind: "nothing" if kind is None else f"{kind[0]}{list(kind[1])}"
      raise WeightsRefused(
        f"{shown(wrong[0])}: the learner has {told(others.get(wrong[0]))}, the sampler {told(kinds.get(wrong[0]))}; "
        f"{len(wrong)} of {len(kinds)} weights differ in their shapes"
      )
    self._offered = {own.name: own for own in offered}
    self._staged, self._buffers = {}, {}
    lacked = [own.name for own in offered if own.name not in self._held or self._held[own.name][0] != own.sums]
    for name in lacked:
      self._held.pop(name, None)  # Makes room for the new one; the engine has copies.
    return lacked

  def add(self, name: str, start: int, data: UInt8[np.ndarray, " n"]) -> None:
    """Takes the next piece of a weight, and puts the weight on the devices with its last one.

    Raises:
      WeightsRefused: If it is not the next one.
    """
    filled, x = self.receive(name, start, data), self._template[name]
    if filled == x.size * x.dtype.itemsize:
      self._staged[name] = (), jax.device_put(self._received(name), x.sharding)
      del self._buffers[name]

  def receive(self, name: str, start: int, data: UInt8[np.ndarray, " n"]) -> int:
    """Keeps the next piece of a weight on the host, and returns how many bytes are there.

    Raises:
      WeightsRefused: If it is not the next one.
    """
    if name not in self._offered:
      raise WeightsRefused(f"{shown(name)}: found a piece, expected none: it was not offered")
    if name not in self._buffers:
      x = self._template[name]
      self._buffers[name] = np.empty(x.size * x.dtype.itemsize, np.uint8), 0
    buffer, filled = self._buffers[name]
    if start != filled or start + len(data) > len(buffer):
      raise WeightsRefused(f"{shown(name)}: found a piece at byte {start} of {len(data)}, expected one at {filled} of {len(buffer)} bytes")
    buffer[start : start + len(data)] = data
    self._buffers[name] = buffer, start + len(data)
    return start + len(data)

  def _received(self, name: str) -> np.ndarray:
    x = self._template[name]
    return self._buffers[name][0].view(x.dtype).reshape(x.shape)

  def blocks(self, name: str, before: int, after: int) -> list[int]:
    """Returns the blocks of a weight that the bytes from `before` to `after` have completed."""
    return self._writers[name].whole(before, after)

  def place(self, name: str, start: int) -> None:
    """Puts a block of a weight, which process 0 has received, on the devices of all processes."""
    writer = self._writers[name]
    whole = self._staged[name][1] if name in self._staged else writer.begin()
    block = writer.block(self._received(name), start) if name in self._buffers else None
    self._staged[name] = (), writer.write(whole, start, block)
    if start == writer.starts()[-1]:
      self._buffers.pop(name, None)

  def wrong(self, lacked: Sequence[str]) -> dict[str, str]:
    """Returns a line for each weight that has not arrived as it was offered, by name."""
    for name, (_, x) in self._staged.items():
      self._staged[name] = self._sums[name](x), x  # Dispatched together, read below.
    lines = {}
    for name in lacked:
      if name not in self._staged:
        lines[name] = f"{name}: it did not arrive"
        continue
      sums, x = self._staged[name]
      self._staged[name] = own = tuple(np.asarray(sums).tolist()), x
      if own[0] != self._offered[name].sums:
        told = [" ".join(f"{part:08x}" for part in of_side) for of_side in (self._offered[name].sums, own[0])]
        lines[name] = f"{name}: the learner sent {told[0]}, the sampler holds {told[1]}"
        del self._staged[name]
    return lines

  def give(self, engine: Engine, version: int) -> None:
    """Gives an engine the whole tree with what has arrived, whose numbers are those offered."""
    self._held |= self._staged
    self._staged, self._buffers = {}, {}
    engine.update(jax.tree.unflatten(self._tree, [self._held[name][1] for name in self._template]), version)
