"""Conversations in rounds: one call of the sampler draws the next turn of all that have not ended.

It prefills the existing tokens and draws more. Then each process steps its share of the
environments, and all get the replies.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from jaxrl_llm.decoding.sampler import RUNNING, Partial, Requests, no_partial
from jaxrl_llm.devices import hosts
from jaxrl_llm.rollouts.environments import Reply
from jaxrl_llm.rollouts.jobs import Conversation
from jaxrl_llm.rollouts.rules import Rules, after_turn, checked, raised, timed_out
from jaxrl_llm.text_types import Completion, Tokenizer, Turn
from jaxrl_llm.types import Rollouts, StopReason


class Conversations(NamedTuple):
  """A batch of N conversations on the host.

  Attributes:
    partial: Tokens so far, for the sampler to continue. Its `reasons` say which conversations have
      ended, and how.
    written: True where the policy wrote the token.
    turns: Turns of each conversation so far, with their replies.
    states: State of the environment in the process that steps it; None in the others.
    failed: Cause and line, as a pair, if the environment failed; None otherwise.
  """

  partial: Partial
  written: Bool[np.ndarray, "N R"]
  turns: list[tuple[Turn, ...]]
  states: list[Any]
  failed: list[tuple[str, str] | None]

  def finished(self) -> list[Conversation]:
    """Returns the conversations, all of which have ended, without their prompts."""
    conversations, of = [], self.partial
    for i, (size, reason) in enumerate(zip(of.lengths, of.reasons, strict=True)):
      parts = (x[i, :size] for x in (of.tokens, of.logprobs, self.written))
      conversations.append(Conversation(i, (), *parts, self.turns[i], StopReason(int(reason)), self.failed[i]))
    return conversations

  @property
  def unfinished(self) -> Int[np.ndarray, " m"]:
    """Indices of the conversations that have not ended."""
    return np.flatnonzero(self.partial.reasons == RUNNING)


def begin_conversations(
  examples: Sequence[Mapping[str, Any]], rules: Rules, *, group_size: int, max_new_tokens: int
) -> Conversations:
  """Makes G conversations per prompt, before their first turn.

  Their budget of R tokens includes the replies.
  """
  size = len(examples) * group_size
  own, count = jax.process_index(), jax.process_count()
  states = [rules.environment.reset(examples[i // group_size]) if i % count == own else None for i in range(size)]
  return Conversations(
    no_partial(size, max_new_tokens), np.zeros((size, max_new_tokens), bool), [()] * size, states, [None] * size
  )


def turn_requests(conversations: Conversations, rules: Rules) -> Requests:
  """Makes the requests for the next turn, without seeds, with the same shapes in every turn."""
  size, budget = conversations.partial.tokens.shape
  limits = np.full(size, budget, np.int32)
  if rules.max_turn_tokens is not None:
    limits = np.minimum(limits, conversations.partial.lengths + np.int32(rules.max_turn_tokens))
  return Requests(limits=limits.astype(np.int32), partial=conversations.partial, begins=conversations.partial.lengths)


def take_turn(conversations: Conversations, drawn: Rollouts, rules: Rules, tokenizer: Tokenizer) -> Conversations:
  """Steps the environment with the turns that the sampler has just drawn.

  A conversation ends when the environment says so. It is truncated if a turn or the conversation
  reaches its budget, if the reply leaves no room for another turn, or after `max_turns`.

  Args:
    conversations: Conversations before the turn.
    drawn: Rollouts that the sampler returned for them, on the host.
    rules: Rules of the conversations.
    tokenizer: The task's tokenizer.

  Returns:
    The conversations after the turn.
  """
  tokens, logprobs, written = np.array(drawn.tokens), np.array(drawn.logprobs), conversations.written.copy()
  raw = logprobs.copy() if drawn.raw_logprobs is None else np.array(drawn.raw_logprobs)
  lengths, reasons = drawn.mask.sum(axis=1).astype(np.int32), conversations.partial.reasons.copy()
  turns, states, failed = list(conversations.turns), list(conversations.states), list(conversations.failed)
  budget = tokens.shape[1]

  said: dict[int, Completion] = {}
  for i in conversations.unfinished.tolist():
    start = conversations.partial.lengths[i]
    written[i, start : lengths[i]] = True
    ids = tuple(tokens[i, start : lengths[i]].tolist())
    complete = int(drawn.reasons[i]) in (StopReason.TOKEN, StopReason.STRING)
    said[i] = Completion(tokenizer.decode(ids), ids, len(ids), complete)
    if not complete:
      reasons[i] = StopReason.LENGTH
  replies = _replies({i: turn for i, turn in said.items() if turn.stopped}, states, rules)
  for i, turn in said.items():
    reply, trouble = replies.get(i, (Reply(), None))
    turns[i] += (Turn(turn.text, reply.text, reply.reward, int(lengths[i]) - 1),)
    if trouble is not None:
      failed[i], reasons[i] = trouble, StopReason.ABORTED
    elif turn.stopped:
      counts = dict(turns=len(turns[i]), length=int(lengths[i]), budget=budget)
      follows = after_turn(reply, StopReason(int(drawn.reasons[i])), rules, tokenizer, **counts)
      if isinstance(follows, StopReason):
        reasons[i] = follows
      else:
        end = lengths[i] + len(follows)
        tokens[i, lengths[i] : end], logprobs[i, lengths[i] : end], raw[i, lengths[i] : end] = follows, 0, 0
        lengths[i] = end
  return Conversations(Partial(tokens, lengths, logprobs, raw, reasons), written, turns, states, failed)


def _replies(said: Mapping[int, Completion], states: list[Any], rules: Rules) -> dict[int, tuple[Reply, tuple[str, str] | None]]:
  """Returns the environment's reply to each turn, or how it failed.

  Each conversation is stepped in one process, which keeps its state.
  """
  count = jax.process_count()
  own = [i for i in said if i % count == jax.process_index()]
  results = _in_threads(
    lambda i: rules.environment.step(states[i], said[i]), own, num_threads=rules.num_threads, timeout_s=rules.timeout_s
  )
  replies = {}
  for i, (result, trouble) in results.items():
    if trouble is None:
      states[i], reply = result
      reply, trouble = checked(reply)
    replies[str(i)] = (Reply(), trouble) if trouble else (reply, None)
  if count == 1:
    return {int(i): x for i, x in replies.items()}
  all_replies: dict[int, tuple[Reply, tuple[str, str] | None]] = {}
  for text in hosts.gather_text(json.dumps(replies)):
    for i, ((words, reward, done), trouble) in json.loads(text).items():
      reply = Reply(tuple(words) if isinstance(words, list) else words, reward, done)
      all_replies[int(i)] = reply, None if trouble is None else tuple(trouble)
  return all_replies


def _in_threads(
  step: Callable[[int], Any], items: Sequence[int], *, num_threads: int, timeout_s: float
) -> dict[int, tuple[Any, tuple[str, str] | None]]:
  """Runs calls that may take long in threads, and abandons those that exceed their timeout.

  A thread cannot be killed, so a call that never returns occupies one until the process exits. The
  policy's programs run in the sandbox, which can be killed.
  """
  waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
  results: dict[int, tuple[Any, tuple[str, str] | None]] = {}
  started: dict[int, float] = {}
  for i in items:
    waiting.put(i)

  def work() -> None:
    while True:
      try:
        i = waiting.get_nowait()
      except queue.Empty:
        return
      started[i] = time.monotonic()
      try:
        result = step(i), None
      # Environments are foreign code: any exception fails only their own sample.
      except Exception as error:
        result = None, raised(error)
      if results.setdefault(i, result) is not result:
        return  # The call exceeded its timeout, and another thread has replaced this one.

  threads = [threading.Thread(target=work, daemon=True) for _ in range(min(num_threads, len(items)))]
  for thread in threads:
    thread.start()
  while len(results) < len(items):
    now = time.monotonic()
    for i, since in list(started.items()):
      if i not in results and now - since > timeout_s:
        late = None, timed_out(timeout_s)
        if results.setdefault(i, late) is late and len(results) < len(items):
          threads.append(thread := threading.Thread(target=work, daemon=True))
          thread.start()
    next((thread.join(0.01) for thread in threads if thread.is_alive()), None)
  return results
