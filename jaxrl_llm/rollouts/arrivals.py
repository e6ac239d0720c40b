"""Conversations as they finish, gathered to a batch, and graded while others are still talking."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rewards.outcome import CallFn, Graded, call_here, grade, mapped, pending, put
from jaxrl_llm.rollouts.jobs import Conversation, Examples, Job, Playing, to_completion, to_rollouts
from jaxrl_llm.rollouts.rules import metrics as metrics_of_conversations
from jaxrl_llm.text_types import Completion, Tokenizer
from jaxrl_llm.types import Rollouts, StopReason

_PARTS = 8  # Calls of the rewards cost time too, so a batch is graded in so many parts at most.


class DrawnBatch(NamedTuple):
  """Rollouts on the host, as `assess` needs them.

  Attributes:
    rollouts: Tokens and log-probabilities.
    responses: Completions of the sequences.
    examples: One task row per prompt.
    graded: Rewards of the sequences graded while others were still being drawn, the others
      `PENDING`; None if there are none.
  """

  rollouts: Rollouts
  responses: list[Completion]
  examples: Examples
  graded: Graded | None = None


class Gathered(NamedTuple):
  """All conversations of a batch.

  Attributes:
    played: The conversations, in the order of their sequences.
    graded: Rewards known so far; None if nothing is graded yet.
    seconds: Time spent on grading while others were talking.
  """

  played: list[Conversation]
  graded: Graded | None
  seconds: float


def gather(
  playing: Playing, job: Job, tokenizer: Tokenizer, *, prompt_buckets: Sequence[int], **options: Any
) -> tuple[DrawnBatch, dict[str, float]]:
  """Waits for the conversations of a batch that learns from all of them.

  Args:
    playing: Conversations that are being played.
    job: What they are.
    tokenizer: The task's tokenizer.
    prompt_buckets: Numbers of prompt slots to choose from.
    **options: Other arguments of `wait_for`.

  Returns:
    The rollouts in the order of the prompts, with the rewards known so far, and metrics.

  Raises:
    EngineError: If the engine has failed.
  """
  gathered = wait_for(playing, job, **options)
  return drawn_of(gathered, job, tokenizer, np.arange(len(job.seeds)), prompt_buckets=prompt_buckets)


def drawn_of(
  gathered: Gathered, job: Job, tokenizer: Tokenizer, rows: Int[np.ndarray, " m"], *, prompt_buckets: Sequence[int]
) -> tuple[DrawnBatch, dict[str, float]]:
  """Makes the rollouts of whole groups that have finished, and metrics.

  Args:
    gathered: All conversations of the batch.
    job: What they are.
    tokenizer: The task's tokenizer.
    rows: Sequences of the groups.
    prompt_buckets: Numbers of prompt slots to choose from.
  """
  examples = [job.examples[row // job.group_size] for row in rows[:: job.group_size]]
  conversations = [gathered.played[row]._replace(sequence=i) for i, row in enumerate(rows)]
  rollouts, responses = to_rollouts(conversations, examples, tokenizer, draws=job.draws, prompt_buckets=prompt_buckets)
  own = {} if rollouts.written is None else metrics_of_conversations(rollouts, responses) | token_metrics(gathered.played)
  graded = gathered.graded
  if graded is not None:
    graded = mapped(lambda x: x[rows], graded)
  if gathered.seconds:
    own["perf/reward_overlap_s"] = gathered.seconds
  return DrawnBatch(rollouts, responses, examples, graded), own


def wait_for(
  playing: Playing,
  job: Job,
  *,
  rewards: Sequence[WeightedReward] | None = None,
  call: CallFn = call_here,
  between: Callable[[], None] = lambda: None,
) -> Gathered:
  """Waits for the conversations of a batch, those that are cut included.

  Args:
    playing: Conversations that are being played.
    job: What they are.
    rewards: Terms of the reward. What has finished is graded, an eighth of the batch or more at a
      time, or a service is asked about it without waiting; None grades nothing here. A reward sees
      one response and its own example, so this changes none. The last ones are never graded here,
      since nothing is drawn meanwhile.
    call: Function that calls the reward terms.
    between: Function called about ten times a second or more; may raise, which gives up what has
      not finished.

  Raises:
    EngineError: If the engine has failed.
  """
  size, seconds, graded, played, ready = len(job.seeds), 0.0, None, [], []
  begins = [reward.service.begin for reward in rewards or () if reward.service is not None]
  try:
    for finished in playing:
      between()
      played += finished
      ready += [conversation for conversation in finished if conversation.reason != StopReason.UNFINISHED]
      if rewards is None or not ready or len(played) == size or (not begins and len(ready) * _PARTS < size):
        continue
      start = time.perf_counter()
      rows = [conversation.sequence for conversation in ready]
      asked = list(map(to_completion, ready)), [job.examples[row // job.group_size] for row in rows]
      known = [i for i, conversation in enumerate(ready) if conversation.failed is None]
      for begin in begins:
        begin(*([part[i] for i in known] for part in asked))
      if not begins:
        graded = put(graded or pending(rewards, size), rows, grade(rewards, *asked, call=call))
      ready = []
      seconds += time.perf_counter() - start
  except BaseException:
    playing.close()
    raise
  return Gathered(sorted(played, key=lambda conversation: conversation.sequence), graded, seconds)


def token_metrics(played: Sequence[Conversation]) -> dict[str, float]:
  """Returns how many tokens a batch took of the engine, summed over its conversations.

  The result is empty if no engine drew them.
  """
  if not any(conversation.computed_tokens for conversation in played):
    return {}
  return {
    "conversation/cached_tokens": float(np.sum([conversation.cached_tokens for conversation in played])),
    "conversation/computed_tokens": float(np.sum([conversation.computed_tokens for conversation in played])),
  }
