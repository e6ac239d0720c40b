"""Batches of conversations that verifiers holds, played on the engine."""

import asyncio
import threading
import time
from typing import Any

from jaxrl_llm.messages import one_line
from jaxrl_llm.rollouts.cutting import Cutting, cut
from jaxrl_llm.rollouts.environments.hub.hub import Hub, abandon
from jaxrl_llm.rollouts.environments.hub.talk import Table, Talk
from jaxrl_llm.rollouts.playing import Conversation, Job, Player
from jaxrl_llm.types import StopReason


class Episodes(Player):
  """A batch of conversations that are being played: a `Playing`, begun at once.

  Args:
    hub: Environment.
    table: What the conversations share.
    job: Conversations to play. The rows of the examples hold the numbers of their tasks as `seed`.
    timeout_s: Limit on the time between two turns, in seconds.
    at_once: Largest number of conversations at once; None for all.
  """

  def __init__(self, hub: Hub, table: Table, job: Job, *, timeout_s: float, at_once: int | None):
    super().__init__(len(job.seeds))
    self._hub, self._timeout_s = hub, timeout_s
    self._lock = threading.RLock()
    self._cutting = Cutting(len(job.seeds), group_size=job.group_size, enough=job.enough or len(job.examples))
    settings = dict(cutting=self._cutting, parked=self._park)
    begun = job.begun or [None] * len(job.seeds)
    self._all_talks = [Talk(i, seed, table, begun=begun[i], **settings) for i, seed in enumerate(job.seeds)]
    self._done: dict[int, Conversation] = {}  # Those that have ended, and may yet be cut.
    self._kept = list(self._all_talks)  # What has not been handed over.
    self._talks = {talk.sequence: talk for talk in self._all_talks}
    for talk in self._all_talks:
      if talk.begun is not None and talk.begun.reason != StopReason.UNFINISHED:
        del self._talks[talk.sequence]
        counts = dict(cached_tokens=0, computed_tokens=0, discarded_tokens=0)
        self._done[talk.sequence] = talk.begun._replace(sequence=talk.sequence, **counts)
        self._cutting.end(talk.sequence, 0)
    indices = [job.examples[i // job.group_size]["seed"] for i in self._talks]
    self._settle()
    self._all = asyncio.run_coroutine_threadsafe(self._play(indices, at_once), hub.loop)
    threading.Thread(target=self._watch, name="verifiers: watch", daemon=True).start()

  def close(self) -> None:
    """Gives up the conversations that have not finished."""
    with self._lock:
      self._talks.clear()
    self._over.set()
    self._all.cancel()

  async def _play(self, indices: list[int], at_once: int | None) -> None:
    gate = asyncio.Semaphore(at_once or max(len(indices), 1))

    async def play(talk: Talk, index: int) -> None:
      async with gate:
        if self._cutting.bound == 0 and not (talk.begun and talk.begun.turns):
          talk.park()
          return
        try:
          episode = await self._hub.play(talk, index, self._timeout_s)
        # Environments are foreign code: any exception fails only their own sample.
        except Exception as error:
          talk.fail("raised", one_line(error))
          episode = None
      if talk.is_parked:
        return
      if talk.broken is not None:
        self._error(talk.broken)
      else:
        self._hand_over(talk, episode)

    async with asyncio.TaskGroup() as group:
      for talk, index in zip(list(self._talks.values()), indices, strict=True):
        group.create_task(play(talk, index))

  def _hand_over(self, talk: Talk, episode: Any) -> None:
    """Notes that a conversation has ended."""
    with self._lock:
      if self._talks.pop(talk.sequence, None) is None:
        return
      try:
        self._done[talk.sequence] = talk.finished(episode)
      # The caller must not wait for ever.
      except Exception as error:
        self._error(error)
        return
      self._cutting.end(talk.sequence, talk.drawn)
    self._settle()

  def _park(self, talk: Talk) -> None:
    """Notes that a conversation is to be cut."""
    with self._lock:
      if self._talks.pop(talk.sequence, None) is None:
        return
      self._cutting.park(talk.sequence)
    self._settle()

  def _settle(self) -> None:
    """Hands over what no cut can reach any more, and at the cut all the rest."""
    with self._lock:
      if self._over.is_set():
        return
      bound, kept = self._cutting.bound, []
      for talk in list(self._talks.values()):
        if bound is not None and talk.drawn > bound and not talk.is_open:
          talk.is_parked = True  # Whatever the program says next.
          del self._talks[talk.sequence]
          self._cutting.park(talk.sequence)
      certain = self._cutting.certain([talk.drawn + talk.flying for talk in self._all_talks])
      is_decided = self._cutting.is_decided
      for talk in self._kept:
        if (done := self._done.get(talk.sequence)) is not None and talk.drawn <= certain:
          self._finished.put(done)
        elif is_decided:
          before = 0 if talk.begun is None else sum(talk.begun.written)
          self._finished.put(cut(self._latest(talk), before + bound))
        else:
          kept.append(talk)
      self._kept = kept
      if is_decided:
        self._over.set()

  def _latest(self, talk: Talk) -> Conversation:
    """Returns a conversation that goes on, as far as this or an earlier step has got with it."""
    latest, begun = talk.conversation(StopReason.UNFINISHED), talk.begun
    if begun is None or len(latest.tokens) >= len(begun.tokens):
      return latest
    counts = dict(cached_tokens=latest.cached_tokens, computed_tokens=latest.computed_tokens)
    return begun._replace(sequence=talk.sequence, discarded_tokens=0, **counts)

  def _error(self, error: BaseException) -> None:
    self._finished.put(error)
    self._over.set()

  def _watch(self) -> None:
    """Gives up all conversations if the environment holds up the event loop for too long."""
    period = min(1.0, self._timeout_s / 4)
    silence = Silence(period)
    while not self._over.wait(period):
      late = silence.after(time.monotonic(), self._hub.beat)
      if late > self._timeout_s + 1 or self._all.done():
        abandon(self._hub)
        for talk in list(self._talks.values()):
          talk.fail("timeout", f"it held up all conversations for {late:.0f} s")
          self._hand_over(talk, None)


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
