"""A changing number of engines that work as one: they join, take requests, and may be lost.

Requests wait here until an engine has room for them, so that a newcomer finds work at once. Those
of a lost engine are drawn again by others, from their beginning. `fleet` is the fixed relative,
whose engines are in one process.
"""

import contextlib
import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxrl_llm.decoding.apart.remote import RemoteEngine, SamplerLost
from jaxrl_llm.decoding.apart.weights import Snapshot, leaving
from jaxrl_llm.decoding.engine.checks import check_request
from jaxrl_llm.decoding.engine.requests import Decoded, EngineLimits, Handle, Piece, Pulse, QueueFull, ReplayLost, Request
from jaxrl_llm.types import Params

_ROUNDS = 2  # Open requests per row of an engine, beyond which others wait here.
_HOMES = 1 << 16  # Number of conversations whose engine is remembered.
_TRIES = 2  # Number of versions that a newcomer gets before it takes requests in any case.
_ANY_ID = 1 << 31
_NO_PULSE = Pulse(0, 0, 0.0, 0.0)


@dataclass(eq=False)
class _Open:
  """An open request.

  Attributes:
    request: What the caller asked for.
    on_piece: Function that gets the tokens as they are drawn.
    arrival: Number of the request.
    future: Future of the completion, which the caller has.
    member: Engine that draws it; None while it waits.
    handle: What that engine returned.
    attempt: Number of the attempt, from 0.
    passed: Tokens that the caller has got.
    behind: Number of tokens of this attempt that the caller has got before; None once they differ.
    is_aborted: Whether the caller has aborted it.
  """

  request: Request
  on_piece: Callable[[Piece], None] | None
  arrival: int
  future: "Future[Decoded]" = field(default_factory=Future)
  member: "_Member | None" = None
  handle: Handle | None = None
  attempt: int = 0
  passed: list[int] = field(default_factory=list)
  behind: int | None = 0
  is_aborted: bool = False


@dataclass(eq=False)
class _Member:
  """An engine of the crew.

  Attributes:
    engine: The engine.
    open: Number of its open requests.
    seen: Pulse of the engine when it was last asked for.
  """

  engine: RemoteEngine
  open: int = 0
  seen: Pulse = _NO_PULSE


class Bystander:
  """The `Engine` of those processes of a learner that have no crew: all but process 0.

  They take part in the move of weights from the devices to the host of process 0.

  Args:
    limits: Limits of the crew.
    dtype: Dtype to which weights are cast before they travel; None keeps theirs.
  """

  def __init__(self, limits: EngineLimits, dtype: str | None):
    self.limits, self._dtype = limits, dtype

  def submit(self, request: Request, on_piece: Callable[[Piece], None] | None = None) -> Handle:
    """Refuses all requests, which are those of process 0."""
    raise RuntimeError("requests are those of process 0")

  def update(self, params: Params, version: int) -> None:
    """Takes part in the move of new weights."""
    leaving(params, self._dtype)

  def close(self) -> None:
    """Does nothing."""


