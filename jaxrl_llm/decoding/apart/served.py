"""The other side of a `RemoteEngine`: a process that draws for a learner with its own engine."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from jaxrl_llm.decoding.apart import wire
from jaxrl_llm.decoding.apart.remote import BEAT_S, ERRORS
from jaxrl_llm.decoding.apart.shared_weights import SharedWeights
from jaxrl_llm.decoding.apart.weights import HeldWeights, WeightsRefused, offers_of
from jaxrl_llm.decoding.engine import frames
from jaxrl_llm.decoding.engine.frames import Frame, WireError
from jaxrl_llm.decoding.engine.requests import Engine, Handle
from jaxrl_llm.messages import one_line

_LOOK_S = 0.1  # Time after which the thread that reads looks around.
_FLUSH_S = 5.0  # Time for the last messages.
_ABORT_S = 60.0  # Time for an engine to end aborted requests.


def serve(
  engine: Engine,
  connection: Connection,
  weights: HeldWeights | SharedWeights,
  *,
  timeout_s: float,
  leave: threading.Event | None = None,
  note: Callable[[str], None] = lambda line: None,
) -> str:
  """Draws for a learner until one of them ends it; no request is open afterwards.

  Args:
    engine: Engine that draws, a `Pulsing` one.
    connection: Connection to a `RemoteEngine`; closed in the end.
    weights: Weights that the engine has, for the learner to complete. They can be used for the next
      connection, so that only what has changed travels.
    timeout_s: Time of silence after which the learner is gone.
    leave: Event upon which this process leaves; the learner gives its requests to others.
    note: Function that gets lines for the log.

  Returns:
    "closed" if the learner has closed the engine, "left" if this process was told to leave, "lost"
    if the learner is gone.

  Raises:
    Exception: What broke the engine, after the learner has been told.
    WeightsRefused: If the learner's weights belong to another model, or arrived wrong twice.
  """
  return _Serving(engine, connection, weights, timeout_s, leave or threading.Event(), note).run()


class _Serving:
  def __init__(
    self, engine: Engine, connection: Connection, weights: HeldWeights | SharedWeights, timeout_s: float, leave: threading.Event,
    note: Callable[[str], None],
  ):  # fmt: skip
    self._engine, self._connection, self._weights, self._timeout_s = engine, connection, weights, timeout_s
    self._leave, self._note = leave, note
    self._outbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
    self._lock = threading.Lock()
    self._open: dict[int, Handle] = {}
    self._pictures = frames.LatestPictures()
    self._broken: BaseException | None = None
    self._began = engine.pulse()
    self._reading_since: float | None = None
    self._lacked: list[str] = []
    self._is_second = False
    self._sender = threading.Thread(target=self._send, name="served engine: sending", daemon=True)

  def run(self) -> str:
    """Answers the learner; see `serve`."""
    self._sender.start()
    end = "lost"
    try:
      end = self._answer()
      if end == "left":
        self._outbox.put(Frame("left", {"line": "it leaves"}))
      if self._broken is not None:
        self._outbox.put(Frame("broken", {"line": f"its engine has failed ({one_line(self._broken)})"}))
    except WeightsRefused as error:
      self._outbox.put(Frame("refused", {"line": str(error)}))
      raise
    except (EOFError, OSError, WireError, KeyError, TypeError, ValueError) as error:
      self._note(f"the learner is gone ({one_line(error)})")
    finally:
      self._abort_all(end)
      self._outbox.put(None)
      self._sender.join(_FLUSH_S)
      wire.hang_up(self._connection)
      self._sender.join()
      self._connection.close()
    if self._broken is not None:
      raise self._broken
    return end

  def _answer(self) -> str:
    heard = time.monotonic()
    while True:
      if self._broken is not None:
        return "lost"
      if self._leave.is_set():
        return "left"
      if not self._connection.poll(_LOOK_S):
        if time.monotonic() - heard > self._timeout_s:
          self._note(f"the learner has not been heard of for {self._timeout_s:g} s")
          return "lost"
        continue
      self._reading_since = time.monotonic()
      frame = wire.receive(self._connection)
      self._reading_since, fields = None, frame.fields
      if frame.kind == "request":
        self._submit(frame)
      elif frame.kind == "pictures":
        self._pictures.add(frames.pictures_of(frame))
      elif frame.kind == "abort":
        with self._lock:
          handle = self._open.get(fields["id"])
        if handle is not None:
          handle.abort()
      elif frame.kind == "offer":
        self._lacked, self._is_second = self._weights.lacking(offers_of(fields["leaves"])), False
        self._outbox.put(Frame("lacks", {"names": self._lacked}))
      elif frame.kind == "weights":
        self._weights.add(fields["name"], fields["start"], frame.arrays["data"])
      elif frame.kind == "commit":
        self._commit(int(fields["version"]))
      elif frame.kind == "close":
        return "closed"
      elif frame.kind != "beat":
        raise WireError(f"found a message {frame.kind[:40]!r}, which no learner sends")
      heard = time.monotonic()

  def _commit(self, version: int) -> None:
    wrong = self._weights.wrong(self._lacked)
    if not wrong:
      try:
        self._weights.give(self._engine, version)
      except Exception as error:
        self._broken = error
        return
      self._outbox.put(Frame("updated", {"version": version}))
      return
    line = f"{next(iter(wrong.values()))}; {len(wrong)} of {len(self._lacked)} weights arrived wrong"
    if self._is_second:
      raise WeightsRefused(f"{line}, for the second time")
    self._is_second = True
    self._note(line)
    self._outbox.put(Frame("again", {"names": list(wrong), "line": line}))

  def _submit(self, frame: Frame) -> None:
    number, request = int(frame.fields["id"]), frames.request_of(frame, self._pictures)
    if request.pictures is not None:
      self._pictures.add(request.pictures)
    pass_on = lambda piece: self._outbox.put(frames.piece_frame(number, piece))
    try:
      handle = self._engine.submit(request, pass_on if frame.fields["pieces"] else None)
    except Exception as error:
      self._fail(number, error)
      return
    with self._lock:
      self._open[number] = handle
    handle.completion.add_done_callback(partial(self._end, number))

  # Called by the engine's thread.

  def _end(self, number: int, future: "Future[Any]") -> None:
    with self._lock:
      self._open.pop(number, None)
    if (error := future.exception()) is not None:
      self._fail(number, error)
    else:
      self._outbox.put(frames.completion_frame(number, future.result()))

  def _fail(self, number: int, error: BaseException) -> None:
    kind = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), None)
    if kind is None:
      self._broken = error
    else:
      self._outbox.put(Frame("failed", {"id": number, "error": kind, "line": one_line(error, typed=False, limit=1000)}))

  def _abort_all(self, end: str) -> None:
    with self._lock:
      handles = list(self._open.values())
    for handle in handles:
      handle.abort()
    until = time.monotonic() + _ABORT_S
    for handle in handles:
      try:
        handle.completion.exception(max(until - time.monotonic(), 0))
      except TimeoutError:
        self._note(f"the engine has not ended its requests within {_ABORT_S:g} s ({end})")
        return

  # The sending thread.

  def _send(self) -> None:
    beaten = 0.0
    try:
      while True:
        try:
          frame = self._outbox.get(timeout=BEAT_S)
          if frame is None:
            return
          wire.send(self._connection, frame)
        except queue.Empty:
          pass
        if (now := time.monotonic()) - beaten >= BEAT_S:
          beaten = now
          wire.send(self._connection, self._beat())
        if (since := self._reading_since) is not None and now - since > self._timeout_s:
          wire.hang_up(self._connection)
    except (OSError, WireError) as error:
      self._note(f"nothing can be sent to the learner ({one_line(error)})")
      wire.hang_up(self._connection)

  def _beat(self) -> Frame:
    pulse = self._engine.pulse()
    calls, idle_s, age_s = (now - then for now, then in zip(pulse[1:], self._began[1:], strict=True))
    return Frame("beat", pulse._replace(calls=calls, idle_s=idle_s, age_s=age_s)._asdict())
