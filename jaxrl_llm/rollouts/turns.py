"""Conversations with an environment over the decoding engine, each at its own pace.

A turn is a request with the whole conversation so far, of which the engine computes what is new.
Once it is drawn, one of a few threads steps the environment and asks for the next turn:

  engine -> turn -> thread: step of the environment -> request of the next turn -> engine
                    └ over its timeout: the conversation has failed, and another thread takes over

No conversation waits for another one, and none for the caller.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.engine import requests
from jaxrl_llm.engine.requests import Engine, Handle
from jaxrl_llm.messages import one_line
from jaxrl_llm.rollouts.conversations import Rules, after_turn, checked, raised, timed_out
from jaxrl_llm.rollouts.environments import Reply
from jaxrl_llm.rollouts.playing import PATIENCE_S, Conversation, Job, Player, turn_seed
from jaxrl_llm.tasks.image_prompts import prompt_ids
from jaxrl_llm.text_types import Completion, Tokenizer, Turn
from jaxrl_llm.types import StopReason


@dataclass(eq=False)
class _Talk:
  """A conversation in progress; see `Conversation`.

  Attributes:
    state: State of the environment.
    said: The turn that the environment is replying to.
    handle: Handle of the request that draws the current turn.
    began: Time at which the environment's current step began; None if none runs.
    holds: Whether it counts among those that are in progress at a time.
    ended: Whether it has finished.
  """

  sequence: int
  prompt: list[int]
  state: Any
  tokens: list[int] = field(default_factory=list)
  logprobs: list[float] = field(default_factory=list)
  written: list[bool] = field(default_factory=list)
  turns: tuple[Turn, ...] = ()
  cached: int = 0
  computed: int = 0
  said: str = ""
  handle: Handle | None = None
  began: float | None = None
  holds: bool = False
  ended: bool = False


class Talks(Player):
  """A batch of conversations that are being played: a `Playing`, begun at once.

  Args:
    engine: Engine that draws the turns.
    job: Conversations to play.
    rules: Rules of the conversations.
    tokenizer: The task's tokenizer.
  """

  def __init__(self, engine: Engine, job: Job, *, rules: Rules, tokenizer: Tokenizer):
    super().__init__(len(job.seeds))
    self._engine, self._job, self._rules, self._tokenizer = engine, job, rules, tokenizer
    self._lock = threading.Lock()
    self._drawn: queue.SimpleQueue[tuple[_Talk, Future] | None] = queue.SimpleQueue()
    prompts = [prompt_ids(example, tokenizer) for example in job.examples]
    states = [rules.environment.reset(job.examples[i // job.group_size]) for i in range(len(job.seeds))]
    self._talks = [_Talk(i, prompts[i // job.group_size], state) for i, state in enumerate(states)]
    self._num_left = len(self._talks)
    self._waiting = deque(self._talks)
    for _ in range(min(rules.num_threads, len(self._talks))):
      self._start(self._work)
    self._start(self._watch)
    try:
      for _ in range(job.at_once or len(self._talks)):
        self._begin()
    except Exception as error:
      self._fail(error)

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

  def _fail(self, error: BaseException) -> None:
    """Raises an error in the caller that waits for the conversations."""
    self._finished.put(error)
    self._end()

  def _end(self) -> None:
    self._over.set()
    self._drawn.put(None)  # Each thread passes it on.

  def _begin(self) -> None:
    """Asks for the first turn of the next conversation, if there is one."""
    with self._lock:
      talk = self._waiting.popleft() if self._waiting else None
    if talk is not None and not talk.ended:
      talk.holds = True
      self._ask(talk)

  def _make_room(self, talk: _Talk) -> None:
    """Begins another conversation in place of one that needs no row for now, once."""
    with self._lock:
      held, talk.holds = talk.holds, False
    if held:
      self._begin()

  def _ask(self, talk: _Talk) -> None:
    """Asks for the next turn of a conversation."""
    draws, rules = self._job.draws, self._rules
    room = draws.max_new_tokens - len(talk.tokens)
    request = requests.Request(
      [*talk.prompt, *talk.tokens],
      room if rules.max_turn_tokens is None else min(room, rules.max_turn_tokens),
      temperature=draws.temperature,
      top_k=draws.top_k,
      top_p=draws.top_p,
      stop_ids=draws.stop_ids,
      stops=draws.stops,
      seed=turn_seed(self._job.seeds[talk.sequence], len(talk.turns)),
      salt=self._job.salt,
    )
    talk.handle = self._engine.submit(request)
    # Called in the engine's thread, which must not be held up.
    talk.handle.completion.add_done_callback(lambda future: self._drawn.put((talk, future)))

  def _work(self) -> None:
    """Continues conversations whose turns are drawn."""
    while (item := self._drawn.get()) is not None:
      talk, future = item
      if talk.ended:
        continue
      try:
        is_late = self._continue(talk, future)
      # Whatever it is, the caller must not wait for ever.
      except BaseException as error:
        self._fail(error)
        return
      if is_late:
        return  # Another thread has replaced this one.
    self._drawn.put(None)

  def _continue(self, talk: _Talk, future: "Future[requests.Completion]") -> bool:
    """Takes a turn; returns whether the environment exceeded its timeout."""
    try:
      drawn = future.result()
    except FloatingPointError as error:
      self._finish(talk, StopReason.ABORTED, ("not_finite", f"the policy: {one_line(error)}"))
      return False
    if drawn.reason == "aborted":
      if talk.ended:
        return False
      raise RuntimeError("the decoding engine was closed while conversations were drawn")
    draws, rules = self._job.draws, self._rules
    talk.tokens += drawn.tokens
    talk.logprobs += drawn.logprobs
    talk.written += [True] * len(drawn.tokens)
    talk.cached, talk.computed = talk.cached + drawn.cached_tokens, talk.computed + drawn.computed_tokens
    reason = StopReason.LENGTH
    if drawn.reason == "stop":
      reason = StopReason.TOKEN if drawn.tokens[-1] in draws.stop_ids else StopReason.STRING
    ids = tuple(drawn.tokens)
    said = Completion(self._tokenizer.decode(ids), ids, len(ids), reason != StopReason.LENGTH)
    reply, trouble = Reply(), None
    talk.said = said.text
    if said.stopped:
      talk.began = time.monotonic()
      try:
        talk.state, reply = rules.environment.step(talk.state, said)
        reply, trouble = checked(reply)
      # Environments are foreign code: any exception fails only their own sample.
      except Exception as error:
        reply, trouble = Reply(), raised(error)
      with self._lock:
        if talk.ended:
          return talk.began is None
        talk.began = None
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
        self._ask(talk)
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
            self._check(talk, time.monotonic() - began)
    except BaseException as error:
      self._fail(error)

  def _check(self, talk: _Talk, seconds: float) -> None:
    """Gives up a conversation if its environment has not replied for so long that it is late."""
    if seconds > PATIENCE_S:
      self._make_room(talk)
    if seconds <= self._rules.timeout_s:
      return
    with self._lock:
      if talk.ended or talk.began is None:
        return
      talk.ended, talk.began = True, None
    talk.turns += (Turn(talk.said, "", 0.0, len(talk.tokens) - 1),)
    self._start(self._work)
    self._hand_over(talk, StopReason.ABORTED, timed_out(self._rules.timeout_s))

  def _finish(self, talk: _Talk, reason: StopReason, failed: tuple[str, str] | None = None) -> None:
    with self._lock:
      if talk.ended:
        return
      talk.ended = True
    self._hand_over(talk, reason, failed)

  def _hand_over(self, talk: _Talk, reason: StopReason, failed: tuple[str, str] | None) -> None:
    """Hands a conversation over that has finished."""
    done = Conversation(
      talk.sequence, talk.prompt, talk.tokens, talk.logprobs, talk.written, talk.turns, reason, failed, talk.cached, talk.computed
    )
    self._finished.put(done)
    with self._lock:
      self._num_left -= 1
      is_last = not self._num_left
    if is_last:
      self._end()
    else:
      self._make_room(talk)
