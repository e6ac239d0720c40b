"""Several engines with the same weights that work as one.

The device of a CPU has several cores, and one engine keeps one of them busy: several share it.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrl_llm.decoding.engine.loop import DecodingEngine
from jaxrl_llm.decoding.engine.make import make_engine, make_twins
from jaxrl_llm.decoding.engine.programs import num_twins
from jaxrl_llm.decoding.engine.requests import Decoded, Engine, EngineCounts, Handle, Piece, Pulse, QueueFull, Request
from jaxrl_llm.devices import cores
from jaxrl_llm.devices.mesh import platform_of
from jaxrl_llm.models import Model
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
    prepare: Function that compiles what a first request with a grammar needs; None if nothing.

  Attributes:
    limits: Largest sizes of requests and of all queues together.
  """

  def __init__(
    self, engines: Sequence[Engine], give: Callable[[Params, int], None], *, slots: int, prepare: Callable[[], None] | None = None
  ):
    self._engines, self._give, self._prepare = tuple(engines), give, prepare
    context = engines[0].limits.context
    self.limits = engines[0].limits._replace(requests=sum(engine.limits.requests for engine in engines))
    self._slack = max(slots // 8, 1)
    self._lock = threading.Lock()
    self._open = [0] * len(engines)
    self._known = Whereabouts(2 * len(engines) * slots * -(-context // _BLOCK))

  def submit(self, request: Request, on_piece: Callable[[Piece], None] | None = None) -> Handle:
    """Accepts a request; see `Engine`."""
    if request.grammar is not None and self._prepare is not None:
      self._prepare()  # Other requests must not wait for it.
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

  def counts(self) -> EngineCounts:
    """Returns the requests and tokens of all engines together; see `Counting`."""
    counts = [engine.counts() for engine in self._engines]
    ended = {reason: sum(own.ended[reason] for own in counts) for reason in counts[0].ended}
    sums = {name: sum(getattr(own, name) for own in counts) for name in EngineCounts._fields if name != "ended"}
    return EngineCounts(**sums, ended=ended)

  def close(self) -> None:
    """Aborts all requests and ends the loops."""
    for engine in self._engines:
      engine.close()


def make_engines(
  model: Model, params: Params, *, slots: int, max_requests: int, num_cores: int | None = None, **options: Any
) -> DecodingEngine | Fleet:
  """Makes an engine; on a single CPU device, one for each core with enough rows, see `num_twins`.

  Args:
    model: Model to decode with.
    params: Weights.
    slots: Number of rows of all engines together, rounded up to as many for each.
    max_requests: Largest number of open requests of all engines together, rounded up as well.
    num_cores: Number of cores of a CPU; None means those that this process may use.
    **options: Other arguments of `make_engine`.

  Raises:
    ValueError: If a setting is out of range. One line, which names it.
  """
  is_spread = model.mesh is not None and model.mesh.size > 1
  count = 1 if is_spread else num_twins(slots, platform_of(model.mesh), num_cores or cores.num_cores())
  if count == 1:
    return make_engine(model, params, slots=slots, max_requests=max_requests, **options)
  own_slots = -(-slots // count)
  twins = make_twins(model, params, count, slots=own_slots, max_requests=-(-max_requests // count), **options)

  def give(params: Params, version: int) -> None:
    weights = twins[0].lay_out(params)
    for twin in twins:
      twin.take(weights, version)

  return Fleet(twins, give, slots=own_slots, prepare=twins[0].prepare_grammars)
