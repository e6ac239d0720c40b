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
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.decoding.engine.requests import Engine
from jaxrl_llm.messages import one_line
from jaxrl_llm.pretrained.pictures import PictureConfig
from jaxrl_llm.rollouts.drafts import Draft, Drafts
from jaxrl_llm.rollouts.environments import Reply
from jaxrl_llm.rollouts.jobs import PATIENCE_S, Conversation, Job
from jaxrl_llm.rollouts.rules import Rules, after_turn, checked, raised, timed_out
from jaxrl_llm.tasks.image_prompts import prompt_ids
from jaxrl_llm.text_types import Completion, Tokenizer, Turn
from jaxrl_llm.types import StopReason

_QUICK_S = 2e-2
"""Time that a step may take before other threads join in, in seconds."""


@dataclass(eq=False)
class _Conversation:
  """A conversation in progress, with its environment.

  Attributes:
    draft: What was said.
    example: Task row.
    state: State of the environment.
    opened: Index of the first token of the current turn.
    said: The turn that the environment is replying to.
    began: Time at which the environment's current step began; None if none runs.
    repeats: Whether the environment has yet to repeat the steps of the turns so far.
    holds: Whether it counts among those that are in progress at a time.
  """

  draft: Draft
  example: Mapping[str, Any]
  state: Any = None
  opened: int = 0
  said: str = ""
  began: float | None = None
  repeats: bool = False
  holds: bool = False


def play_turns(engine: Engine, job: Job, *, rules: Rules, tokenizer: Tokenizer, pictures: PictureConfig | None = None) -> Drafts:
  """Begins all conversations of a batch.

  Args:
    engine: Engine that draws the turns.
    job: Conversations to play.
    rules: Rules of the conversations.
    tokenizer: The task's tokenizer.
    pictures: Settings of the checkpoint's pictures; None for a policy that reads text alone.
  """
  return _Turns(engine, job, rules, tokenizer, pictures).drafts


