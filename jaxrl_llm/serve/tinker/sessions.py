"""Sessions of clients: what they hold on the server, and the outcomes of their calls.

One thread does the work of all training calls, in the order of their arrival. A session whose
client is gone ends, and everything that it held with it.
"""

import asyncio
import secrets
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxrl_llm.messages import one_line
from jaxrl_llm.serve.refusals import Refusal, busy
from jaxrl_llm.serve.tinker.learner import Learner, Trained
from jaxrl_llm.serve.tinker.sampler import Weights
from jaxrl_llm.types import Params

PATIENCE_S = 600.0
"""Time without a word of a client after which its session ends; it sends one every 10 seconds."""

_KEPT_S = 30.0  # Time for which an outcome is kept after it was fetched, should the answer be lost.
_MOST_SESSIONS, _MOST_OUTCOMES, _MOST_WAITING = 256, 8192, 1024
_SWEEP_S = 5.0


class Outcome(NamedTuple):
  """What became of a call.

  Attributes:
    value: JSON value of the answer; None for a message.
    message: Answer as a message of protocol buffers; None for JSON.
    refusal: Why there is no answer; None if there is one.
  """

  value: dict[str, Any] | None = None
  message: bytes | None = None
  refusal: Refusal | None = None


class Call:
  """A call whose outcome a client will fetch.

  Args:
    request_id: Id of the call.
    digest: Hash of what was asked, for a call that is sent again.
    abort: Function that ends the call soon; None if it cannot.
  """

  def __init__(self, request_id: str, digest: str = "", abort: Callable[[], None] | None = None):
    self.request_id, self.digest, self.abort = request_id, digest, abort
    self.outcome: Future[Outcome] = Future()
    self.outcome.set_running_or_notify_cancel()
    self.fetched_at: float | None = None


class Adapter:
  """An adapter that a client trains.

  Args:
    model_id: Id of the adapter.
    base: Name of its model.
    learner: Programs of its shape.
    trained: Weights and moments of the adapter.
    about: What describes its shape in a record.
  """

  def __init__(self, model_id: str, base: str, learner: Learner, trained: Trained, about: dict[str, Any]):
    self.model_id, self.base, self.learner, self.trained, self.about = model_id, base, learner, trained, about
    self.gradients: Params | None = None
    self.last_seq = -1
    self.published: Weights | None = None
    self.snapshots: list[str] = []

  def weights(self) -> Weights:
    """Returns the weights of now to draw with."""
    learner, weights = self.learner, self.trained.weights
    return Weights(lambda: learner.merged(weights), lambda ids: learner.score(weights, ids))


class SamplerRef(NamedTuple):
  """Weights that a client samples from.

  Attributes:
    base: Name of the model.
    path: Path of the checkpoint; None for the model itself, or weights without a name.
    weights: Function that returns the weights.
    number: Number of the sampler in its session.
  """

  base: str
  path: str | None
  weights: Callable[[], Weights]
  number: int


class ClientSession:
  """What a client holds.

  Args:
    session_id: Id, a random one that cannot be guessed.
    seen_at: Time of the client's last word, in seconds.
  """

  def __init__(self, session_id: str, seen_at: float):
    self.session_id, self.seen_at, self.is_over = session_id, seen_at, False
    self.adapters: dict[str, Adapter] = {}
    self.samplers: dict[str, SamplerRef] = {}
    self.calls: dict[str, Call] = {}