class Crew:
  """An `Engine` of those that have joined.

  - A request goes to the engine that has drawn others of its owner and salt, as long as that lives;
    else to the one with the fewest open requests per row. Where it goes changes nothing that it
    draws.
  - It waits while there is no engine, while all are busy, and for the weights that it needs. One
    with `Request.parts` also waits until an engine has a row for it.
  - The open requests of a lost engine are drawn again from their beginning. Its pieces reach
    `on_piece` from where they had got to, if the tokens are the same as before. Once one differs,
    because newer weights draw it, no more pieces come, and the completion alone counts.

  Args:
    limits: Largest sizes of requests, and number of those that are open, waiting ones included.
    vocab_size: Number of ids, to refuse others at once; None leaves that to the engines.
    dtype: Dtype to which weights are cast before they travel; None keeps theirs.
    note: Function that gets lines for the log.

  Attributes:
    limits: Largest sizes of requests, and number of those that are open.
    redone: Number of requests that were given to another engine.
    lost: Number of engines that were lost.
  """

  def __init__(
    self, limits: EngineLimits, *, vocab_size: int | None = None, dtype: str | None = None, note: Callable[[str], None] = lambda line: None
  ):
    self.limits, self.redone, self.lost = limits, 0, 0
    self._vocab_size, self._dtype, self._note = vocab_size or _ANY_ID, dtype, note
    self._changed = threading.Condition(threading.RLock())
    self._members: dict[RemoteEngine, _Member] = {}
    self._homes: OrderedDict[tuple[str, str], _Member] = OrderedDict()
    self._waiting: list[tuple[int, int, _Open]] = []
    self._arrivals, self._num_open, self._is_closed = itertools.count(), 0, False
    self._snapshot: Snapshot | None = None
    self._on_close = contextlib.ExitStack()

  # Engines.

  def join(self, engine: RemoteEngine) -> None:
    """Gives an engine the newest weights, and then requests.

    Args:
      engine: Newcomer, which now belongs to the crew.

    Raises:
      SamplerLost: If it is lost before it has the weights.
    """
    given = None
    for attempt in itertools.count():
      with self._changed:
        newest = self._snapshot
        if newest is given or attempt == _TRIES:
          if newest is not given:
            engine.give(newest)
          self._refuse_if_closed()
          if engine.is_lost:
            raise SamplerLost(engine.why_lost)
          self._members[engine] = _Member(engine)
          self._changed.notify_all()
          break
      engine.give(newest).result()
      given = newest
    self._dispatch()

  def lose(self, engine: RemoteEngine) -> None:
    """Gives an engine no more requests; those that it has are drawn again when they fail."""
    with self._changed:
      if self._members.pop(engine, None) is not None and not self._is_closed:
        self.lost += 1
      self._changed.notify_all()

  def wait_for(self, count: int, seconds: float) -> int:
    """Waits for `count` engines or the timeout; returns the number of engines."""
    with self._changed:
      self._changed.wait_for(lambda: len(self._members) >= count or self._is_closed, seconds)
      return len(self._members)

  # Requests.

  def submit(self, request: Request, on_piece: Callable[[Piece], None] | None = None) -> Handle:
    """Accepts a request; see `Engine`. Its future may raise `ReplayLost`."""
    check_request(request, vocab_size=self._vocab_size, context=self.limits.context)
    opened = _Open(request, on_piece, next(self._arrivals))
    opened.future.set_running_or_notify_cancel()
    with self._changed:
      self._refuse_if_closed()
      if self._num_open >= self.limits.requests:
        raise QueueFull(f"found {self._num_open} open requests, expected fewer than {self.limits.requests}; try again later")
      self._num_open += 1
      self._wait(opened)
    self._dispatch()
    return Handle(opened.future, partial(self._abort, opened))

  def _refuse_if_closed(self) -> None:
    if self._is_closed:
      raise RuntimeError("the engine is closed")

  def _wait(self, opened: _Open) -> None:
    opened.member = opened.handle = None
    heapq.heappush(self._waiting, (opened.request.order, opened.arrival, opened))

  def _abort(self, opened: _Open) -> None:
    with self._changed:
      opened.is_aborted, handle = True, opened.handle
      is_waiting = opened.member is None
    if handle is not None:
      handle.abort()
    elif is_waiting:
      self._dispatch()

  def _dispatch(self) -> None:
    """Gives engines the requests that wait for them, in their order."""
    sent, ended = [], []
    with self._changed:
      version, left = -1 if self._snapshot is None else self._snapshot.version, []
      (waiting, self._waiting), rounds = (sorted(self._waiting), []), _ROUNDS
      for item in waiting:
        opened = item[2]
        request = opened.request
        if opened.is_aborted:
          ended.append((opened, self._aborted()))
        elif opened.attempt and request.parts and request.parts[0][0] < version:
          ended.append((opened, ReplayLost(f"parts: found version {request.parts[0][0]}, expected {version}: its sampler was lost")))
        elif self._snapshot is None or (request.parts[0][0] if request.parts else request.oldest) > version:
          left.append(item)
        else:
          # A repeated request may keep its row for long, and no other may wait behind it.
          rounds = 1 if request.parts else rounds
          outcome = self._send(opened, rounds)
          if outcome is None:
            left.append(item)
          elif isinstance(outcome, Exception):
            ended.append((opened, outcome))
          else:
            sent.append((opened, outcome, opened.attempt))
      self._waiting = left + self._waiting
      heapq.heapify(self._waiting)
    # Outside the lock, because callbacks of callers may run now.
    for opened, outcome in ended:
      self._finish(opened, outcome)
    for opened, member, attempt in sent:
      opened.handle.completion.add_done_callback(partial(self._ended, opened, member, attempt))
      if opened.is_aborted:
        opened.handle.abort()

  def _send(self, opened: _Open, rounds: int) -> "_Member | Exception | None":
    """Gives a request to an engine, and returns it; None if none has room, or the error.

    Args:
      opened: Request.
      rounds: Open requests per row of an engine, beyond which it has no room.
    """
    request, home = opened.request, (opened.request.owner, opened.request.salt)
    at_home = self._homes.get(home) if request.owner and not request.parts else None
    if at_home is not None and at_home.engine in self._members:
      candidates = [at_home] if at_home.open < at_home.engine.limits.requests else []
    else:
      fits = lambda member: member.open < min(rounds * member.engine.slots, member.engine.limits.requests)
      candidates = sorted(filter(fits, self._members.values()), key=lambda member: member.open / member.engine.slots)
    on_piece = None if opened.on_piece is None else partial(self._pass_on, opened, opened.attempt)
    for member in candidates:
      try:
        opened.handle = member.engine.submit(request, on_piece)
      except QueueFull:
        continue
      except ValueError as error:
        return error
      except Exception as error:  # It is lost or broken.
        self._note(f"a sampler takes no requests: {error}")
        self.lose(member.engine)
        continue
      opened.member = member
      member.open += 1
      if request.owner:
        self._homes[home] = member
        self._homes.move_to_end(home)
        if len(self._homes) > _HOMES:
          self._homes.popitem(last=False)
      return member
    return None

  def _pass_on(self, opened: _Open, attempt: int, piece: Piece) -> None:
    """Forwards only tokens that the caller has not received yet."""
    with self._changed:
      if attempt != opened.attempt or opened.behind is None:
        return
      known = opened.passed[opened.behind : opened.behind + len(piece.tokens)]
      if piece.tokens[: len(known)] != known:
        opened.behind = None
        return
      opened.behind += len(piece.tokens)
      opened.passed += piece.tokens[len(known) :]
    if len(known) < len(piece.tokens):
      opened.on_piece(piece._replace(tokens=piece.tokens[len(known) :], logprobs=piece.logprobs[len(known) :]))

  def _ended(self, opened: _Open, member: _Member, attempt: int, future: "Future[Decoded]") -> None:
    error = future.exception()
    with self._changed:
      member.open -= 1
      if is_lost := isinstance(error, SamplerLost) and not self._is_closed:
        self.lose(member.engine)
        opened.attempt, opened.behind = attempt + 1, 0
        self.redone += not opened.is_aborted
        self._wait(opened)
    if not is_lost:
      if error is None and opened.behind is None:
        self._note("a request was drawn again with newer weights: its last pieces were kept back")
      self._finish(opened, error if error is not None else future.result())
    self._dispatch()

  def _aborted(self) -> Decoded:
    return Decoded([], [], "aborted", 0, 0, 0 if self._snapshot is None else self._snapshot.version)

  def _finish(self, opened: _Open, outcome: Decoded | BaseException) -> None:
    with self._changed:
      self._num_open -= 1
    if isinstance(outcome, BaseException):
      opened.future.set_exception(outcome)
    else:
      opened.future.set_result(outcome)

  # Weights, and the end.

  def update(self, params: Params, version: int) -> None:
    """Gives engines new weights in the background; see `Engine`."""
    snapshot = Snapshot(params, version, dtype=self._dtype, earlier=self._snapshot)
    with self._changed:
      self._refuse_if_closed()
      self._snapshot = snapshot
      for engine in list(self._members):
        try:
          engine.give(snapshot)
        except SamplerLost:
          self.lose(engine)
    self._dispatch()

  def metrics(self) -> dict[str, float]:
    """Returns numbers about the engines; fractions are those of the time since the last call."""
    with self._changed:
      idle, moves = [], [engine.moved for engine in self._members if engine.moved is not None]
      for member in self._members.values():
        pulse, before = member.engine.pulse(), member.seen
        spent = pulse.age_s - before.age_s
        idle.append(min((pulse.idle_s - before.idle_s) / spent, 1.0) if spent > 0 else 0.0)
        member.seen = pulse
      return {
        "samplers/alive": float(len(self._members)),
        "samplers/lost": float(self.lost),
        "samplers/redone": float(self.redone),
        "samplers/waiting": float(len(self._waiting)),
        "samplers/idle_mean": sum(idle) / len(idle) if idle else 0.0,
        "samplers/idle_max": max(idle, default=0.0),
        "samplers/weights_s": max((move.seconds for move in moves), default=0.0),
        "samplers/weights_bytes": float(sum(move.num_bytes for move in moves)),
      }

  def on_close(self, callback: Callable[[], None]) -> None:
    """Has a function called first when the crew is closed."""
    self._on_close.callback(callback)

  def __enter__(self) -> "Crew":
    """Returns itself."""
    return self

  def __exit__(self, *error: Any) -> None:
    """Closes the crew."""
    self.close()

  def close(self) -> None:
    """Aborts all requests, and closes all engines."""
    self._on_close.close()
    with self._changed:
      self._is_closed = True
      engines, self._members = list(self._members), {}
      waiting, self._waiting = self._waiting, []
      self._changed.notify_all()
    for _, _, opened in waiting:
      self._finish(opened, self._aborted())
    closing = [threading.Thread(target=engine.close, daemon=True) for engine in engines]
    for thread in closing:
      thread.start()
    for thread in closing:
      thread.join()
