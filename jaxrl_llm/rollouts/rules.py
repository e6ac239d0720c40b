"""Multi-turn conversations: the policy writes, an environment replies, and the policy continues.

A conversation consists of the drawn tokens with the replies' tokens between them. Nothing is
decoded and encoded again, so the learner reads exactly what was drawn. For two turns of a
calculator, a response's slots hold:

  tokens   < < 4 8 7 * 3 6 = 1 7 5 3 2 > > # 1 7 5 3 2 end
  written  1 1 1 1 1 1 1 1 1 0 0 0 0 0 0 0 1 1 1 1 1 1 1       1: in loss, advantages, entropy
  turns                    └ end of turn 1, its reward      └ end of turn 2, its reward
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.messages import one_line
from jaxrl_llm.rollouts.environments import Environment, Reply
from jaxrl_llm.tasks.pipeline import encode_reply
from jaxrl_llm.text_types import Completion, Tokenizer
from jaxrl_llm.types import Rollouts, StopReason


class Rules(NamedTuple):
  """Rules of conversations.

  Attributes:
    environment: Environment that replies.
    max_turns: Maximum number of the policy's turns. A conversation that is not done by then counts
      as truncated.
    max_turn_tokens: Maximum number of tokens that the policy writes in a turn; None means the rest
      of the budget.
    timeout_s: Timeout of a step of the environment, in seconds. A response beyond it has no reward
      and is not learned from.
    num_threads: Number of concurrent steps of the environment.
  """

  environment: Environment
  max_turns: int = 4
  max_turn_tokens: int | None = None
  timeout_s: float = 60.0
  num_threads: int = 8


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


def metrics(rollouts: Rollouts, completions: Sequence[Completion]) -> dict[str, float]:
  """Returns metrics of conversations, whose rollouts say what the policy wrote."""
  turns = np.array([len(completion.turns) for completion in completions])
  replies = (rollouts.mask & ~rollouts.written).sum(axis=1)
  return {
    "conversation/turns/mean": float(turns.mean()),
    "conversation/turns/max": float(turns.max()),
    "conversation/reply_tokens/mean": float(replies.mean()),
    "conversation/reward/mean": float(np.mean([sum(turn.reward for turn in completion.turns) for completion in completions])),
    "conversation/failed": float(sum(completion.failed is not None for completion in completions)),
  }
