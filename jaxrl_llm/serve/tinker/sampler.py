"""Samples of many adapters from one decoding engine, which has the weights of one at a time.

Adapters are merged into the model, and take turns: the requests of one are drawn together, and
those of another wait until they have ended. What a request draws thus depends on its own weights,
prompt and seed alone.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxrl_llm.decoding.engine.requests import Decoded, Engine, Handle, Request
from jaxrl_llm.serve.refusals import busy
from jaxrl_llm.types import Params


class Weights:
  """Weights to draw with, which never change.

  Args:
    params: Function that returns them, as params of the engine's model.
    score: Function that returns the log-probability of each id but the first, as the learner
      computes it.
  """

  def __init__(self, params: Callable[[], Params], score: Callable[[Sequence[int]], Float[np.ndarray, " n"]]):
    self.params, self.score = params, score


class _Job(NamedTuple):
  weights: Weights
  requests: Sequence[Request]
  done: Callable[[list[Decoded] | BaseException], None]
  handles: list[Handle]
  is_aborted: threading.Event


class Sampler:
  """Draws for many weights with one engine.

  Args:
    engine: Engine, for these requests alone.
    base: Weights that the engine has at first.
    most: Largest number of calls that wait.
  """

  def __init__(self, engine: Engine, base: Weights, *, most: int = 4096):
    self.limits = engine.limits
    self._engine, self._current, self._version, self._most = engine, base, 1, most
    self._waiting: list[_Job] = []
    self._open, self._is_closing = 0, False
    self._changed = threading.Condition()
    self._thread = threading.Thread(target=self._run, name="tinker sampler", daemon=True)
    self._thread.start()

  def submit(
    self, weights: Weights, requests: Sequence[Request], done: Callable[[list[Decoded] | BaseException], None]
  ) -> Callable[[], None]:
    """Accepts a call.

    Args:
      weights: Weights to draw with.
      requests: Completions to draw.
      done: Function that gets the completions, or what went wrong, in another thread.

    Returns:
      Function that ends the call soon. Completions that are not whole then have the reason
      "aborted".

    Raises:
      Refusal: If too many calls wait.
    """
    job = _Job(weights, requests, done, [], threading.Event())
    with self._changed:
      if len(self._waiting) >= self._most:
        raise busy(f"{self._most} calls of asample are waiting, expected fewer; try again")
      self._waiting.append(job)
      self._changed.notify_all()

    def abort() -> None:
      with self._changed:
        job.is_aborted.set()
        handles = list(job.handles)
      for handle in handles:
        handle.abort()

    return abort

  def close(self) -> None:
    """Ends all calls, and the engine."""
    with self._changed:
      self._is_closing = True
      self._changed.notify_all()
    self._engine.close()
    self._thread.join()

  def _run(self) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._is_closing or self._ready())
        if self._is_closing:
          return
        jobs = self._ready()
        taken = set(map(id, jobs))
        self._waiting = [job for job in self._waiting if id(job) not in taken]
      try:
        if jobs[0].weights is not self._current:
          self._version += 1
          self._engine.update(jobs[0].weights.params(), self._version)
          self._current = jobs[0].weights
      except Exception as error:
        for job in jobs:
          job.done(error)
        continue
      for job in jobs:
        self._begin(job)

  def _ready(self) -> list[_Job]:
    """Returns the calls that may begin: those of the weights whose turn it is, in order.

    None overtakes a call of other weights, except at the beginning of a turn, so that none waits
    for ever.
    """
    if not self._waiting:
      return []
    weights = self._current if self._open else self._waiting[0].weights
    if self._open and any(job.weights is not weights for job in self._waiting):
      return []
    jobs, room = [], self.limits.requests - self._open
    for job in self._waiting:
      if job.weights is weights:
        room -= len(job.requests)
        if room < 0:
          break
        jobs.append(job)
    return jobs

  def _begin(self, job: _Job) -> None:
    outcomes: dict[int, Decoded | BaseException] = {}

    def ended(number: int, outcome: Decoded | BaseException) -> None:
      with self._changed:
        self._open -= 1
        outcomes[number] = outcome
        is_last = len(outcomes) == len(job.requests)
        self._changed.notify_all()
      if is_last:
        faults = [own for own in outcomes.values() if isinstance(own, BaseException)]
        job.done(faults[0] if faults else [outcomes[i] for i in range(len(job.requests))])

    with self._changed:
      self._open += len(job.requests)
    for number, request in enumerate(job.requests):
      try:
        handle = self._engine.submit(request)
      except Exception as error:
        ended(number, error)
        continue
      with self._changed:
        job.handles.append(handle)
      if job.is_aborted.is_set():
        handle.abort()
      handle.completion.add_done_callback(
        lambda future, number=number: ended(number, future.exception() or future.result())
      )
