"""Batches of conversations that verifiers holds, played on the engine."""

import asyncio
import threading
import time
from typing import Any

from jaxrl_llm.messages import one_line
from jaxrl_llm.rollouts.environments.hub.hub import Hub, abandon
from jaxrl_llm.rollouts.environments.hub.talk import Table, Talk
from jaxrl_llm.rollouts.playing import Job, Player


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
    self._lock = threading.Lock()
    self._talks = {i: Talk(i, seed, table) for i, seed in enumerate(job.seeds)}
    indices = [job.examples[i // job.group_size]["seed"] for i in self._talks]
    self._all = asyncio.run_coroutine_threadsafe(self._play(indices, at_once), hub.loop)
    threading.Thread(target=self._watch, name="verifiers: watch", daemon=True).start()

  def close(self) -> None:
    """Gives up the conversations that have not finished."""
    with self._lock:
      self._talks.clear()
    self._over.set()
    self._all.cancel()

  async def _play(self, indices: list[int], at_once: int | None) -> None:
    gate = asyncio.Semaphore(at_once or len(indices))

    async def play(talk: Talk, index: int) -> None:
      async with gate:
        try:
          episode = await self._hub.play(talk, index, self._timeout_s)
        # Environments are foreign code: any exception fails only their own sample.
        except Exception as error:
          talk.fail("raised", one_line(error))
          episode = None
      if talk.broken is not None:
        self._error(talk.broken)
      else:
        self._hand_over(talk, episode)

    async with asyncio.TaskGroup() as group:
      for talk, index in zip(list(self._talks.values()), indices, strict=True):
        group.create_task(play(talk, index))

  def _hand_over(self, talk: Talk, episode: Any) -> None:
    with self._lock:
      if self._talks.pop(talk.sequence, None) is None:
        return
      is_last = not self._talks
    try:
      self._finished.put(talk.finished(episode))
    # The caller must not wait for ever.
    except Exception as error:
      self._finished.put(error)
    if is_last:
      self._over.set()

  def _error(self, error: BaseException) -> None:
    self._finished.put(error)
    self._over.set()

  def _watch(self) -> None:
    """Gives up all conversations if the environment holds up the event loop for too long."""
    while not self._over.wait(min(1.0, self._timeout_s / 4)):
      late = time.monotonic() - self._hub.beat
      if late > self._timeout_s + 1 or self._all.done():
        abandon(self._hub)
        for talk in list(self._talks.values()):
          talk.fail("timeout", f"it held up all conversations for {late:.0f} s")
          self._hand_over(talk, None)