class _Turns:
  """The conversations of a batch with their environments, and the threads that step these."""

  def __init__(self, engine: Engine, job: Job, rules: Rules, tokenizer: Tokenizer, pictures: PictureConfig | None):
    self._job, self._rules, self._tokenizer = job, rules, tokenizer
    self._lock = threading.Lock()
    self._drawn: queue.SimpleQueue[tuple[_Conversation, Future | None] | None] = queue.SimpleQueue()
    # With a limit on its steps, none of this batch may still run beside those of the next one.
    waits = rules.environment.concurrency is not None
    self.drafts = Drafts(engine, job, ended=lambda draft: self._make_room(self._conversations[draft.sequence]), waits=waits)
    self._conversations = [_Conversation(draft, job.examples[draft.sequence // job.group_size]) for draft in self.drafts.all]
    prompts = [prompt_ids(example, tokenizer, pictures) for example in job.examples]
    for conversation in self._conversations:
      conversation.draft.prompt = prompts[conversation.draft.sequence // job.group_size]
      self._go_on(conversation, conversation.draft.begun)
      if not conversation.draft.ended and not conversation.repeats:
        conversation.state = rules.environment.reset(conversation.example)
    self._waiting = deque(self._conversations)
    # One thread is enough while steps are quick: more would only take turns.
    self._num_spare = min(rules.num_threads, len(self._conversations)) - 1
    self._start(self._work)
    self._start(self._watch)
    try:
      for _ in range(job.at_once or len(self._conversations)):
        self._begin()
    except Exception as error:
      self.drafts.fail(error)

  def _go_on(self, conversation: _Conversation, begun: Conversation) -> None:
    """Takes up a conversation where an earlier step has left it."""
    draft, conversation.repeats = conversation.draft, bool(begun.turns)
    draft.tokens, draft.logprobs, draft.written, draft.turns = map(list, (begun.tokens, begun.logprobs, begun.written, begun.turns))
    is_read = [i for i, own in enumerate(draft.written) if not own]
    # After a turn's last token comes its reply, however short.
    conversation.opened = max([0, *(i + 1 for i in is_read[-1:]), *(turn.end + 1 for turn in draft.turns[-1:])])

  def _start(self, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="conversations", daemon=True).start()

  def _join_in(self) -> None:
    """Starts the threads that have waited for a step that is not quick."""
    with self._lock:
      count, self._num_spare = self._num_spare, 0
    for _ in range(count):
      self._start(self._work)

  def _begin(self) -> None:
    """Asks for the first turn of the next conversation, if there is one that needs a turn."""
    while True:
      with self._lock:
        conversation = self._waiting.popleft() if self._waiting else None
      if conversation is None:
        return
      if conversation.draft.ended or (not conversation.repeats and self.drafts.park(conversation.draft)):
        continue
      conversation.holds = True
      if conversation.repeats:
        self._drawn.put((conversation, None))
      else:
        self._ask(conversation)
      return

  def _make_room(self, conversation: _Conversation) -> None:
    """Begins another conversation in place of one that needs no row for now, once."""
    with self._lock:
      held, conversation.holds = conversation.holds, False
    if held:
      self._begin()

  def _ask(self, conversation: _Conversation) -> None:
    """Asks for the rest of the current turn."""
    size, most = len(conversation.draft.tokens), self._rules.max_turn_tokens
    room, own = self._job.draws.max_new_tokens - size, size - conversation.opened
    # Of equal seeds come equal turns.
    sequence, shared = conversation.draft.sequence, self._rules.environment.shares_opening
    like = sequence // shared * shared if not conversation.draft.turns else None
    handle = self.drafts.ask(conversation.draft, room if most is None else min(room, most - own), own=own, like=like)
    if handle is not None:
      # Called in the engine's thread, which must not be held up.
      handle.completion.add_done_callback(lambda future: self._drawn.put((conversation, future)))

  def _work(self) -> None:
    """Continues conversations whose turns are drawn."""
    while (item := self._drawn.get()) is not None:
      conversation, future = item
      if conversation.draft.ended:
        continue
      try:
        is_late = self._repeat(conversation) if future is None else self._continue(conversation, future)
      # Any failure must wake the caller.
      except BaseException as error:
        self.drafts.fail(error)
        return
      if is_late:
        return  # Another thread has replaced this one.
    self._drawn.put(None)  # Each thread passes it on.

  def _step(self, conversation: _Conversation, step: Callable[[], tuple[Any, Reply]]) -> tuple[Reply, tuple[str, str] | None] | None:
    """Lets the environment reply; returns None if it exceeded its timeout."""
    conversation.began = began = time.monotonic()
    reply, trouble = Reply(), None
    try:
      state, reply = step()
      reply, trouble = checked(reply)
    # Environments are foreign code: any exception fails only their own sample.
    except Exception as error:
      state, reply, trouble = conversation.state, Reply(), raised(error)
    with self._lock:
      if conversation.began != began:
        return None
      conversation.began, conversation.state = None, state
    if self._num_spare and time.monotonic() - began > _QUICK_S:
      self._join_in()
    return reply, trouble

  def _repeat(self, conversation: _Conversation) -> bool:
    """Puts an environment where the turns so far have left it; returns whether it was late."""
    draft, environment, start = conversation.draft, self._rules.environment, 0
    stepped = self._step(conversation, lambda: (environment.reset(conversation.example), Reply()))
    for number, turn in enumerate(draft.turns):
      if stepped is None:
        return True
      if stepped[1] is not None:
        break
      while not draft.written[start]:
        start += 1
      ids = tuple(draft.tokens[start : turn.end + 1])
      said = Completion(turn.text, ids, len(ids), True)
      stepped = self._step(conversation, lambda said=said: environment.step(conversation.state, said))
      start = turn.end + 1
      if stepped is not None and stepped[1] is None and not _is_same(stepped[0], turn):
        line = f"asked again, it replied to turn {number + 1} in another way: {one_line(repr(stepped[0].text))[:80]}"
        stepped = Reply(), ("rewritten", f"the environment: {line}")
    if stepped is None:
      return True
    conversation.repeats, draft.failed = False, stepped[1]
    if draft.failed is not None:
      self.drafts.end(draft, StopReason.ABORTED)
    else:
      self._ask(conversation)
    return False

  def _continue(self, conversation: _Conversation, future: Future) -> bool:
    """Takes a turn; returns whether the environment exceeded its timeout."""
    draft, draws, rules = conversation.draft, self._job.draws, self._rules
    reason = self.drafts.take(draft, future)
    if reason is None:
      return False
    if reason == StopReason.ABORTED:
      self.drafts.end(draft, reason)
      return False
    ids = tuple(draft.tokens[conversation.opened :])
    said = Completion(self._tokenizer.decode(ids), ids, len(ids), reason != StopReason.LENGTH)
    reply, began_in = Reply(), None
    conversation.said = said.text
    try:
      began_in = None if rules.environment.state_key is None else str(rules.environment.state_key(conversation.state))
    except Exception as error:
      draft.failed = raised(error)
    if said.stopped and draft.failed is None:
      stepped = self._step(conversation, lambda: rules.environment.step(conversation.state, said))
      if stepped is None:
        return True
      if draft.ended:
        return False
      reply, draft.failed = stepped
    draft.turns.append(Turn(said.text, reply.text, reply.reward, len(draft.tokens) - 1, began_in))
    follows: list[int] | StopReason = reason
    if said.stopped and draft.failed is None:
      counts = dict(turns=len(draft.turns), length=len(draft.tokens), budget=draws.max_new_tokens)
      follows = after_turn(reply, reason, rules, self._tokenizer, **counts)
    if isinstance(follows, StopReason):
      self.drafts.end(draft, follows)
    else:
      draft.append(follows)
      conversation.opened = len(draft.tokens)
      self._ask(conversation)
    return False

  def _watch(self) -> None:
    """Gives up conversations whose environment exceeds its timeout.

    A thread cannot be killed, so a call that never returns occupies one until the process exits.
    The policy's programs run in the sandbox, which can be killed.
    """
    try:
      while not self.drafts.over.wait(min(PATIENCE_S, self._rules.timeout_s / 4)):
        for conversation in self._conversations:
          began = conversation.began
          if began is not None:
            self._check(conversation, began)
        self.drafts.settle()  # What has begun just as the bound became known.
    except BaseException as error:
      self.drafts.fail(error)
    self._drawn.put(None)

  def _check(self, conversation: _Conversation, began: float) -> None:
    """Gives up a conversation if its environment has not replied for so long that it is late."""
    seconds = time.monotonic() - began
    if seconds > _QUICK_S:
      self._join_in()
    if seconds > PATIENCE_S:
      self._make_room(conversation)
    if seconds <= self._rules.timeout_s:
      return
    with self._lock:
      if conversation.began != began:
        return
      conversation.began = None
    self._start(self._work)
    draft = conversation.draft
    if not conversation.repeats:
      draft.turns.append(Turn(conversation.said, "", 0.0, len(draft.tokens) - 1))
    draft.failed = timed_out(self._rules.timeout_s)
    self.drafts.end(draft, StopReason.ABORTED)


def _is_same(reply: Reply, turn: Turn) -> bool:
  """Returns whether an environment has replied to a turn as it did before."""
  text = tuple(reply.text) if isinstance(reply.text, list) else reply.text
  return (text, reply.reward, reply.done) == (turn.reply, turn.reward, False)