class Sessions:
  """All sessions, and the thread that trains.

  Args:
    patience_s: Time without a word of a client after which its session ends.
    clock: Function that returns the time in seconds; a test may pass its own.
  """

  def __init__(self, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic):
    self.clock = clock
    self._sessions: dict[str, ClientSession] = {}
    self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tinker learner")
    self._patience_s, self._sweeper = patience_s, None
    self._places = threading.BoundedSemaphore(_MOST_WAITING)

  def begin(self) -> ClientSession:
    """Begins a session.

    Raises:
      Refusal: If there are too many.
    """
    if self._sweeper is None:
      self._sweep()
    if len(self._sessions) >= _MOST_SESSIONS:
      raise busy(f"{_MOST_SESSIONS} sessions are open, expected fewer; close one")
    session = ClientSession(secrets.token_hex(16), self.clock())
    self._sessions[session.session_id] = session
    return session

  def of(self, some_id: Any, field: str) -> ClientSession:
    """Returns the session of an id, or of the id of something that it holds.

    Raises:
      Refusal: If there is none; 410 tells the SDK that it has ended.
    """
    session = self._sessions.get(some_id.partition(":")[0]) if isinstance(some_id, str) else None
    if session is None:
      status = 410 if field == "session_id" else 404
      raise Refusal(
        status, f"{field}: found no such id; its session has ended, or the server was restarted", field=field
      )
    session.seen_at = self.clock()
    return session

  def adapter(self, model_id: Any) -> tuple[ClientSession, Adapter]:
    """Returns an adapter and its session.

    Raises:
      Refusal: If there is none.
    """
    session = self.of(model_id, "model_id")
    if model_id not in session.adapters:
      raise Refusal(
        404, "model_id: found no such adapter; create one, or wait until it is created", field="model_id"
      )
    return session, session.adapters[model_id]

  def num_adapters(self) -> int:
    """Returns the number of adapters of all clients."""
    return sum(len(session.adapters) for session in self._sessions.values())

  def call(self, session: ClientSession, request_id: str, digest: str = "") -> tuple[Call, bool]:
    """Returns the call of an id, and whether it is new.

    Raises:
      Refusal: If the session has too many calls whose outcomes it has not fetched, or this id
        belongs to another call.
    """
    if (known := session.calls.get(request_id)) is not None:
      if known.digest != digest:
        raise Refusal(
          400,
          "seq_id: found the number of another call, expected one of its own; does another client use this id?",
          field="seq_id",
        )
      return known, False
    if len(session.calls) >= _MOST_OUTCOMES:
      raise busy(f"{_MOST_OUTCOMES} calls have outcomes that were not fetched, expected fewer")
    session.calls[request_id] = Call(request_id, digest)
    return session.calls[request_id], True

  def train(self, session: ClientSession, call: Call, work: Callable[[], Outcome]) -> None:
    """Has the thread that trains do the work of a call, after all that came before.

    Raises:
      Refusal: If too many calls wait. The call is then forgotten.
    """
    if not self._places.acquire(blocking=False):
      session.calls.pop(call.request_id, None)
      raise busy(f"{_MOST_WAITING} training calls are waiting, expected fewer; try again")

    def run() -> None:
      try:
        # A client that is gone has no use for it.
        outcome = (
          outcome_of(work) if not session.is_over else Outcome(refusal=Refusal(410, "the session has ended"))
        )
      finally:
        self._places.release()
      call.outcome.set_result(outcome)

    self._worker.submit(run)

  async def run(self, work: Callable[[], Any]) -> Any:
    """Has the thread that trains do something, and waits for it."""
    return await asyncio.wrap_future(self._worker.submit(work))

  def end(self, session: ClientSession) -> None:
    """Ends a session and frees what it holds."""
    self._sessions.pop(session.session_id, None)
    session.is_over = True
    for call in session.calls.values():
      if call.abort is not None and not call.outcome.done():
        call.abort()
    session.adapters, session.samplers, session.calls = {}, {}, {}

  def _sweep(self) -> None:
    now = self.clock()
    for session in list(self._sessions.values()):
      if now - session.seen_at > self._patience_s:
        self.end(session)
      old = [
        key
        for key, call in session.calls.items()
        if call.fetched_at is not None and now - call.fetched_at > _KEPT_S
      ]
      for key in old:
        del session.calls[key]
    self._sweeper = asyncio.get_running_loop().call_later(min(_SWEEP_S, self._patience_s / 2), self._sweep)

  def close(self) -> None:
    """Ends the thread that trains, and all sessions."""
    for session in list(self._sessions.values()):
      self.end(session)
    self._worker.shutdown(wait=True, cancel_futures=True)


def outcome_of(work: Callable[[], Outcome]) -> Outcome:
  """Does the work of a call; whatever goes wrong is the outcome of this call alone."""
  try:
    return work()
  except Refusal as refusal:
    return Outcome(refusal=refusal)
  except Exception as error:
    return Outcome(refusal=failure(error))


def failure(error: BaseException) -> Refusal:
  """Returns the refusal of a call that failed through no fault of its client, and logs why."""
  print(f"error: a call of the Tinker API: {one_line(error)}", file=sys.stderr, flush=True)
  return Refusal(500, "the service failed on this call; its log says why", kind="server_error")
