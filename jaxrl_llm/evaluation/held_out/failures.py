"""Evaluations and steps with too few rewards to go on."""

from collections import Counter
from collections.abc import Collection


class NoRewardError(ValueError):
  """So many responses have no reward that to go on would mean little."""


def refuse_failures(who: str, causes: Collection[str | None], detail: str, *, limit: float = 1.0, setting: str = "") -> None:
  """Stops where too many responses have no reward, or all of them.

  Args:
    who: gives the rewards.
    causes: of each response why it has none; None where it has one.
    detail: of the first that has none, in one line.
    limit: fraction of responses that may have none.
    setting: that the limit comes from.

  Raises:
    NoRewardError: one line with the causes and the detail.

  Example:
    >>> refuse_failures("rewards", ["timeout", None, "timeout", "raised"], "ZeroDivisionError: division by zero", limit=0.5, setting="half")
    Traceback (most recent call last):
    ...
    jaxrl_llm.evaluation.held_out.failures.NoRewardError: rewards: found none for 3 of 4 responses (timeout 2, raised 1), expected a
    number for most (half); the first: ZeroDivisionError: division by zero
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
