"""The service behind a judge's term: many requests at once, retried, within deadlines.

The wait for judgements is a wait on a clock, never on a thread. A name server, a connection or an
endpoint that hangs holds one of the judge's threads, but no step of a run.
"""

import functools
import heapq
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxrl_llm.rewards.outcome import Outcome
from jaxrl_llm.rewards.rubric.endpoint import EndpointFault, JudgeAnswer, JudgeRequest
from jaxrl_llm.rewards.rubric.file import Rubric, api_key
from jaxrl_llm.rewards.rubric.prompt import Malformed, Scores, key_of, question, read_answer, reward_of, scaled, texts_of
from jaxrl_llm.rewards.rubric.store import Judgements
from jaxrl_llm.text_types import Completion

CAUSES = {
  "judge_busy": "the judge's endpoint was busy or had an error of its own (HTTP 429, 5xx)",
  "judge_malformed": "the judge did not answer with the JSON object that it was asked for",
  "judge_refused": "the judge's endpoint refused the request (HTTP 400, 401, 404 and the like)",
  "judge_timeout": "the judge did not answer in time",
  "judge_unreachable": "there was no connection to the judge's endpoint, or it broke",
  "too_long": "the response has more characters than the judge is to read",
}
"""Causes of a response without a judgement."""

_MAX_MALFORMED = 3  # Answers to one question that are not the JSON asked for.
_MAX_BACKOFF_SECONDS = 30.0
_CHECKED = "What is 2 + 2?", "4", "2 + 2 = 4"
"""Problem, reference and response of the request that checks an endpoint."""


@dataclass(eq=False)
class _Call:
  """A question to the judge, its state and its result; it ends with `scores` or a `fault`."""

  key: str
  body: bytes
  until: float  # A later batch that waits for the same question moves it.
  stored: bool = True
  tries: int = 0
  malformed: int = 0
  scores: Scores | None = None
  fault: tuple[str, str] | None = None

  @property
  def done(self) -> bool:
    return self.scores is not None or self.fault is not None


class _Attempt(NamedTuple):
  """A request under way, which is cut at a time of the clock."""

  request: JudgeRequest
  call: _Call
  until: float


