"""Conversations with an environment over the decoding engine, each at its own pace.

A turn is a request with the whole conversation so far, of which the engine computes what is new.
Once it is drawn, a thread steps the environment and asks for the next turn. More threads start when
steps are slower than a thread switch:

  engine -> turn -> thread: step of the environment -> request of the next turn -> engine
                    └ over its timeout: the conversation has failed, and another thread takes over

No conversation waits for another one, and none for the caller. One that an earlier step has begun
first repeats the steps of its environment, whose replies must be the same.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_llm.decoding.engine import requests
from jaxrl_llm.decoding.engine.requests import Engine, Handle, Piece
from jaxrl_llm.messages import one_line
from jaxrl_llm.rollouts.conversations import Rules, after_turn, checked, raised, timed_out
from jaxrl_llm.rollouts.cutting import Cutting, cut
from jaxrl_llm.rollouts.environments import Reply
from jaxrl_llm.rollouts.playing import PATIENCE_S, Conversation, Job, Player, reason_of, request_of, turn_seed, with_routes
from jaxrl_llm.tasks.image_prompts import prompt_ids
from jaxrl_llm.text_types import Completion, Tokenizer, Turn
from jaxrl_llm.types import StopReason

_QUICK_S = 2e-2
"""Time that a step may take before other threads join in, in seconds."""


@dataclass(eq=False)
class _Talk:
  """A conversation in progress; see `Conversation`.

  Attributes:
    example: Task row.
    state: State of the environment.
    opened: Index of the first token of the current turn.
    before: Number of tokens that the policy had written before this step.
    drawn: Number of tokens that it has drawn in this step.
    flying: Number of tokens of the request in progress that have been drawn.
    said: The turn that the environment is replying to.
    handle: Handle of the request that draws the current turn.
    began: Time at which the environment's current step began; None if none runs.
    repeats: Whether the environment has yet to repeat the steps of the turns so far.
    holds: Whether it counts among those that are in progress at a time.
    ended: Whether it has finished, or the cut leaves nothing to do.
    done: The conversation as it finished; None if it has not.
    routes: Routes of the tokens that were fed in this step; None if the engine records none.
    earlier: Routes of those that were fed before.
  """

  sequence: int
  example: Mapping[str, Any]
  prompt: list[int]
  state: Any = None
  tokens: list[int] = field(default_factory=list)
  logprobs: list[float] = field(default_factory=list)
  written: list[bool] = field(default_factory=list)
  turns: tuple[Turn, ...] = ()
  cached: int = 0
  computed: int = 0
  opened: int = 0
  before: int = 0
  drawn: int = 0
  flying: int = 0
  said: str = ""
  handle: Handle | None = None
  began: float | None = None
  repeats: bool = False
  holds: bool = False
  ended: bool = False
  done: Conversation | None = None
  routes: np.ndarray | None = None
  earlier: np.ndarray | None = None

  def conversation(self, reason: StopReason, failed: tuple[str, str] | None = None) -> Conversation:
    """Returns the conversation as it is."""
    parts = (self.tokens, self.logprobs, self.written)
    counts = dict(cached_tokens=self.cached, computed_tokens=self.computed, routes=with_routes(self.earlier, self.routes))
    return Conversation(self.sequence, self.prompt, *map(list, parts), self.turns, reason, failed, **counts)


class Talks(Player):
  """A batch of conversations that are being played: a `Playing`, begun at once.

  Args:
    engine: Engine that draws the turns.
    job: Conversations to play.
    rules: Rules of the conversations.
    tokenizer: The task's tokenizer.
  """

  def __init__(self, engine: Engine, job: Job, *, rules: Rules, tokenizer: Tokenizer):
    size = len(job.seeds)
    super().__init__(size)
    self._engine, self._job, self._rules, self._tokenizer = engine, job, rules, tokenizer
    self._lock = threading.Lock()
    self._drawn: queue.SimpleQueue[tuple[_Talk, Future | None] | None] = queue.SimpleQueue()
    self._cutting = Cutting(size, group_size=job.group_size, enough=job.enough or len(job.examples))
    # Then no step of this batch may still run beside those of the next one.
    self._counts_steps = rules.environment.concurrency is not None
    prompts = [prompt_ids(example, tokenizer) for example in job.examples]
    self._talks = [_Talk(i, job.examples[i // job.group_size], prompts[i // job.group_size]) for i in range(size)]
    for talk, begun in zip(self._talks, job.begun, strict=False):
      self._go_on(talk, begun)
    for talk in self._talks:
      if not talk.ended and not talk.repeats:
        talk.state = rules.environment.reset(talk.example)
    self._kept = list(self._talks)  # What has not been handed over.
    self._waiting = deque(talk for talk in self._talks if not talk.ended)
    # One thread is enough while steps are quick: more would only take turns.
    self._num_spare = min(rules.num_threads, size) - 1
    self._start(self._work)
    self._start(self._watch)
    try:
      self._settle()
      for _ in range(job.at_once or size):
        self._begin()
    except Exception as error:
      self._fail(error)

  def _go_on(self, talk: _Talk, begun: Conversation) -> None:
    """Takes up a conversation that an earlier step has begun."""
    talk.tokens, talk.logprobs, talk.written, talk.turns = list(begun.tokens), list(begun.logprobs), list(begun.written), begun.turns
    talk.before, talk.repeats, talk.earlier = sum(talk.written), bool(talk.turns), begun.routes
    is_read = [i for i, own in enumerate(talk.written) if not own]
    # After a turn's last token comes its reply, however short.
    talk.opened = max([0, *(i + 1 for i in is_read[-1:]), *(turn.end + 1 for turn in talk.turns[-1:])])
    if begun.reason != StopReason.UNFINISHED:
      talk.ended, talk.done = True, begun._replace(sequence=talk.sequence, cached_tokens=0, computed_tokens=0, discarded_tokens=0)
      self._cutting.end(talk.sequence, 0)

  def close(self) -> None:
    """Gives up the conversations that have not finished."""
    with self._lock:
      for talk in self._talks:
        if not talk.ended:
          talk.ended = True
          if talk.handle is not None:
            talk.handle.abort()
    self._end()

  def _start(self, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="conversations", daemon=True).start()

  def _join_in(self) -> None:
    """Starts the threads that have waited for a step that is not quick."""
    with self._lock:
      count, self._num_spare = self._num_spare, 0
    for _ in range(count):
      self._start(self._work)

  def _fail(self, error: BaseException) -> None:
    """Raises an error in the caller that waits for the conversations."""
    self._finished.put(error)
    self._end()

  def _end(self) -> None:
    self._over.set()
    self._drawn.put(None)  # Each thread passes it on.

  def _begin(self) -> None:
    """Asks for the first turn of the next conversation, if there is one that needs a turn."""
    while True:
      with self._lock:
        talk = self._waiting.popleft() if self._waiting else None
      if talk is None:
        return
      if talk.ended:
        continue
      talk.holds = True
      if talk.repeats:
        self._drawn.put((talk, None))
        return
      if self._ask(talk):
        return
      talk.holds = False
      self._park(talk)

  def _make_room(self, talk: _Talk) -> None:
    """Begins another conversation in place of one that needs no row for now, once."""
    with self._lock:
      held, talk.holds = talk.holds, False
    if held:
      self._begin()

  def _ask(self, talk: _Talk) -> bool:
    """Asks for the rest of the current turn; returns whether the cut may need any of it."""
    draws, rules, bound = self._job.draws, self._rules, self._cutting.bound
    if bound is not None and talk.drawn >= bound:
      return False
    room, own = draws.max_new_tokens - len(talk.tokens), len(talk.tokens) - talk.opened
    request = request_of(
      draws,
      [*talk.prompt, *talk.tokens],
      room if rules.max_turn_tokens is None else min(room, rules.max_turn_tokens - own),
      seed=turn_seed(self._job.seeds[talk.sequence], len(talk.turns)),
      salt=self._job.salt,
      owner=str(talk.sequence),
      drawn=own,
    )

    def note(piece: Piece) -> None:
      talk.flying += len(piece.tokens)
      bound, handle = self._cutting.bound, talk.handle
      if bound is not None and talk.drawn + talk.flying >= bound and handle is not None:
        handle.abort()

    talk.handle, talk.flying = None, 0
    talk.handle = handle = self._engine.submit(request, note)
    # Called in the engine's thread, which must not be held up.
    handle.completion.add_done_callback(lambda future: self._drawn.put((talk, future)))
    return True

  def _work(self) -> None:
    """Continues conversations whose turns are drawn."""
    while (item := self._drawn.get()) is not None:
      talk, future = item
      if talk.ended:
        continue
      try:
        is_late = self._repeat(talk) if future is None else self._continue(talk, future)
      # Any failure must wake the caller.
      except BaseException as error:
        self._fail(error)
        return
      if is_late:
        return  # Another thread has replaced this one.
    self._drawn.put(None)

  def _step(self, talk: _Talk, step: Callable[[], tuple[Any, Reply]]) -> tuple[Reply, tuple[str, str] | None] | None:
    """Lets the environment reply; returns None if it exceeded its timeout."""
    talk.began = began = time.monotonic()
    reply, trouble = Reply(), None
    try:
      state, reply = step()
      reply, trouble = checked(reply)
    # Environments are foreign code: any exception fails only their own sample.
    except Exception as error:
      state, reply, trouble = talk.state, Reply(), raised(error)
    with self._lock:
      if talk.began != began:
        return None
      talk.began, talk.state = None, state
    if self._num_spare and time.monotonic() - began > _QUICK_S:
      self._join_in()
    return reply, trouble

  def _repeat(self, talk: _Talk) -> bool:
    """Puts an environment where the turns so far have left it; returns whether it was late."""
    environment, start = self._rules.environment, 0
    stepped = self._step(talk, lambda: (environment.reset(talk.example), Reply()))
    for number, turn in enumerate(talk.turns):
      if stepped is None:
        return True
      if stepped[1] is not None:
        break
      while not talk.written[start]:
        start += 1
      ids = tuple(talk.tokens[start : turn.end + 1])
      stepped = self._step(talk, lambda ids=ids, text=turn.text: environment.step(talk.state, Completion(text, ids, len(ids), True)))
      start = turn.end + 1
      if stepped is not None and stepped[1] is None and not _is_same(stepped[0], turn):
        line = f"asked again, it replied to turn {number + 1} in another way: {one_line(repr(stepped[0].text))[:80]}"
        stepped = Reply(), ("rewritten", f"the environment: {line}")
    if stepped is None:
      return True
    talk.repeats = False
    if stepped[1] is not None:
      self._finish(talk, StopReason.ABORTED, stepped[1])
    elif not self._ask(talk):
      self._park(talk)
    return False

  def _continue(self, talk: _Talk, future: "Future[requests.Completion]") -> bool:
    """Takes a turn; returns whether the environment exceeded its timeout."""
    try:
      drawn = future.result()
    except FloatingPointError as error:
      with self._lock:
        talk.drawn, talk.flying = talk.drawn + talk.flying, 0  # The clock has seen them.
      self._finish(talk, StopReason.ABORTED, ("not_finite", f"the policy: {one_line(error)}"))
      return False
    draws, rules = self._job.draws, self._rules
    with self._lock:
      talk.tokens += drawn.tokens
      talk.logprobs += drawn.logprobs
      talk.written += [True] * len(drawn.tokens)
      talk.cached, talk.computed = talk.cached + drawn.cached_tokens, talk.computed + drawn.computed_tokens
      talk.drawn, talk.flying = talk.drawn + len(drawn.tokens), 0
      if drawn.tokens and self._job.draws.routes is not None:
        talk.routes = drawn.routes
      bound = self._cutting.bound
    if bound is not None and talk.drawn >= bound + (drawn.reason != "aborted"):
      self._park(talk)  # Behind the cut.
      return False
    if drawn.reason == "aborted":
      if talk.ended:
        return False
      raise RuntimeError("the decoding engine was closed while conversations were drawn")
    reason = reason_of(drawn, draws)
    ids = tuple(talk.tokens[talk.opened :])
    said = Completion(self._tokenizer.decode(ids), ids, len(ids), reason != StopReason.LENGTH)
    reply, trouble = Reply(), None
    talk.said = said.text
    if said.stopped:
      stepped = self._step(talk, lambda: rules.environment.step(talk.state, said))
      if stepped is None:
        return True
      reply, trouble = stepped
      if talk.ended:
        return False
    talk.turns += (Turn(said.text, reply.text, reply.reward, len(talk.tokens) - 1),)
    if trouble is not None:
      self._finish(talk, StopReason.ABORTED, trouble)
    elif not said.stopped:
      self._finish(talk, reason)
    else:
      follows = after_turn(
        reply, reason, rules, self._tokenizer, turns=len(talk.turns), length=len(talk.tokens), budget=draws.max_new_tokens
      )
      if isinstance(follows, StopReason):
        self._finish(talk, follows)
      else:
        talk.tokens += follows
        talk.logprobs += [0.0] * len(follows)
        talk.written += [False] * len(follows)
        talk.opened = len(talk.tokens)
        if not self._ask(talk):
          self._park(talk)
    return False

  def _watch(self) -> None:
    """Gives up conversations whose environment exceeds its timeout.

    A thread cannot be killed, so a call that never returns occupies one until the process exits.
    The policy's programs run in the sandbox, which can be killed.
    """
    try:
      while not self._over.wait(min(PATIENCE_S, self._rules.timeout_s / 4)):
        for talk in self._talks:
          began = talk.began
          if began is not None:
            self._check(talk, began)
        if self._cutting.bound is not None:
          self._settle()  # What has begun just as the bound became known.
    except BaseException as error:
      self._fail(error)

  def _check(self, talk: _Talk, began: float) -> None:
    """Gives up a conversation if its environment has not replied for so long that it is late."""
    seconds = time.monotonic() - began
    if seconds > _QUICK_S:
      self._join_in()
    if seconds > PATIENCE_S:
      self._make_room(talk)
    if seconds <= self._rules.timeout_s:
      return
    with self._lock:
      if talk.began != began:
        return
      talk.began = None
    self._start(self._work)
    if not talk.repeats:
      talk.turns += (Turn(talk.said, "", 0.0, len(talk.tokens) - 1),)
    self._finish(talk, StopReason.ABORTED, timed_out(self._rules.timeout_s))

  def _finish(self, talk: _Talk, reason: StopReason, failed: tuple[str, str] | None = None) -> None:
    """Notes that a conversation has finished."""
    if failed is not None:  # A reply behind which nothing was drawn.
      size = max((i + 1 for i, own in enumerate(talk.written) if own), default=0)
      talk.tokens, talk.logprobs, talk.written = talk.tokens[:size], talk.logprobs[:size], talk.written[:size]
    done = talk.conversation(reason, failed)
    with self._lock:
      if talk.ended:
        return
      talk.ended, talk.done = True, done
      if self._job.enough is None:
        # Nothing is cut, and looking at all others each time would take a tenth of a batch's time.
        self._kept.remove(talk)
        is_last = not self._kept
      else:
        self._cutting.end(talk.sequence, talk.drawn)
    if self._job.enough is not None:
      self._settle()
    else:
      self._finished.put(done)
      if is_last:
        self._end()
    self._make_room(talk)

  def _park(self, talk: _Talk) -> None:
    """Notes that a conversation is to be cut."""
    with self._lock:
      if talk.ended:
        return
      talk.ended = True
      self._cutting.park(talk.sequence)
    self._settle()
    self._make_room(talk)

  def _settle(self) -> None:
    """Hands over what no cut can reach any more, and at the cut all the rest."""
    handed: list[Conversation] = []
    parked: list[_Talk] = []
    with self._lock:
      if self._over.is_set():
        return
      bound, kept = self._cutting.bound, []
      for talk in self._talks:
        if talk.ended or bound is None:
          continue
        if talk.began is not None and not talk.repeats and talk.drawn > bound and not self._counts_steps:
          talk.ended = True  # Whatever the environment replies.
          self._cutting.park(talk.sequence)
          parked.append(talk)
        elif talk.handle is not None and talk.flying and talk.drawn + talk.flying >= bound:
          talk.handle.abort()
      certain, is_decided = self._cutting.certain([talk.drawn + talk.flying for talk in self._talks]), self._cutting.is_decided
      for talk in self._kept:
        if talk.done is not None and talk.drawn <= certain:
          handed.append(talk.done)
        elif is_decided:
          handed.append(cut(talk.conversation(StopReason.UNFINISHED), talk.before + bound))
        else:
          kept.append(talk)
      self._kept = kept
    for done in handed:
      self._finished.put(done)
    if is_decided:
      self._end()
    for talk in parked:
      self._make_room(talk)


def _is_same(reply: Reply, turn: Turn) -> bool:
  """Returns whether an environment has replied to a turn as it did before."""
  text = tuple(reply.text) if isinstance(reply.text, list) else reply.text
  return (text, reply.reward, reply.done) == (turn.reply, turn.reward, False)
