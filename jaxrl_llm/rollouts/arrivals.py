"""Conversations as they finish, gathered to a batch, and graded while others are still talking."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxrl_llm.rewards import WeightedReward
from jaxrl_llm.rewards.outcome import CallFn, Graded, call_here, grade, mapped, pending, put
from jaxrl_llm.rollouts.jobs import Conversation, Examples, Job, Playing, to_completion, to_rollouts
from jaxrl_llm.rollouts.rules import metrics as metrics_of_conversations
from jaxrl_llm.rollouts.schedule import ReplayDiffersError
from jaxrl_llm.rollouts.window import choose
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
  responses: Sequence[Completion]
  examples: Examples
  graded: Graded | None = None


class Gathered(NamedTuple):
  """The conversations of a batch, or of some of its groups.

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
  conversations = numbered(gathered.played[row] for row in rows)
  rollouts, responses = to_rollouts(conversations, examples, tokenizer, draws=job.draws, prompt_buckets=prompt_buckets)
  own = {} if rollouts.written is None else metrics_of_conversations(rollouts, responses) | token_metrics(gathered.played)
  graded = gathered.graded
  if graded is not None:
    graded = mapped(lambda x: x[rows], graded)
  if gathered.seconds:
    own["perf/reward_overlap_s"] = gathered.seconds
  return DrawnBatch(rollouts, responses, examples, graded), own


