"""Several engines with the same weights, on devices or cores of their own, that work as one.

A model that fits a device, or a few that split its heads (`tensor`), decodes faster in one engine
for each of them than in one for all: no step of an engine waits for another, and nothing travels
between them but new weights. On a CPU, whose device has several cores, engines share it: each of
them keeps a core busy.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.decoding.engine.loop import DecodingEngine
from jaxrl_llm.decoding.engine.make import make_engine, make_twins
from jaxrl_llm.decoding.engine.programs import num_twins
from jaxrl_llm.decoding.engine.requests import Decoded, Engine, EngineLimits, Handle, Piece, Pulse, QueueFull, Request
from jaxrl_llm.devices import cores
from jaxrl_llm.devices.mesh import AXES, RULES, num_row_shards, param_shardings, platform_of
from jaxrl_llm.models import Model, make_model
from jaxrl_llm.types import Params

_BLOCK, _TAILS = 16, 64  # Number of tokens of a block of `Whereabouts`, and of ends that it knows.


class Whereabouts:
  """Which engine was the last to get the tokens that a request begins with.

  Tokens are compared in blocks by hashes, each of which includes the block before; what is left
  over at the end, token by token. Starts no JAX.

  Args:
    capacity: Number of blocks that are known; those that were not asked for longest are forgotten,
      with all that ends in them.

  Example:
    >>> known = Whereabouts(capacity=8)
    >>> known.note(range(40), "", 1)
    >>> known.note(range(44), "", 2)
    >>> known.find(range(50), ""), known.find([*range(43), 7, 7], ""), known.find(range(30), "")
    (2, 1, 2)
    >>> known.find(range(9), ""), known.find(range(44), "salt")
    (None, None)
  """

  def __init__(self, capacity: int):
    self._capacity, self._blocks = capacity, OrderedDict()

  def note(self, tokens: Sequence[int], salt: str, engine: int) -> None:
    """Notes that an engine holds the tokens, or soon will."""
    tails: dict[tuple[int, ...], int] = {}
    for block, start in _blocks(tokens, salt):
      _, tails = self._blocks.setdefault(block, (engine, {}))
      self._blocks[block] = engine if start else None, tails
      self._blocks.move_to_end(block)
    tails.pop(tail := tuple(tokens[start:]), None)
    tails[tail] = engine
    if len(tails) > _TAILS:
      tails.pop(next(iter(tails)))
    while len(self._blocks) > self._capacity:
      self._blocks.popitem(last=False)

  def find(self, tokens: Sequence[int], salt: str) -> int | None:
    """Returns the engine that holds most of the first tokens; None if none is known to."""
    engine, tails, rest = None, {}, ()
    for block, start in _blocks(tokens, salt):
      if block not in self._blocks:
        break
      engine, tails = self._blocks[block]
      self._blocks.move_to_end(block)
      rest = tuple(tokens[start : start + _BLOCK - 1])
    ends = (tails.get(rest[:end]) for end in range(len(rest), 0, -1))
    return next((own for own in ends if own is not None), engine)

  def clear(self) -> None:
    """Forgets all."""
    self._blocks.clear()


def _blocks(tokens: Sequence[int], salt: str) -> Iterator[tuple[int, int]]:
  """Yields the hashes of all whole blocks, the empty one first, and where each of them ends."""
  block = hash(salt)
  yield block, 0
  for end in range(_BLOCK, len(tokens) + 1, _BLOCK):
    block = hash((block, *tokens[end - _BLOCK : end]))
    yield block, end


class Fleet:
  """An `Engine` of several, made by `make_engines`.

  A request goes to the engine that holds the longest part of its tokens, unless that has much more
  to do than another. Where it goes changes nothing that it draws.

  Args:
    engines: The engines.
    give: Function `(params, version)` that gives new weights to all of them.
    slots: Number of rows of each.

  Attributes:
    limits: Largest sizes of requests and of all queues together.
  """

  def __init__(self, engines: Sequence[Engine], give: Callable[[Params, int], None], *, slots: int):
    self._engines, self._give = tuple(engines), give
    context = engines[0].limits.context
    self.limits = EngineLimits(context, sum(engine.limits.requests for engine in engines))
    self._slack = max(slots // 8, 1)
    self._lock = threading.Lock()
    self._open = [0] * len(engines)
    self._known = Whereabouts(2 * len(engines) * slots * -(-context // _BLOCK))

  def submit(self, request: Request, on_piece: Callable[[Piece], None] | None = None) -> Handle:
    """Accepts a request; see `Engine`."""
    with self._lock:
      least = min(range(len(self._open)), key=self._open.__getitem__)
      # A repeated request may keep its row for long: they are spread evenly.
      held = None if request.parts else self._known.find(request.tokens, request.cache_salt)
      chosen = least if held is None or self._open[held] > self._open[least] + self._slack else held
      if self._open[chosen] >= self._engines[chosen].limits.requests:
        chosen = least
      try:
        handle = self._engines[chosen].submit(request, on_piece)
      except QueueFull as error:
        most = self.limits.requests
        raise QueueFull(f"found {sum(self._open)} open requests, expected fewer than {most}; try again later") from error
      self._open[chosen] += 1
      self._known.note(request.tokens, request.cache_salt, chosen)
    handle.completion.add_done_callback(lambda future: self._ended(request, chosen, future))
    return handle

  def _ended(self, request: Request, engine: int, future: Any) -> None:
    completion: Decoded | None = None if future.exception() is not None else future.result()
    with self._lock:
      self._open[engine] -= 1
      if completion is not None:
        self._known.note([*request.tokens, *completion.tokens], request.cache_salt, engine)

  def update(self, params: Params, version: int) -> None:
    """Gives all engines new weights; see `Engine`."""
    self._give(params, version)
    with self._lock:
      self._known.clear()

  def pulse(self) -> Pulse:
    """Returns what the engines have done so far: sums, but the mean of their idle times."""
    pulses = [engine.pulse() for engine in self._engines]
    idle_s = sum(own.idle_s for own in pulses) / len(pulses)
    return Pulse(sum(own.open for own in pulses), sum(own.calls for own in pulses), idle_s, max(own.age_s for own in pulses))

  def close(self) -> None:
    """Aborts all requests and ends the loops."""
    for engine in self._engines:
      engine.close()


def make_engines(
  model: Model, params: Params, *, slots: int, max_requests: int, num_cores: int | None = None, **options: Any
) -> DecodingEngine | Fleet:
  """Makes an engine for each device, or for each group of devices that splits the model's heads.

  On a single CPU device it makes one for each core that has rows enough; see `num_twins`.

  Args:
    model: Model to decode with, on a mesh: rows are split over engines, and `tensor` within each.
    params: Weights on that mesh. Each engine gets all of them.
    slots: Number of rows of all engines together, rounded up to as many for each.
    max_requests: Largest number of open requests of all engines together, rounded up as well.
    num_cores: Number of cores of a CPU; None means those that this process may use.
    **options: Other arguments of `make_engine`.

  Raises:
    ValueError: If a setting is out of range. One line, which names it.
  """
  count = 1 if model.mesh is None else num_row_shards(model.mesh)
  if count == 1:
    return _on_one_device(model, params, slots, max_requests, num_cores or cores.num_cores(), **options)
  meshes, own_slots = engine_meshes(model.mesh), -(-slots // count)
  parts = _splitter(model, params, meshes)
  models = [make_model(model.config, mesh=mesh) for mesh in meshes]
  sizes = dict(slots=own_slots, max_requests=-(-max_requests // count))
  # Threads, because each engine compiles its own programs.
  with ThreadPoolExecutor(count) as threads:
    engines = list(threads.map(lambda own: make_engine(*own, **sizes, **options), zip(models, parts(params), strict=True)))

  def give(params: Params, version: int) -> None:
    for engine, own in zip(engines, parts(params), strict=True):
      engine.update(own, version)

  return Fleet(engines, give, slots=own_slots)


def _on_one_device(model: Model, params: Params, slots: int, max_requests: int, num_cores: int, **options: Any) -> DecodingEngine | Fleet:
  count = 1 if model.mesh is not None and model.mesh.size > 1 else num_twins(slots, platform_of(model.mesh), num_cores)
  if count == 1:
    return make_engine(model, params, slots=slots, max_requests=max_requests, **options)
  own_slots = -(-slots // count)
  twins = make_twins(model, params, count, slots=own_slots, max_requests=-(-max_requests // count), **options)

  def give(params: Params, version: int) -> None:
    weights = twins[0].lay_out(params)
    for twin in twins:
      twin.take(weights, version)

  return Fleet(twins, give, slots=own_slots)


def engine_meshes(mesh: Mesh) -> list[Mesh]:
  """Splits a mesh into those of the engines, each of a device or of a group that splits the heads.

  Raises:
    ValueError: If devices would do the same work.
  """
  if mesh.shape["context"] > 1:
    raise ValueError(f"mesh.context: found {mesh.shape['context']}, expected 1: an engine splits no prompts over devices")
  tensor = AXES.index("tensor")
  devices = np.moveaxis(mesh.devices, tensor, -1).reshape(-1, mesh.shape["tensor"])
  shape = [1] * len(AXES)
  shape[tensor] = mesh.shape["tensor"]
  return [Mesh(own.reshape(shape), AXES, axis_types=mesh.axis_types) for own in devices]


def _splitter(model: Model, params: Params, meshes: Sequence[Mesh]) -> Callable[[Params], list[Params]]:
  """Returns the function from weights on the whole mesh to those on the meshes of the engines."""
  rules = {axis: "tensor" if over == "tensor" else None for axis, over in RULES.items()}
  shardings = lambda mesh: param_shardings(mesh, model.logical_axes, params, rules=rules)
  of_whole, of_engines = shardings(model.mesh), [shardings(mesh) for mesh in meshes]
  gather = jax.jit(lambda params: params, out_shardings=of_whole)

  def part(x: jax.Array, sharding: jax.sharding.NamedSharding) -> jax.Array:
    held = {shard.device: shard.data for shard in x.addressable_shards}
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [held[device] for device in sharding.addressable_devices])

  def parts(params: Params) -> list[Params]:
    is_whole = lambda x, sharding: isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim)
    whole = params if all(jax.tree.leaves(jax.tree.map(is_whole, params, of_whole))) else gather(params)
    return [jax.tree.map(part, whole, own) for own in of_engines]

  return parts
