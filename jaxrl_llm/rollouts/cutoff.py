"""Where a batch of conversations is cut once enough of its groups are complete.

The clock is the number of tokens that each conversation has drawn in this step, so no delay of an
environment, and no order of arrival, changes what a step learns from. With two of three groups to
learn from, of two conversations each:

  a  ─── end 3   ───── end 5           complete at 5
  b  ─ end 1     ───────── end 9       cut: its second conversation goes on after 7 tokens
  c  ─────── end 7   ── end 2          complete at 7: the cut

A conversation that has drawn more by then is shortened to what it had drawn at the cut.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxrl_llm.rollouts.jobs import Conversation
from jaxrl_llm.types import StopReason

_NEVER = np.iinfo(np.int64).max


class Cutoff:
  """The cut of a batch, as far as it is known. It is not safe for threads by itself.

  Args:
    num_sequences: Number of conversations.
    group_size: Number of conversations per prompt (G).
    enough: Number of complete groups after which the batch is cut.

  Attributes:
    bound: Latest cut that is still possible; None as long as any is. What has drawn as much need
      not draw more.

  Example:
    >>> cutoff = Cutoff(2, group_size=1, enough=1)
    >>> cutoff.end(0, 7)
    >>> cutoff.bound, cutoff.certain([7, 4]), cutoff.is_decided
    (7, 4, False)
    >>> cutoff.park(1)
    >>> cutoff.certain([7, 9]), cutoff.is_decided
    (7, True)
  """

  def __init__(self, num_sequences: int, *, group_size: int, enough: int):
    self._ends: Int[np.ndarray, " N"] = np.full(num_sequences, _NEVER)
    self._is_settled = np.zeros(num_sequences, bool)
    self._group_size, self._enough = group_size, enough
    self.bound: int | None = None

  def end(self, sequence: int, drawn: int) -> None:
    """Records the number of tokens that a conversation drew in this step before it ended."""
    self._ends[sequence], self._is_settled[sequence] = drawn, True
    bound = self._of_groups(self._ends)
    self.bound = None if bound == _NEVER else bound

  def park(self, sequence: int) -> None:
    """Notes that a conversation has reached `bound`, and all that was asked of it has come."""
    self._is_settled[sequence] = True

  def certain(self, drawn: Sequence[int]) -> int:
    """Returns the earliest cut that is still possible; what ends by then has ended for good.

    Args:
      drawn: Number of tokens that each conversation has drawn in this step so far.
    """
    return self._of_groups(np.where(self._ends == _NEVER, np.array(drawn, np.int64), self._ends))

  @property
  def is_decided(self) -> bool:
    """Whether `bound` is the cut."""
    return self.bound is not None and bool(self._is_settled.all())

  def _of_groups(self, times: Int[np.ndarray, " N"]) -> int:
    return int(np.sort(times.reshape(-1, self._group_size).max(axis=1))[self._enough - 1])


def cut(conversation: Conversation, num_written: int) -> Conversation:
  """Returns an unfinished conversation of the first tokens that the policy wrote.

  The reply to a turn that ends with the last of them is kept.
  """
  positions = np.flatnonzero(conversation.written)
  # It wrote less if the policy failed in the turn that is cut, of which nothing is left.
  num_written = min(num_written, len(positions))
  size = int(positions[num_written]) if num_written < len(positions) else len(conversation.tokens)
  # What was fed behind the last token that was drawn depends on how far the engine ran ahead.
  fed = len(conversation.prompt) + int(positions[num_written - 1]) if num_written else 0
  return conversation._replace(
    tokens=conversation.tokens[:size],
    logprobs=conversation.logprobs[:size],
    written=conversation.written[:size],
    turns=tuple(turn for turn in conversation.turns if turn.end < size),
    reason=StopReason.UNFINISHED,
    failed=None,
    discarded_tokens=len(positions) - num_written,
    routes=None if conversation.routes is None else conversation.routes[:fed],
    versions=conversation.versions[:size],
  )