class Judge:
  """A judge that grades responses by a rubric, in threads of its own.

  Threads start with the first question and end with `close`. A question is asked once: equal
  responses to equal problems share its judgement, which `Judgements` keeps. A failure is not kept.

  Args:
    rubric: Checked rubric.

  Note:
    A judgement that arrives after its deadline is dropped. Its response had no reward, and a
    resumed run must not find one.
  """

  def __init__(self, rubric: Rubric):
    self.rubric = rubric
    self._judgements = Judgements()
    self._lock = threading.Lock()
    self._work, self._ended, self._began = (threading.Condition(self._lock) for _ in range(3))
    self._waiting: list[tuple[float, int, _Call]] = []  # A heap, by the time of the next request.
    self._calls: dict[str, _Call] = {}  # Questions that have no result yet.
    self._attempts: set[_Attempt] = set()
    self._threads = self._number = 0
    self._closed = False
    self._counts: Counter[str] = Counter()
    self._jitter = random.Random()
    self._key_of = functools.lru_cache(maxsize=4096)(lambda *texts: key_of(question(rubric, *texts)))

  def open(self, judgements: Judgements) -> None:
    """Takes over earlier judgements, and checks the endpoint with one question.

    Raises:
      ValueError: If the endpoint gives no judgement. One line, with the address and the reason.
    """
    self._judgements = judgements
    body = question(self.rubric, *_CHECKED)
    seconds = min(self.rubric.deadline_s, 2 * self.rubric.timeout_s)
    call = _Call("", json.dumps(body).encode(), time.monotonic() + seconds, stored=False)
    with self._lock:
      self._push(call, 0.0)
    self._wait([call], call.until)
    self.metrics()
    if call.scores is None:
      cause, detail = call.fault
      raise ValueError(f"judge {self.rubric.path}: found no judgement of a first question ({cause}: {detail})")

  def begin(self, completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]]) -> Callable[[], list[Outcome]]:
    """Asks about responses without waiting, and returns a function that waits for the outcomes.

    The wait ends at most `deadline_s` after this call.
    """
    until, texts = time.monotonic() + self.rubric.deadline_s, [texts_of(*pair) for pair in zip(completions, examples, strict=True)]
    keys = [None if len(own[2]) > self.rubric.max_chars else self._key_of(*own) for own in texts]
    calls = [None if key is None else self._asked(key, own, until) for key, own in zip(keys, texts, strict=True)]

    def outcomes() -> list[Outcome]:
      begun = time.monotonic()
      self._wait([call for call in calls if call is not None], until)
      self._judgements.sync()
      results = [self._outcome(key, call) for key, call in zip(keys, calls, strict=True)]
      with self._lock:
        self._counts.update(f"failed/{outcome.cause}" for outcome in results if outcome.cause is not None)
        self._counts["samples"] += sum(key is not None for key in keys)
        self._counts["seconds"] += time.monotonic() - begun
      return results

    return outcomes

  def scores(self, criterion: int, completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Returns the scaled scores of responses by one criterion, given by its index.

    It asks nothing. A response without a judgement has no score.
    """
    outcomes = []
    for pair in zip(completions, examples, strict=True):
      texts = texts_of(*pair)
      scores = None if len(texts[2]) > self.rubric.max_chars else self._scores(self._key_of(*texts))
      own = None if scores is None else scaled(scores[criterion], self.rubric.criteria[criterion])
      outcomes.append(Outcome(None, "judge", "there is no judgement") if own is None else Outcome(own))
    return outcomes

  def waits_for(self) -> str:
    """Describes what is under way; may be called from another thread."""
    with self._lock:
      return f"judge {self.rubric.name!r}: {len(self._attempts)} requests under way, {len(self._waiting)} to be sent"

  def metrics(self) -> dict[str, float]:
    """Returns the counts since the last call of this function."""
    with self._lock:
      counts, self._counts = self._counts, Counter()
    # Questions may be asked while responses are still being drawn, before anyone waits for them.
    counts["cache_hits"] = max(counts["samples"] - counts["questions"], 0)
    names = ("calls", "retries", "cache_hits", "tokens", "seconds")
    failed = {name for name in counts if name.startswith("failed/")}
    return {f"judge/{self.rubric.name}/{name}": float(counts[name]) for name in (*names, *sorted(failed))}

  def close(self) -> None:
    """Ends all threads and requests."""
    with self._lock:
      self._closed = True
      for call in self._calls.values():
        call.fault = call.fault or ("judge_timeout", "the run ended")
      for attempt in self._attempts:
        attempt.request.cut()
      for condition in (self._work, self._ended, self._began):
        condition.notify_all()

  def _asked(self, key: str, texts: tuple[str, str, str], until: float) -> _Call | None:
    """Returns the call for a question; None if its judgement is known.

    The question is asked, unless that is under way.
    """
    with self._lock:
      if self._scores(key) is not None:
        return None
      if (call := self._calls.get(key)) is not None:
        call.until = max(call.until, until)
        return call
      call = self._calls[key] = _Call(key, json.dumps(question(self.rubric, *texts)).encode(), until)
      self._counts["questions"] += 1
      self._push(call, 0.0)
      return call

  def _scores(self, key: str) -> Scores | None:
    scores = self._judgements.get(key)
    return scores if scores is not None and len(scores) == len(self.rubric.criteria) else None

  def _outcome(self, key: str | None, call: _Call | None) -> Outcome:
    if key is None:
      return Outcome(None, "too_long", f"it has more than {self.rubric.max_chars:,} characters (max_chars of {self.rubric.path})")
    scores = self._scores(key) if call is None else call.scores
    if scores is not None:
      return Outcome(reward_of(scores, self.rubric.criteria))
    return Outcome(None, *call.fault)

  def _wait(self, calls: Sequence[_Call], until: float) -> None:
    """Waits for calls until a time at which those without a result have failed."""
    with self._lock:
      pending = [call for call in calls if not call.done]
      while pending and (left := until - time.monotonic()) > 0:
        self._ended.wait(left)
        pending = [call for call in pending if not call.done]
      for call in pending:
        self._end(call, fault=("judge_timeout", f"{self.rubric.url} gave no judgement within {self.rubric.deadline_s:g} s (deadline_s)"))

  def _push(self, call: _Call, wait_s: float) -> None:
    """Queues a request; the lock is held."""
    self._number += 1
    heapq.heappush(self._waiting, (time.monotonic() + wait_s, self._number, call))
    if not self._threads:
      threading.Thread(target=self._cut_overdue, daemon=True, name=f"judge {self.rubric.name} clock").start()
    if self._threads < min(self.rubric.concurrency, len(self._waiting) + len(self._attempts)):
      self._threads += 1
      threading.Thread(target=self._run, daemon=True, name=f"judge {self.rubric.name} {self._threads}").start()
    self._work.notify()

  def _end(self, call: _Call, *, scores: Scores | None = None, fault: tuple[str, str] | None = None) -> None:
    """Ends a call; the lock is held."""
    call.scores, call.fault = scores, fault
    if self._calls.get(call.key) is call:
      del self._calls[call.key]
    self._ended.notify_all()

  def _run(self) -> None:
    """Sends requests, one after another, until the judge is closed."""
    while (attempt := self._next()) is not None:
      answer: JudgeAnswer | None = None
      try:
        answer, result = self._answered(attempt)
      except EndpointFault as fault:
        result = fault
      # A thread that dies would leave its call to the deadline, and the judge with a thread less.
      except Exception as error:
        result = EndpointFault("judge_unreachable", f"{self.rubric.url}: {type(error).__name__}", retries=True)
      self._settle(attempt, result, answer)

  def _next(self) -> _Attempt | None:
    """Waits for a question that is due, and returns the attempt at it; None after `close`."""
    with self._lock:
      while not self._closed:
        now = time.monotonic()
        if not self._waiting or self._waiting[0][0] > now:
          self._work.wait(self._waiting[0][0] - now if self._waiting else None)
          continue
        _, _, call = heapq.heappop(self._waiting)
        if self._waiting:  # Another thread has to wait for the next one in place of this thread.
          self._work.notify()
        if call.done:
          continue
        if now >= call.until:
          self._end(call, fault=("judge_timeout", f"{self.rubric.url} gave no judgement in time"))
          continue
        call.tries += 1
        self._counts["calls"] += 1
        self._counts["retries"] += call.tries > 1
        limit = self.rubric.timeout_s
        attempt = _Attempt(JudgeRequest(self.rubric.url, call.body, key=api_key(self.rubric), timeout_s=limit), call, now + limit)
        self._attempts.add(attempt)
        self._began.notify()
        return attempt
    return None

  def _answered(self, attempt: _Attempt) -> tuple[JudgeAnswer, Scores | EndpointFault]:
    answer = attempt.request.send()
    try:
      return answer, read_answer(answer.text, self.rubric.criteria)
    except Malformed as error:
      return answer, EndpointFault("judge_malformed", str(error), retries=True)

  def _settle(self, attempt: _Attempt, result: Scores | EndpointFault, answer: JudgeAnswer | None) -> None:
    """Ends the call of an attempt, or queues its next request."""
    call = attempt.call
    with self._lock:
      self._attempts.discard(attempt)
      self._counts["tokens"] += 0 if answer is None else answer.num_tokens
      if call.done or self._closed:
        return
      if not isinstance(result, EndpointFault):
        if call.stored:
          # Before it can be used: what a run has used, a resumed run finds.
          result = self._judgements.add(call.key, result)
        self._end(call, scores=result)
        return
      call.malformed += result.cause == "judge_malformed"
      backoff = min(self.rubric.first_wait_s * 2 ** (call.tries - 1), _MAX_BACKOFF_SECONDS) * self._jitter.uniform(0.5, 1.0)
      wait_s = max(backoff, result.wait_s)
      again = result.retries and call.tries < self.rubric.tries and call.malformed < _MAX_MALFORMED
      if again and time.monotonic() + wait_s < call.until:
        self._push(call, wait_s)
      else:
        tries = f" ({call.tries} requests)" if call.tries > 1 else ""
        self._end(call, fault=(result.cause, result.detail + tries))

  def _cut_overdue(self) -> None:
    """Cuts requests that exceed their own limit or the deadline of their batch."""
    with self._lock:
      while not self._closed:
        now, ends = time.monotonic(), []
        for attempt in self._attempts:
          end = min(attempt.until, attempt.call.until)
          if attempt.request.is_cut:
            continue
          if now >= end or attempt.call.done:
            attempt.request.cut()
          else:
            ends.append(end)
        self._began.wait(max(min(ends) - now, 0.001) if ends else None)
