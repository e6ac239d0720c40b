"""Scoring in which one response may fail: nobody knows its reward, so nobody learns from it, and the others count."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.messages import one_line
from jaxrl_llm.rewards.scoring import Outcome, WeightedReward, check_terms, number_of
from jaxrl_llm.text_types import Completion

CAUSES = {
  "raised": "the function raised an exception",
  "wrong_type": "it returned something that is not one number",
  "not_finite": "it returned NaN, an infinity, or a number too large for float32",
  "timeout": "it took longer than it may, and was interrupted or killed",
  "memory": "it asked for more memory than it may have",
  "died": "its process ended: a crash, an exit, too much memory",
  "flooded": "it wrote more output than it may",
}
"""Why a reward may fail; who runs rewards in other processes may add causes of their own, words in lower case."""


class Graded(NamedTuple):
  """Rewards of a batch, some of them perhaps unknown.

  Attributes:
    totals: Σ weight · reward, float32 `[N]`; 0 where a term failed, and not to be learned from.
    parts: each reward by itself, unweighted, float32 `[N]`; 0 where it failed.
    failed: for each response None, or the cause of the first term that failed.
    details: one line for each term of each response that failed, at most `MAX_DETAILS`.
  """

  totals: np.ndarray
  parts: dict[str, np.ndarray]
  failed: list[str | None]
  details: list[str]

  @property
  def valid(self) -> np.ndarray:
    """True where every term is known, `[N]`."""
    return np.array([cause is None for cause in self.failed], bool)


MAX_DETAILS = 20
"""Lines about failures that one batch keeps: a reward that always fails must not flood a log."""

CallFn = Callable[[WeightedReward, Sequence[Completion], Sequence[Mapping[str, Any]]], list[Outcome]]
"""`(term, completions, examples) -> outcomes`, one for each response: `call_here`, or a pool of processes."""


def call_here(reward: WeightedReward, completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]]) -> list[Outcome]:
  """Calls a reward function in this process, one response after the other or all at once. What never returns is not survived here.

  Args:
    reward: the term.
    completions: the responses.
    examples: each response's own row.
  """
  if reward.batch_fn is not None:
    return reward.batch_fn(completions, examples)
  return [attempt(reward.fn, completion, example) for completion, example in zip(completions, examples, strict=True)]


def attempt(fn: Callable[[Completion, Mapping[str, Any]], Any], completion: Completion, example: Mapping[str, Any]) -> Outcome:
  """Calls a reward function once, and makes an outcome of whatever it does.

  Args:
    fn: the function.
    completion: the response.
    example: its row.

  Example:
    >>> from jaxrl_llm.text_types import Completion
    >>> attempt(lambda completion, example: 1 / 0, Completion("4", (1,), 1, True), {})
    Outcome(value=None, cause='raised', detail='ZeroDivisionError: division by zero')
  """
  try:
    value = fn(completion, example)
  except TimeoutError as error:
    return Outcome(None, "timeout", one_line(error))
  except MemoryError as error:
    return Outcome(None, "memory", one_line(error))
  except Exception as error:
    return Outcome(None, "raised", one_line(error))
  number = number_of(value)
  if number is None:
    return Outcome(None, "wrong_type", f"it returned {type(value).__name__}, expected one finite number")
  if not np.isfinite(number):
    return Outcome(None, "not_finite", f"it returned {number}, expected one finite number")
  return Outcome(float(number))


def grade(
  rewards: Sequence[WeightedReward],
  completions: Sequence[Completion],
  examples: Sequence[Mapping[str, Any]],
  *,
  call: CallFn = call_here,
) -> Graded:
  """Rewards of a batch, as `score`, but a term that fails costs its own response only.

  A response with a failed term has no reward: to count it as 0 would teach that it was wrong. Leave it out of the loss and of its group's
  statistics, and log `failure_metrics`.

  Args:
    rewards: the terms, with distinct names.
    completions: the responses.
    examples: each response's own row, so as many rows as responses; nothing is broadcast.
    call: who calls the functions; see `CallFn`.

  Returns:
    The rewards.

  Raises:
    ValueError: unequal lengths, no or repeated or wrongly weighted terms, or a `call` that returned another number of outcomes.

  Example:
    >>> from jaxrl_llm.text_types import Completion
    >>> completions = [Completion(text="4", token_ids=(1,) * n, num_tokens=n, stopped=True) for n in (2, 0)]
    >>> brevity = WeightedReward("brevity", lambda completion, example: 1 / completion.num_tokens)
    >>> graded = grade([brevity], completions, [{}, {}])
    >>> graded.totals.tolist(), graded.failed
    ([0.5, 0.0], [None, 'raised'])
  """
  check_terms(rewards, completions, examples)
  failed: list[str | None] = [None] * len(completions)
  parts, details = {}, []
  for reward in rewards:
    outcomes = list(call(reward, completions, examples))
    if len(outcomes) != len(completions):
      raise ValueError(f"reward {reward.name!r}: found {len(outcomes)} outcomes, expected {len(completions)}, one for each completion")
    for i, outcome in enumerate(outcomes):
      cause = outcome.cause
      if cause is None and (outcome.value is None or not np.isfinite(outcome.value)):
        cause = "not_finite"
      if cause is not None:
        failed[i] = failed[i] or cause
        outcomes[i] = Outcome(0.0, cause)
        if len(details) < MAX_DETAILS:
          details.append(f"reward {reward.name!r}, completion {i}: {cause}: {outcome.detail}"[:500])
    parts[reward.name] = np.array([outcome.value for outcome in outcomes], np.float32)
  totals = sum(reward.weight * parts[reward.name].astype(np.float64) for reward in rewards)  # One rounding, at the end.
  totals = np.where([cause is None for cause in failed], totals, 0.0) if failed else np.zeros(0)
  return Graded(np.asarray(totals, np.float32), parts, failed, details)


def failure_metrics(failed: Sequence[str | None]) -> dict[str, float]:
  """How many responses failed, in all and by cause.

  Args:
    failed: of `Graded`, perhaps of several batches one after the other.

  Returns:
    `rewards/failed`, the number of them; `rewards/failed/<cause>` for every key of `CAUSES` and every other cause that occurred.

  Example:
    >>> metrics = failure_metrics([None, "timeout", "timeout"])
    >>> metrics["rewards/failed"], metrics["rewards/failed/timeout"], metrics["rewards/failed/raised"]
    (2.0, 2.0, 0.0)
  """
  counts = Counter(cause for cause in failed if cause is not None)
  causes = [*CAUSES, *sorted(set(counts) - set(CAUSES))]
  return {"rewards/failed": float(sum(counts.values()))} | {
    f"rewards/failed/{re.sub('[^a-z0-9_]', '_', cause.lower())[:40]}": float(counts[cause]) for cause in causes
  }
