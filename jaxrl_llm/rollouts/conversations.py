"""Multi-turn conversations: the policy writes, an environment replies, and the sampler continues.

A conversation consists of the drawn tokens with the replies' tokens between them. Nothing is
decoded and encoded again, so the learner reads exactly what the sampler saw. For two turns of a
calculator, a response's slots hold:

  tokens   < < 4 8 7 * 3 6 = 1 7 5 3 2 > > # 1 7 5 3 2 end
  written  1 1 1 1 1 1 1 1 1 0 0 0 0 0 0 0 1 1 1 1 1 1 1       1: in loss, advantages, entropy
  turns                    └ end of turn 1, its reward      └ end of turn 2, its reward

The sampler is called once per turn for all unfinished conversations. It prefills the existing
tokens and draws more.
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
from jaxrl_llm.messages import one_line
from jaxrl_llm.rollouts.environments import Environment, Reply
from jaxrl_llm.rollouts.playing import Conversation
from jaxrl_llm.tasks.pipeline import encode_reply
from jaxrl_llm.text_types import Completion, Tokenizer, Turn
from jaxrl_llm.types import Rollouts, StopReason


class Rules(NamedTuple):
  """Rules of conversations.

  Attributes:
    environment: Environment that replies.
    max_turns: Maximum number of the policy's turns. A conversation that is not done by then counts
      as truncated.
    max_turn_tokens: Maximum number of tokens that the policy writes in a turn; None means the rest
      of the budget.
    timeout_s: Timeout of a step of the environment, in seconds.
    num_threads: Number of concurrent steps of the environment.
  """

  environment: Environment
  max_turns: int = 4
  max_turn_tokens: int | None = None
  timeout_s: float = 30.0
  num_threads: int = 8


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
    talks, of = [], self.partial
    for i, (size, reason) in enumerate(zip(of.lengths, of.reasons, strict=True)):
      parts = (x[i, :size] for x in (of.tokens, of.logprobs, self.written))
      talks.append(Conversation(i, (), *parts, self.turns[i], StopReason(int(reason)), self.failed[i]))
    return talks

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


def turn_requests(talks: Conversations, rules: Rules) -> Requests:
  """Makes the sampler's requests for the next turn, with the same shapes in every turn."""
  size, budget = talks.partial.tokens.shape
  limits = np.full(size, budget, np.int32)
  if rules.max_turn_tokens is not None:
    limits = np.minimum(limits, talks.partial.lengths + np.int32(rules.max_turn_tokens))
  return Requests(limits=limits.astype(np.int32), partial=talks.partial)


def take_turn(talks: Conversations, drawn: Rollouts, rules: Rules, tokenizer: Tokenizer) -> Conversations:
  """Steps the environment with the turns that the sampler has just drawn.

  A conversation ends when the environment says so. It is truncated if a turn or the conversation
  reaches its budget, if the reply leaves no room for another turn, or after `max_turns`.

  Args:
    talks: Conversations before the turn.
    drawn: Rollouts that the sampler returned for them, on the host.
    rules: Rules of the conversations.
    tokenizer: The task's tokenizer.

  Returns:
    The conversations after the turn.
  """
  tokens, logprobs, written = np.array(drawn.tokens), np.array(drawn.logprobs), talks.written.copy()
  raw = logprobs.copy() if drawn.raw_logprobs is None else np.array(drawn.raw_logprobs)
  lengths, reasons = drawn.mask.sum(axis=1).astype(np.int32), talks.partial.reasons.copy()
  turns, states, failed = list(talks.turns), list(talks.states), list(talks.failed)
  budget = tokens.shape[1]

  said: dict[int, Completion] = {}
  for i in talks.unfinished.tolist():
    start = talks.partial.lengths[i]
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


def after_turn(
  reply: Reply, reason: StopReason, rules: Rules, tokenizer: Tokenizer, *, turns: int, length: int, budget: int
) -> list[int] | StopReason:
  """Returns the ids that the policy reads behind a turn, or why the conversation has ended.

  Args:
    reply: The environment's reply to the turn.
    reason: `TOKEN` or `STRING`, which ended the turn.
    rules: Rules of the conversation.
    tokenizer: The task's tokenizer.
    turns: Number of turns so far.
    length: Number of tokens so far.
    budget: Budget of the conversation, in tokens.
  """
  if reply.done:
    return reason
  is_message = reason == StopReason.TOKEN
  ids = list(reply.text) if isinstance(reply.text, tuple) else encode_reply(reply.text, tokenizer, is_message=is_message)
  return StopReason.LENGTH if turns == rules.max_turns or length + len(ids) >= budget else ids


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


def checked(reply: Reply) -> tuple[Reply, tuple[str, str] | None]:
  """Returns a reply in plain types, or an empty one and how the environment failed."""
  if not isinstance(reply.reward, int | float | np.number) or not np.isfinite(reply.reward):
    return Reply(), ("not_finite", f"the environment: found the reward {reply.reward}, expected a finite number")
  return reply._replace(reward=float(reply.reward), done=bool(reply.done)), None


def raised(error: Exception) -> tuple[str, str]:
  """Returns how an environment failed that raised an error."""
  return "raised", f"the environment: {one_line(error)}"


def timed_out(timeout_s: float) -> tuple[str, str]:
  """Returns how an environment failed that did not reply in time."""
  return "timeout", f"the environment: no reply within {timeout_s:g} s"


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


def metrics(rollouts: Rollouts, completions: Sequence[Completion]) -> dict[str, float]:
  """Returns metrics of conversations from `converse`; empty for single-turn responses."""
  if rollouts.written is None:
    return {}
  turns = np.array([len(completion.turns) for completion in completions])
  replies = (rollouts.mask & ~rollouts.written).sum(axis=1)
  return {
    "conversation/turns/mean": float(turns.mean()),
    "conversation/turns/max": float(turns.max()),
    "conversation/reply_tokens/mean": float(replies.mean()),
    "conversation/reward/mean": float(np.mean([sum(turn.reward for turn in completion.turns) for completion in completions])),
    "conversation/failed": float(sum(completion.failed is not None for completion in completions)),
  }