class Arrivals:
  """Conversations of a batch as they finish, graded while others are still talking.

  Args:
    playing: Conversations that are being played.
    job: What they are.
    rewards: Terms of the reward. What has finished is graded, an eighth of the batch or more at a
      time, or a service is asked about it without waiting; None grades nothing here. A reward sees
      one response and its own example, so this changes none. The last ones are never graded here,
      since nothing is drawn meanwhile.
    call: Function that calls the reward terms.

  Attributes:
    job: What they are.
    rewards: Terms of the reward.
    left: Groups that have not been taken yet, from 0 and in order.
    finished: Those of them whose conversations are all here, those that are cut included.
  """

  def __init__(self, playing: Playing, job: Job, *, rewards: Sequence[WeightedReward] | None = None, call: CallFn = call_here):
    self.job, self.rewards, self.left, self.finished = job, rewards, list(range(len(job.examples))), set[int]()
    self._playing, self._portions, self._call = playing, None, call
    self._here: dict[int, Conversation] = {}
    self._missing = np.full(len(job.examples), job.group_size)  # Conversations of each group.
    self._ready: list[Conversation] = []
    self._graded, self._seconds = None, 0.0

  def look(self) -> bool:
    """Takes in what has finished since the last look; waits for it up to about 0.1 s.

    Returns:
      Whether a group has finished.

    Raises:
      EngineError: If the engine has failed.
    """
    before = len(self.finished)
    self._portions = self._portions or iter(self._playing)
    if (finished := next(self._portions, None)) is None:
      raise ValueError(f"found a batch that ends without {self._missing.sum()} of its {len(self.job.seeds)} conversations")
    for conversation in finished:
      group = conversation.sequence // self.job.group_size
      self._here[conversation.sequence] = conversation
      self._missing[group] -= 1
      if not self._missing[group]:
        self.finished.add(group)
    self._ready += [conversation for conversation in finished if conversation.reason != StopReason.UNFINISHED]
    if not self._missing.any():
      for _ in self._portions:  # Lets it end.
        pass
    elif self.rewards is not None and self._ready:
      self._grade(self.rewards)
    return len(self.finished) > before

  def _grade(self, rewards: Sequence[WeightedReward]) -> None:
    """Grades what is ready, or asks services about it, unless it is worth no call yet."""
    begins = [reward.service.begin for reward in rewards if reward.service is not None]
    ready, size = self._ready, len(self.job.seeds)
    if not begins and len(ready) * _PARTS < size:
      return
    start = time.perf_counter()
    rows = [conversation.sequence for conversation in ready]
    asked = list(map(to_completion, ready)), [self.job.examples[row // self.job.group_size] for row in rows]
    known = [i for i, conversation in enumerate(ready) if conversation.failed is None]
    for begin in begins:
      begin(*([part[i] for i in known] for part in asked))
    if not begins:
      self._graded = put(self._graded or pending(rewards, size), rows, grade(rewards, *asked, call=self._call))
    self._ready = []
    self._seconds += time.perf_counter() - start

  def take(self, groups: Sequence[int]) -> Gathered:
    """Returns groups that have finished, in the given order, and forgets them."""
    taken = set(groups)
    self.left = [group for group in self.left if group not in taken]
    self.finished -= taken
    rows = [group * self.job.group_size + i for group in groups for i in range(self.job.group_size)]
    graded = self._graded and mapped(lambda x: x[rows], self._graded)
    seconds, self._seconds = self._seconds, 0.0
    return Gathered([self._here.pop(row) for row in rows], graded, seconds)

  def close(self) -> None:
    """Gives up what has not finished."""
    self._playing.close()


def wait_for(playing: Playing, job: Job, *, between: Callable[[], None] = lambda: None, **options: Any) -> Gathered:
  """Waits for the conversations of a batch, those that are cut included.

  Args:
    playing: Conversations that are being played.
    job: What they are.
    between: Function called about ten times a second or more; may raise, which gives up what has
      not finished.
    **options: Other arguments of `Arrivals`.

  Raises:
    EngineError: If the engine has failed.
  """
  return wait_for_groups({0: Arrivals(playing, job, **options)}, between=between)[2]


def wait_for_groups(
  batches: Mapping[int, Arrivals], *, window: int = 1, known: Sequence[int] = (), between: Callable[[], None] = lambda: None
) -> tuple[list[int], Job, Gathered]:
  """Waits for as many groups as a batch has, of the oldest batch or of several; see `window`.

  Args:
    batches: Open batches by their RL step, oldest first. Their groups have numbers: those of a step
      with n groups begin at n · step.
    window: Number of groups to choose from; 1 takes those of the oldest batch.
    known: Numbers of the groups to take, in a run that is repeated; empty to choose them.
    between: Function called about ten times a second or more; may raise, which gives up what has
      not finished.

  Returns:
    The numbers of the groups, oldest first, and what they are as one batch.

  Raises:
    EngineError: If the engine has failed.
  """
  first = next(iter(batches.values())).job
  size = len(first.examples)
  numbered = lambda groups_of: [size * step + group for step, batch in batches.items() for group in groups_of(batch)]
  waiting = numbered(lambda batch: batch.left)
  if not set(known) <= set(waiting):
    raise ReplayDiffersError(f"replay: found the groups {list(known)} in the schedule, expected some of {waiting}, which are open")
  reach = dict(window=waiting[-1] + 1) if known else dict(window=window)
  is_due = True
  try:
    while True:
      if is_due:
        chosen, awaited = choose(known or waiting, set(numbered(lambda batch: batch.finished)), count=size, **reach)
        if len(chosen) == size:
          break
      for batch in (batches[step] for step in dict.fromkeys(number // size for number in awaited)):
        between()
        if batch.look():
          break
      # A choice passes over all groups. In strict order it is another one only once all are here.
      is_due = window > 1 or sum(len(batch.finished) for batch in batches.values()) >= size
  except BaseException:
    for batch in batches.values():
      batch.close()
    raise
  parts = [(batch, [number % size for number in chosen if number // size == step]) for step, batch in batches.items()]
  return chosen, *_joined([(batch, groups) for batch, groups in parts if groups], first)


def _joined(parts: Sequence[tuple[Arrivals, list[int]]], job: Job) -> tuple[Job, Gathered]:
  """Takes groups of several batches that are drawn as `job` is, as one batch."""
  taken = [batch.take(groups) for batch, groups in parts]
  played = numbered(one for part in taken for one in part.played)
  graded = None
  if any(part.graded is not None for part in taken):
    rewards = parts[0][0].rewards or ()
    graded = mapped(lambda *x: np.concatenate(x), *(part.graded or pending(rewards, len(part.played)) for part in taken))
  examples = [batch.job.examples[group] for batch, groups in parts for group in groups]
  return job._replace(examples=examples), Gathered(played, graded, sum(part.seconds for part in taken))


def numbered(conversations: Iterable[Conversation]) -> list[Conversation]:
  """Returns conversations as the sequences of a batch, in their order."""
  # Most batches are in order already, and copies of many conversations cost time.
  return [one if one.sequence == i else one._replace(sequence=i) for i, one in enumerate(conversations)]


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
