"""Batches of conversations that verifiers holds, played on the engine."""

import asyncio
import threading
import time
from typing import Any

from jaxrl_llm.decoding.engine.requests import Engine
from jaxrl_llm.messages import one_line
from jaxrl_llm.rollouts.drafts import Drafts
from jaxrl_llm.rollouts.environments.hub.conversation import ProgramConversation
from jaxrl_llm.rollouts.environments.hub.hub import Hub, abandon
from jaxrl_llm.rollouts.jobs import Job
from jaxrl_llm.rollouts.rules import Rules
from jaxrl_llm.text_types import Tokenizer


def play_episodes(
  hub: Hub, engine: Engine, job: Job, *, rules: Rules, tokenizer: Tokenizer, timeout_s: float, at_once: int | None
) -> Drafts:
  """Begins all conversations of a batch.

  Args:
    hub: Environment.
    engine: Engine that draws the turns.
    job: Conversations to play. The rows of the examples hold the numbers of their tasks as `seed`.
    rules: Rules of the conversations.
    tokenizer: The task's tokenizer.
    timeout_s: Limit on the time between two turns, in seconds.
    at_once: Largest number of conversations at once; None for all.
  """
  return _Episodes(hub, engine, job, rules, tokenizer, timeout_s, at_once).drafts


class _Episodes:
  """The conversations of a batch with their programs, which run in the event loop of the hub."""

  def __init__(self, hub: Hub, engine: Engine, job: Job, rules: Rules, tokenizer: Tokenizer, timeout_s: float, at_once: int | None):
    self._hub, self._job, self._timeout_s = hub, job, timeout_s
    self.drafts = Drafts(engine, job, closed=lambda: self._all.cancel())
    common = dict(rules=rules, tokenizer=tokenizer)
    self._conversations = [ProgramConversation(draft, self.drafts, **common) for draft in self.drafts.all if not draft.ended]
    self._all = asyncio.run_coroutine_threadsafe(self._play(at_once), hub.loop)
    threading.Thread(target=self._watch, name="verifiers: watch", daemon=True).start()

  async def _play(self, at_once: int | None) -> None:
    gate = asyncio.Semaphore(at_once or max(len(self._conversations), 1))

    async def play(conversation: ProgramConversation, index: int) -> None:
      async with gate:
        if conversation.draft.ended or (not conversation.draft.begun.turns and self.drafts.park(conversation.draft)):
          return
        try:
          episode = await self._hub.play(conversation, index, self._timeout_s)
        # Environments are foreign code: any exception fails only their own sample.
        except Exception as error:
          conversation.fail("raised", one_line(error))
          episode = None
      if conversation.draft.ended:
        return
      if conversation.broken is not None:
        self.drafts.fail(conversation.broken)
      else:
        self._end(conversation, episode)

    async with asyncio.TaskGroup() as group:
      for conversation in self._conversations:
        group.create_task(play(conversation, self._job.examples[conversation.draft.sequence // self._job.group_size]["seed"]))

  def _end(self, conversation: ProgramConversation, episode: Any) -> None:
    """Notes that a conversation has ended."""
    try:
      self.drafts.end(conversation.draft, conversation.judge(episode))
    # The caller must not wait for ever.
    except Exception as error:
      self.drafts.fail(error)

  def _watch(self) -> None:
    """Gives up all conversations if the environment holds up the event loop for too long."""
    period = min(1.0, self._timeout_s / 4)
    silence = Silence(period)
    while not self.drafts.over.wait(period):
      late = silence.after(time.monotonic(), self._hub.beat)
      if late > self._timeout_s + 1 or self._all.done():
        abandon(self._hub)
        for conversation in self._conversations:
          conversation.fail("timeout", f"it held up all conversations for {late:.0f} s")
          self._end(conversation, None)


class Silence:
  """Time without a beat, in seconds, of which no look counts for more than two periods.

  A machine too busy to run this thread is too busy for the one that beats: what neither could do is
  no fault of the environment's.

  Args:
    period: Seconds between two looks.

  Example:
    >>> silence = Silence(1.0)
    >>> [silence.after(now, beat) for now, beat in ((0, 0), (1, 0), (61, 0), (62, 61.5))]
    [0.0, 1.0, 3.0, 0.0]
  """

  def __init__(self, period: float):
    self._period, self._total, self._last = period, 0.0, None

  def after(self, now: float, beat: float) -> float:
    """Returns the time without a beat at a look, given the time of the last beat."""
    if self._last is None or beat != self._last[1]:
      self._total = 0.0
    else:
      self._total += min(now - self._last[0], 2 * self._period)
    self._last = now, beat
    return self._total
