"""An engine in another process, as the learner sees it: requests go out, completions come back.

The messages of a connection arrive in the order of the calls: a request that is submitted after new
weights is drawn with these, or with later ones. See `served` for the other side.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple

from jaxrl_llm.decoding.apart import wire
from jaxrl_llm.decoding.apart.weights import Snapshot, pieces
from jaxrl_llm.decoding.engine import frames
from jaxrl_llm.decoding.engine.checks import check_request
from jaxrl_llm.decoding.engine.frames import Frame, WireError
from jaxrl_llm.decoding.engine.requests import Decoded, EngineLimits, Handle, Piece, Pulse, QueueFull, ReplayLost, Request
from jaxrl_llm.messages import one_line
from jaxrl_llm.types import Params

BEAT_S = 1.0
"""Time between two signs of life, in seconds."""

ERRORS = {"ValueError": ValueError, "FloatingPointError": FloatingPointError, "QueueFull": QueueFull, "ReplayLost": ReplayLost}
"""Errors of a single request by the names under which they travel."""

_CLOSING_S = 5.0  # Time for the completions of requests that `close` aborts.


class SamplerLost(Exception):
  """A remote engine disconnected, timed out, or violated the protocol. One line."""


class Moved(NamedTuple):
  """A finished move of weights.

  Attributes:
    seconds: Time from the first message to the answer that all checksums agree.
    num_bytes: Number of bytes of the weights that were sent.
  """

  seconds: float
  num_bytes: int


@dataclass(eq=False)
class _Open:
  request: Request
  on_piece: Callable[[Piece], None] | None
  future: "Future[Decoded]" = field(default_factory=Future)


class _Move(NamedTuple):
  snapshot: Snapshot
  moved: "Future[Moved]"


class RemoteEngine:
  """An `Engine` over a connection.

  Args:
    connection: Connection to a process that runs `serve`. It belongs to the engine.
    limits: Limits of the engine there.
    vocab_size: Number of ids of its model.
    slots: Number of its rows.
    timeout_s: Time of silence, or without a new token for open requests, after which it is lost.
    name: Name for messages.
    note: Function that gets lines for the log.
    on_lost: Function that gets the engine when it is lost, before its requests fail. It must return
      soon.

  Attributes:
    limits: Limits of the engine there.
    slots: Number of its rows.
    name: Name for messages.
    moved: The last finished move of weights; None before the first.

  Note:
    All requests that are open when the sampler is lost raise `SamplerLost`, and so do later calls.
  """

  def __init__(
    self, connection: Connection, limits: EngineLimits, *, vocab_size: int, slots: int, timeout_s: float, name: str = "sampler",
    note: Callable[[str], None] = lambda line: None, on_lost: "Callable[[RemoteEngine], None] | None" = None,
  ):  # fmt: skip
    self.limits, self.slots, self.name = limits, slots, name
    self.moved: Moved | None = None
    self._pulse = Pulse(0, -1, 0.0, 0.0)
    self._connection, self._vocab_size, self._timeout_s = connection, vocab_size, timeout_s
    self._note, self._on_lost = note, on_lost or (lambda engine: None)
    self._numbers, self._outbox, self._answers = itertools.count(), queue.SimpleQueue(), queue.SimpleQueue()
    self._lock = threading.Lock()
    self._open: dict[int, _Open] = {}
    self._pictures = frames.LatestPictures()
    self._lost: SamplerLost | None = None
    self._is_closing, self._ended, self._is_moving = False, threading.Event(), False
    self._version = -1
    self._heard = self._moved_on = time.monotonic()
    self._threads = [
      threading.Thread(target=target, name=f"remote engine: {what}", daemon=True)
      for what, target in (("sending", self._send), ("receiving", self._receive), ("watching", self._watch))
    ]
    for thread in self._threads:
      thread.start()

  def submit(self, request: Request, on_piece: Callable[[Piece], None] | None = None) -> Handle:
    """Accepts a request; see `Engine`.

    Raises:
      SamplerLost: If the sampler is lost.
    """
    check_request(request, vocab_size=self._vocab_size, context=self.limits.context)
    opened, number = _Open(request, on_piece), next(self._numbers)
    opened.future.set_running_or_notify_cancel()
    frame = frames.request_frame(number, request, pieces=on_piece is not None)
    with self._lock:
      self._refuse_if_ended()
      if len(self._open) >= self.limits.requests:
        raise QueueFull(f"found {len(self._open)} open requests, expected fewer than {self.limits.requests}; try again later")
      if not self._num_able():
        self._moved_on = time.monotonic()
      self._open[number] = opened
      if request.pictures is not None and self._pictures.add(request.pictures):
        self._outbox.put(frames.pictures_frame(request.pictures))
      self._outbox.put(frame)
    return Handle(opened.future, lambda: self._outbox.put(Frame("abort", {"id": number})))

  def update(self, params: Params, version: int) -> None:
    """Takes new weights, and sends them in the background; see `Engine`."""
    self.give(Snapshot(params, version))

  def give(self, snapshot: Snapshot) -> "Future[Moved]":
    """Sends weights in the background.

    Returns:
      Future that is done when the sampler has them. It raises what `SamplerLost` says.

    Raises:
      SamplerLost: If the sampler is lost.
    """
    move = _Move(snapshot, Future())
    move.moved.set_running_or_notify_cancel()
    with self._lock:
      self._refuse_if_ended()
      self._outbox.put(move)
    return move.moved

  def pulse(self) -> Pulse:
    """Returns what the sampler has done since it joined, by its last sign of life."""
    return self._pulse

  def close(self) -> None:
    """Aborts all requests and ends the connection."""
    with self._lock:
      is_first, self._is_closing = not self._is_closing, True
      self._outbox.put(Frame("close"))
    if is_first and threading.current_thread() not in self._threads:
      self._ended.wait(_CLOSING_S)
    self._end(SamplerLost(f"{self.name}: the engine is closed"))

  @property
  def is_lost(self) -> bool:
    """Whether the sampler is lost, or the engine closed."""
    return self._lost is not None

  @property
  def why_lost(self) -> str:
    """Why the sampler is lost; empty if it is not."""
    return "" if self._lost is None else str(self._lost)

  def _refuse_if_ended(self) -> None:
    if self._is_closing:
      raise RuntimeError("the engine is closed")
    if self._lost is not None:
      raise SamplerLost(str(self._lost))

  def _num_able(self) -> int:
    """Returns the number of open requests that need no weights that are still to come."""
    needed = lambda request: max([request.oldest, *(version for version, _ in request.parts)])
    return sum(needed(opened.request) <= max(self._version, 0) for opened in self._open.values())

  def _end(self, error: SamplerLost) -> None:
    """Ends the connection and all that waits for it, once."""
    with self._lock:
      if self._lost is not None:
        return
      self._lost, opened, is_closing = error, list(self._open.values()), self._is_closing
      self._open.clear()
      self._outbox.put(None)
      self._answers.put(None)
    wire.hang_up(self._connection)
    self._ended.set()
    if not is_closing:
      self._note(str(error))
      self._on_lost(self)
    for own in opened:
      if is_closing:
        own.future.set_result(Decoded([], [], "aborted", 0, 0, max(self._version, 0)))
      else:
        own.future.set_exception(SamplerLost(str(error)))

  # The sending thread.

  def _send(self) -> None:
    try:
      while self._lost is None:
        try:
          item = self._outbox.get(timeout=BEAT_S)
        except queue.Empty:
          item = Frame("beat")
        if isinstance(item, _Move):
          self._move(item)
        elif item is not None:
          wire.send(self._connection, item)
    except SamplerLost as error:
      self._end(error)
    except (OSError, WireError) as error:
      self._end(SamplerLost(f"{self.name}: the connection is broken ({one_line(error, typed=False)})"))
    except Exception as error:
      self._end(SamplerLost(f"{self.name}: its weights cannot be read ({one_line(error)})"))
    with contextlib.suppress(queue.Empty):
      while True:
        item = self._outbox.get_nowait()
        if isinstance(item, _Move):
          item.moved.set_exception(SamplerLost(self.why_lost))

  def _move(self, move: _Move) -> None:
    self._is_moving, self._moved_on = True, time.monotonic()
    try:
      moved = self._send_weights(move.snapshot)
    except BaseException as error:
      move.moved.set_exception(error if isinstance(error, SamplerLost) else SamplerLost(f"{self.name}: {one_line(error)}"))
      raise
    finally:
      self._is_moving = False
    move.moved.set_result(moved)

  def _send_weights(self, snapshot: Snapshot) -> Moved:
    start, num_bytes = time.monotonic(), 0
    while (offer := snapshot.offer(BEAT_S)) is None:
      self._wait_here()
    leaves = [[own.name, own.dtype, list(own.shape), list(own.sums)] for own in offer]
    wire.send(self._connection, Frame("offer", {"version": snapshot.version, "leaves": leaves}))
    answer = self._answer("lacks")
    for attempt in range(2):
      for name in answer.fields["names"]:
        while (x := snapshot.leaf(name, BEAT_S)) is None:
          self._wait_here()
        for position, data in pieces(x):
          wire.send(self._connection, Frame("weights", {"name": name, "start": position}, {"data": data}))
          num_bytes, self._moved_on = num_bytes + len(data), time.monotonic()
      wire.send(self._connection, Frame("commit", {"version": snapshot.version}))
      answer = self._answer("updated" if attempt else "updated or again")
      if answer.kind == "updated":
        break
      self._note(f"{self.name}: {answer.fields['line']}; the weights are sent once more")
    with self._lock:
      self._version, self._moved_on = snapshot.version, time.monotonic()
    self.moved = Moved(time.monotonic() - start, num_bytes)
    return self.moved

  def _answer(self, expected: str) -> Frame:
    while True:
      try:
        answer = self._answers.get(timeout=BEAT_S)
      except queue.Empty:
        self._send_beat()
        continue
      if answer is None:
        raise SamplerLost(self.why_lost)
      if answer.kind not in expected.split():
        raise SamplerLost(f"{self.name}: found the answer {answer.kind!r}, expected {expected}")
      return answer

  def _wait_here(self) -> None:
    """Waits for something on this side, which is no fault of the sampler."""
    self._send_beat()
    self._moved_on = time.monotonic()

  def _send_beat(self) -> None:
    if self._lost is not None:
      raise SamplerLost(self.why_lost)
    wire.send(self._connection, Frame("beat"))

  # The receiving thread.

  def _receive(self) -> None:
    try:
      while self._lost is None:
        frame = wire.receive(self._connection)
        self._heard = time.monotonic()
        self._take(frame)
    except SamplerLost as error:
      self._end(error)
    except (EOFError, OSError) as error:
      self._end(SamplerLost(f"{self.name}: the connection is broken ({one_line(error)})"))
    except (KeyError, TypeError, ValueError, WireError) as error:
      self._end(SamplerLost(f"{self.name}: {one_line(error)}"))
    except Exception as error:  # A fault of a callback, which must not leave others waiting.
      self._end(SamplerLost(f"{self.name}: the thread that receives has failed ({one_line(error)})"))

  def _take(self, frame: Frame) -> None:
    fields = frame.fields
    if frame.kind == "beat":
      pulse = Pulse(int(fields["open"]), int(fields["calls"]), float(fields["idle_s"]), float(fields["age_s"]))
      if pulse.calls != self._pulse.calls:
        self._moved_on = time.monotonic()
      self._pulse = pulse
    elif frame.kind == "piece":
      self._moved_on = time.monotonic()
      with self._lock:
        opened = self._open.get(fields["id"])
      if opened is not None and opened.on_piece is not None:
        self._hand_over(fields["id"], opened, frames.piece_of(frame))
    elif frame.kind in ("done", "failed"):
      self._moved_on = time.monotonic()
      outcome = frames.completion_of(frame) if frame.kind == "done" else None
      with self._lock:
        opened = self._open.pop(fields["id"], None)
      if opened is not None and outcome is not None:
        opened.future.set_result(outcome)
      elif opened is not None:
        opened.future.set_exception(ERRORS[fields["error"]](str(fields["line"])))
    elif frame.kind in ("lacks", "again", "updated"):
      self._answers.put(frame)
    elif frame.kind in ("refused", "broken", "left"):
      raise SamplerLost(f"{self.name}: {fields['line']}")
    else:
      raise SamplerLost(f"{self.name}: found a message {frame.kind[:40]!r}, which no sampler sends")

  def _hand_over(self, number: int, opened: _Open, piece: Piece) -> None:
    try:
      opened.on_piece(piece)
    except Exception as error:  # A fault of one caller, which must not reach the others.
      with self._lock:
        self._open.pop(number, None)
        self._outbox.put(Frame("abort", {"id": number}))
      opened.future.set_exception(error)

  # The watching thread.

  def _watch(self) -> None:
    while not self._ended.wait(min(BEAT_S, self._timeout_s / 4)):
      now = time.monotonic()
      with self._lock:
        able = self._num_able()
        is_stuck = (able or self._is_moving) and now - self._moved_on > self._timeout_s
      if now - self._heard > self._timeout_s:
        self._end(SamplerLost(f"{self.name}: not heard of for {self._timeout_s:g} s"))
      elif is_stuck:
        what = "new weights not taken" if self._is_moving else "no new token"
        self._end(SamplerLost(f"{self.name}: {what} for {self._timeout_s:g} s, with {able} open requests"))
    for thread in self._threads[:2]:
      if thread is not threading.current_thread():
        thread.join()
    self._connection.close()
