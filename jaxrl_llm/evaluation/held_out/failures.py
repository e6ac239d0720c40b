"""Errors for evaluations and steps in which too few responses have a reward."""

from collections import Counter
from collections.abc import Collection


class NoRewardError(ValueError):
  """Error for so many responses without a reward that continuing would mean little."""


def refuse_failures(who: str, causes: Collection[str | None], detail: str, *, limit: float = 1.0, setting: str = "") -> None:
  """Raises an error if too many responses, or all of them, have no reward.

  Args:
    who: Source of the rewards, for the message.
    causes: Reason why each response has no reward; None if it has one.
    detail: One-line detail of the first response without a reward.
    limit: Largest fraction of responses that may have no reward.
    setting: Name of the setting that defines the limit, for the message.

  Raises:
    NoRewardError: If more than `limit` of the responses, or all of them, have no reward. One line,
      with the causes and the detail.

  Example:
    >>> refuse_failures("rewards", ["timeout", None, "timeout", "raised"], "ZeroDivisionError: division by zero", limit=0.5, setting="half")
    Traceback (most recent call last):
    ...
    jaxrl_llm.evaluation.held_out.failures.NoRewardError: rewards: found none for 3 of 4 responses
    (timeout 2, raised 1), expected a number for most (half); the first: ZeroDivisionError: division
    by zero
  """
  counts = Counter(cause for cause in causes if cause)
  failed = sum(counts.values())
  if failed < len(causes) and failed <= limit * len(causes):
    return
  share = f"for {failed} of {len(causes)} responses" if failed < len(causes) else f"for any of {len(causes)} responses"
  shown = ", ".join(f"{cause} {count}" for cause, count in counts.most_common())
  raise NoRewardError(
    f"{who}: found none {share} ({shown}), expected a number for most{f' ({setting})' if failed < len(causes) else ''}; the first: {detail}"
  )
