"""Conversations of a batch in progress, from what earlier steps drew of them to their handover.

A player makes its turns with them, whichever way it finds out what follows a turn:

  ask -> the engine draws -> take -> the player adds a reply, and asks again, or -> end
   └ the cut needs no more of it ┘-> parked, until the cut is known and shortens it
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int16

from jaxrl_llm.decoding.engine import requests
from jaxrl_llm.decoding.engine.requests import Engine, Handle, Piece
from jaxrl_llm.messages import one_line
from jaxrl_llm.rollouts.cutoff import Cutoff, cut
from jaxrl_llm.rollouts.jobs import PATIENCE_S, Conversation, Job, as_engine_error, reason_of, request_of, turn_seed, with_routes
from jaxrl_llm.text_types import Turn
from jaxrl_llm.types import StopReason

_NEW = Conversation(0, (), (), (), (), (), StopReason.UNFINISHED)


@dataclass(eq=False)
class Draft:
  """A conversation in progress; see `Conversation`.

  Attributes:
    begun: The conversation as earlier steps left it.
    routes: Routes of the tokens that were fed in this step; None if the engine records none.
    drawn: Number of tokens that were drawn in this step.
    flying: Number of tokens of the request in progress that have been drawn.
    is_open: Whether a turn is being drawn.
    handle: Handle of the request that draws it.
    ended: Whether it has finished, or the cut or `Drafts.close` leaves nothing to do.
    done: The conversation as it finished; None if it has not.
  """

  sequence: int
  begun: Conversation = _NEW
  prompt: list[int] = field(default_factory=list)
  tokens: list[int] = field(default_factory=list)
  logprobs: list[float] = field(default_factory=list)
  written: list[bool] = field(default_factory=list)
  turns: list[Turn] = field(default_factory=list)
  failed: tuple[str, str] | None = None
  cached: int = 0
  computed: int = 0
  routes: Int16[np.ndarray, "S L K"] | None = None
  drawn: int = 0
  flying: int = 0
  is_open: bool = False
  handle: Handle | None = None
  ended: bool = False
  done: Conversation | None = None

  def append(self, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
    """Adds ids that the policy wrote, with their log-probabilities, or a reply, which has none."""
    self.tokens += ids
    self.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
    self.written += [logprobs is not None] * len(ids)

  def conversation(self, reason: StopReason, text: str | None = None) -> Conversation:
    """Returns the conversation as this step has got with it."""
    parts = map(list, (self.prompt, self.tokens, self.logprobs, self.written))
    counts = dict(cached_tokens=self.cached, computed_tokens=self.computed, routes=with_routes(self.begun.routes, self.routes))
    return Conversation(self.sequence, *parts, tuple(self.turns), reason, self.failed, text=text, **counts)

  def latest(self) -> Conversation:
    """Returns a conversation that goes on, as far as this or an earlier step has got with it."""
    latest = self.conversation(StopReason.UNFINISHED)
    if len(latest.tokens) >= len(self.begun.tokens):
      return latest
    counts = dict(cached_tokens=self.cached, computed_tokens=self.computed, discarded_tokens=0)
    return self.begun._replace(sequence=self.sequence, **counts)


class Drafts:
  """The conversations of a batch in progress: a `Playing`. Any thread may call its methods.

  Args:
    engine: Engine that draws.
    job: The batch.
    ended: Function that is told of each conversation that has ended, by itself or by the cut.
    closed: Function called by `close`.
    waits: Whether to wait for the environment's reply even if the cut leaves nothing to do.

  Attributes:
    all: The drafts, in the order of their sequences. Those that an earlier step ended have ended.
    job: The batch.
    over: Event that is set once nothing is drawn any more, because of the end or an error.
  """

  def __init__(
    self, engine: Engine, job: Job, *, ended: Callable[[Draft], None] = lambda draft: None, closed: Callable[[], None] = lambda: None,
    waits: bool = False,
  ):  # fmt: skip
    self._engine, self.job, self._ended, self._closed, self._waits = engine, job, ended, closed, waits
    self._lock, self.over = threading.Lock(), threading.Event()
    self._finished: queue.SimpleQueue[Conversation | BaseException] = queue.SimpleQueue()
    self._cutoff = Cutoff(len(job.seeds), group_size=job.group_size, enough=job.enough or len(job.examples))
    self.all = [Draft(i, begun) for i, begun in enumerate(job.begun or [_NEW] * len(job.seeds))]
    self._kept = dict(enumerate(self.all))  # What has not been handed over.
    self._num_to_yield = len(self.all)
    for draft in self.all:
      if draft.begun.reason != StopReason.UNFINISHED:
        self._note(draft, draft.begun._replace(sequence=draft.sequence, cached_tokens=0, computed_tokens=0, discarded_tokens=0))
    self.settle()

  def __iter__(self) -> Iterator[list[Conversation]]:
    while self._num_to_yield:
      arrived: list[Conversation | BaseException] = []
      with contextlib.suppress(queue.Empty):
        arrived.append(self._finished.get(timeout=PATIENCE_S))
        while True:
          arrived.append(self._finished.get_nowait())
      for item in arrived:
        if isinstance(item, BaseException):
          self.close()
          raise as_engine_error(item) from item
      self._num_to_yield -= len(arrived)
      yield arrived

  def ask(self, draft: Draft, room: int, *, own: int = 0, like: int | None = None) -> Handle | None:
    """Asks for the rest of a turn; returns None if the conversation has ended.

    Args:
      draft: Conversation.
      room: Budget of the rest, in tokens.
      own: Number of the last tokens that belong to the turn already.
      like: Sequence whose seed draws the turn; None for the conversation's own.

    Raises:
      QueueFull: If the engine has too many requests. It may be asked again.
    """
    job = self.job
    with self._lock:
      draft.is_open, draft.handle, draft.flying = True, None, 0
    if self.park(draft):
      return None
    seed = job.seeds[draft.sequence if like is None else like]
    turn = dict(seed=turn_seed(seed, len(draft.turns)), salt=job.salt, owner=str(draft.sequence), drawn=own)
    if job.pictures:
      turn["pictures"] = job.pictures[draft.sequence // job.group_size]
    request = request_of(job.draws, [*draft.prompt, *draft.tokens], room, **turn)

    def note(piece: Piece) -> None:
      draft.flying += len(piece.tokens)
      bound, handle = self._cutoff.bound, draft.handle
      if bound is not None and draft.drawn + draft.flying >= bound and handle is not None:
        handle.abort()

    # Only a cut reads the pieces, which may come from another machine.
    draft.handle = handle = self._engine.submit(request, None if job.enough is None else note)
    if draft.ended:  # Closed meanwhile.
      handle.abort()
    return handle

  def take(self, draft: Draft, completion: "Future[requests.Decoded]") -> StopReason | None:
    """Adds what was drawn of a turn.

    Returns:
      Why the turn has ended: `ABORTED` if the policy failed, as `draft.failed` says. None if the
      conversation has ended.

    Raises:
      Exception: What broke the engine.
    """
    try:
      drawn = completion.result()
    except FloatingPointError as error:
      with self._lock:
        draft.failed = draft.failed or ("not_finite", f"the policy: {one_line(error)}")
        # The turn is lost, but the clock of the cut has counted its tokens.
        draft.drawn, draft.flying, draft.is_open = draft.drawn + draft.flying, 0, False
      return StopReason.ABORTED
    is_aborted = drawn.reason == "aborted"
    with self._lock:
      draft.append(drawn.tokens, drawn.logprobs)
      draft.cached, draft.computed = draft.cached + drawn.cached_tokens, draft.computed + drawn.computed_tokens
      draft.drawn, draft.flying, draft.is_open = draft.drawn + len(drawn.tokens), 0, False
      if drawn.tokens and self.job.draws.routes is not None:
        draft.routes = drawn.routes
    # A turn that ends by itself just where the cut is may be the last one.
    if self.park(draft, beyond=0 if is_aborted else 1):
      return None
    if is_aborted:
      raise RuntimeError("the decoding engine was closed while conversations were drawn")
    return reason_of(drawn, self.job.draws)

  def park(self, draft: Draft, *, beyond: int = 0) -> bool:
    """Ends a conversation that has drawn all that a cut can need of it.

    Args:
      draft: Conversation, of which nothing is being drawn.
      beyond: Number of tokens that it must have drawn beyond that.

    Returns:
      Whether it has ended, this way or before.
    """
    with self._lock:
      bound = self._cutoff.bound
      if draft.ended or bound is None or draft.drawn < bound + beyond:
        return draft.ended
      draft.ended = True
      self._cutoff.park(draft.sequence)
    self.settle()
    self._ended(draft)
    return True

  def end(self, draft: Draft, reason: StopReason, text: str | None = None) -> None:
    """Notes that a conversation has finished.

    Args:
      draft: Conversation; one with `failed` has failed.
      reason: Why it has ended, unless it failed.
      text: Text of a response that is no conversation; see `Conversation`.
    """
    with self._lock:
      if draft.ended:
        return
      # A reply behind which nothing was drawn is left out.
      size = next((i + 1 for i in reversed(range(len(draft.written))) if draft.written[i]), 0)
      for part in (draft.tokens, draft.logprobs, draft.written):
        del part[size:]
      self._note(draft, draft.conversation(StopReason.ABORTED if draft.failed else reason, text))
    self.settle()
    self._ended(draft)

  def _note(self, draft: Draft, done: Conversation) -> None:
    """Notes how a conversation finished, under the lock."""
    draft.ended, draft.done = True, done
    if self.job.enough is not None:
      self._cutoff.end(draft.sequence, draft.drawn)
      return
    # Nothing is cut, and looking at all others each time would take a tenth of a batch's time.
    del self._kept[draft.sequence]
    self._finished.put(done)
    if not self._kept:
      self.over.set()

  def settle(self) -> None:
    """Hands over what no cut can reach any more, and at the cut all the rest."""
    if self.job.enough is None:
      return
    late: list[Handle] = []
    parked: list[Draft] = []
    with self._lock:
      if self.over.is_set():
        return
      bound = self._cutoff.bound
      for draft in self.all:
        if draft.ended or bound is None:
          continue
        if not draft.is_open and draft.drawn > bound and not self._waits:
          draft.ended = True  # Whatever the environment replies.
          self._cutoff.park(draft.sequence)
          parked.append(draft)
        elif draft.handle is not None and draft.flying and draft.drawn + draft.flying >= bound:
          late.append(draft.handle)
      certain, is_decided = self._cutoff.certain([draft.drawn + draft.flying for draft in self.all]), self._cutoff.is_decided
      for draft in list(self._kept.values()):
        is_whole = draft.done is not None and draft.drawn <= certain
        if is_whole or is_decided:
          self._finished.put(draft.done if is_whole else cut(draft.latest(), sum(draft.begun.written) + bound))
          del self._kept[draft.sequence]
      if is_decided:
        self.over.set()
    for handle in late:
      handle.abort()
    for draft in parked:
      self._ended(draft)

  def wait(self) -> None:
    """Waits until nothing is drawn any more."""
    self.over.wait()

  def fail(self, error: BaseException) -> None:
    """Raises an error in the caller that waits for the conversations."""
    self._finished.put(error)
    self.over.set()

  def close(self) -> None:
    """Gives up the conversations that have not ended; may be called more than once."""
    with self._lock:
      given_up = [draft for draft in self.all if not draft.ended]
      for draft in given_up:
        draft.ended = True
    for draft in given_up:
      if draft.handle is not None:
        draft.handle.abort()
    self.over.set()
    self._closed()
