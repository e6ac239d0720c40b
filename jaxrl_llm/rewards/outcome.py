"""Outcomes of single reward calls, and the rewards of a batch, some of which may be unknown."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl_llm.messages import one_line
from jaxrl_llm.text_types import Completion, RewardFn

CAUSES = {
  "raised": "the function raised an exception",
  "wrong_type": "it returned something that is not one number",
  "not_finite": "it returned NaN, an infinity, or a number too large for float32",
  "timeout": "it exceeded its time limit, and was interrupted or killed",
  "memory": "it exceeded its memory limit",
  "died": "its process ended: a crash, an exit, or too much memory",
  "flooded": "it exceeded its output limit",
}
"""Causes of a failed reward.

Code that runs rewards in other processes may add its own causes, as lower-case words.
"""


PENDING = "pending"
"""Value for the cause of failure of a response that is graded later, at the end of its batch."""


class Outcome(NamedTuple):
  """The outcome of one call of one reward function.

  Attributes:
    value: Reward; None if the call failed, which is never a reward of 0.
    cause: Cause of the failure, a key of `CAUSES`; None if the call did not fail.
    detail: Description of the failure in one line, for a log.
  """

  value: float | None
  cause: str | None = None
  detail: str = ""


class RewardSpec(NamedTuple):
  """A reward function as plain data.

  Unlike a function, it can be pickled, written as JSON and compared. `make` makes the function.

  Attributes:
    name: Key of `REWARDS`.
    settings: Settings of the reward: plain numbers, text, lists and mappings.
  """

  name: str
  settings: Mapping[str, Any] = {}


class Service(Protocol):
  """A service that judges responses while this process does something else."""

  def open(self, *args: Any) -> None:
    """Checks before a run that the service works. Raises a ValueError of one line if not."""
    ...

  def begin(self, completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]]) -> Callable[[], list[Outcome]]:
    """Begins to judge responses, and returns a function that waits for the outcomes."""
    ...

  def waits_for(self) -> str:
    """Describes what is under way; may be called from another thread."""
    ...

  def metrics(self) -> dict[str, float]:
    """Returns counts since the last call."""
    ...

  def close(self) -> None:
    """Gives up what is under way."""
    ...


GroupFn = Callable[[np.ndarray, Sequence[Completion]], Sequence[float]]
"""Function `(verdicts, completions) -> rewards` of the responses to one prompt that have a verdict.

Verdicts are those of `Graded`.
"""


class WeightedReward(NamedTuple):
  """One term of the total reward.

  Attributes:
    name: Name of the term in logs and error messages.
    fn: Reward function.
    weight: Factor in the total.
    spec: Spec from which another process builds the function; None for a function that stays in
      this process.
    routes: Terms from which each example's `reward` selects its own by name; empty for a term that
      judges every example.
    shapes: Whether the term only shapes the reward, such as a length penalty. Samples that differ
      only in such terms are not told apart.
    batch_fn: Function `(completions, examples) -> outcomes` that judges many responses at once in
      this process. None calls `fn` for each response.
    monitors: Whether the term is only logged: it is in no total, and its failure, NaN in
      `Graded.parts`, costs no response its reward.
    service: Service that judges the responses; it begins before other terms are called. None for a
      term that is a function.
    steps: Function `(completion, example) -> [(index of a step's last token, reward), ...]` that
      divides the term among the steps of a response; None for a term of the response as a whole.
    of_group: Function of all responses to one prompt that gives the term once the others are known
      (`with_group_terms`); until then it is 0. None for a term that judges each response by itself.
  """

  name: str
  fn: RewardFn
  weight: float = 1.0
  spec: RewardSpec | None = None
  shapes: bool = False
  routes: tuple["WeightedReward", ...] = ()
  batch_fn: Callable[[Sequence[Completion], Sequence[Mapping[str, Any]]], list[Outcome]] | None = None
  monitors: bool = False
  service: Service | None = None
  steps: Callable[[Completion, Mapping[str, Any]], list[tuple[int, float]]] | None = None
  of_group: GroupFn | None = None


class Graded(NamedTuple):
  """Rewards of a batch, one array entry per response, some of which may be unknown.

  Attributes:
    totals: Σ weight · reward, float32 `[N]`; 0 if a term failed, in which case the sample must not
      be learned from.
    parts: Unweighted reward of each term, float32 `[N]`; 0 if the term failed, and NaN if it is
      only a monitor.
    verdicts: Sum without the terms that only shape the reward, float32 `[N]`.
    failed: Cause of the first term that failed, or None; object array `[N]`.
    details: Description of that failure in one line, or ""; object array `[N]`.
  """

  totals: np.ndarray
  parts: dict[str, np.ndarray]
  verdicts: np.ndarray
  failed: np.ndarray
  details: np.ndarray

  @property
  def valid(self) -> np.ndarray:
    """Mask of the responses with every term known, `[N]`."""
    return np.equal(self.failed, None)

  @property
  def detail(self) -> str:
    """First failure in one line; empty if there is none."""
    return next(filter(None, self.details), "")


def mapped(fn: Callable[..., np.ndarray], *graded: Graded) -> Graded:
  """Applies a function to each array of one or more gradings of the same terms.

  The terms keep their order, since the first term of a task is its verifier. `jax.tree.map` would
  sort them.
  """
  parts = {name: fn(*(x.parts[name] for x in graded)) for name in graded[0].parts}
  rest = {name: fn(*(getattr(x, name) for x in graded)) for name in Graded._fields if name != "parts"}
  return Graded(parts=parts, **rest)


CallFn = Callable[[WeightedReward, Sequence[Completion], Sequence[Mapping[str, Any]]], list[Outcome]]
"""Type of a caller `(term, completions, examples) -> outcomes`, with one outcome per response.

`call_here` is one, and a pool of processes is another.
"""


def call_here(reward: WeightedReward, completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]]) -> list[Outcome]:
  """Calls a reward function in this process, for one response after another or all at once.

  A call that never returns hangs this process.
  """
  if reward.batch_fn is not None:
    return reward.batch_fn(completions, examples)
  return [attempt(reward.fn, completion, example) for completion, example in zip(completions, examples, strict=True)]


def attempt(fn: Callable[[Completion, Mapping[str, Any]], Any], completion: Completion, example: Mapping[str, Any]) -> Outcome:
  """Calls a reward function once, and turns its result or exception into an outcome.

  Example:
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
  rewards: Sequence[WeightedReward], completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]], *, call: CallFn = call_here
) -> Graded:
  """Calls every term for every response. A failed term affects only its own response.

  A response with a failed term has no reward: counting it as 0 would teach that it was wrong. Leave
  it out of the loss and of its group's statistics, and log `failure_metrics`. No term is called for
  a conversation whose environment failed, since its reward is unknown.

  Args:
    rewards: Terms with distinct names.
    completions: Responses to grade.
    examples: Row of each response. Nothing is broadcast, so there are as many rows as responses.
    call: Caller of the reward functions; see `CallFn`.

  Raises:
    ValueError: If the lengths differ, there are no terms, terms are repeated or have a non-finite
      weight, or `call` returned a different number of outcomes.

  Example:
    >>> completions = [Completion(text="4", token_ids=(1,) * n, num_tokens=n, stopped=True) for n in (2, 0)]
    >>> brevity = WeightedReward("brevity", lambda completion, example: 1 / completion.num_tokens)
    >>> graded = grade([brevity], completions, [{}, {}])
    >>> graded.totals.tolist(), graded.failed.tolist()
    ([0.5, 0.0], [None, 'raised'])
  """
  names = [reward.name for reward in rewards]
  if not names or len(set(names)) != len(names):
    raise ValueError(f"rewards: found {names}, expected one or more distinct names")
  if len(completions) != len(examples):
    raise ValueError(f"rewards: found {len(completions)} completions and {len(examples)} examples, expected as many of each")
  for reward in rewards:
    if not np.isfinite(reward.weight):
      raise ValueError(f"reward {reward.name!r}: found weight {reward.weight}, expected a finite number")
  asked = [i for i, completion in enumerate(completions) if completion.failed is None]
  asked_completions, asked_examples = [completions[i] for i in asked], [examples[i] for i in asked]
  parts, failures = {}, {i: completion.failed for i, completion in enumerate(completions) if completion.failed is not None}
  begun = {reward.name: reward.service.begin(asked_completions, asked_examples) for reward in rewards if reward.service is not None}
  for reward in rewards:
    if reward.of_group is not None:
      parts[reward.name] = np.zeros(len(completions), np.float32)
      continue
    outcomes = list(begun[reward.name]() if reward.name in begun else call(reward, asked_completions, asked_examples))
    if len(outcomes) != len(asked):
      raise ValueError(f"reward {reward.name!r}: found {len(outcomes)} outcomes, expected {len(asked)}, one for each completion")
    parts[reward.name] = np.zeros(len(completions), np.float32)
    for i, (value, cause, detail) in zip(asked, outcomes, strict=True):
      if cause is None and (value is None or not np.isfinite(value)):
        cause = "not_finite"
      if cause is None:
        parts[reward.name][i] = value
      elif reward.monitors:
        parts[reward.name][i] = np.nan
      else:
        failures.setdefault(i, (cause, f"reward {reward.name!r}, completion {i}: {cause}: {detail}"[:500]))
  return weigh(rewards, parts, failures)


def weigh(rewards: Sequence[WeightedReward], parts: dict[str, np.ndarray], failures: Mapping[int, tuple[str, str]]) -> Graded:
  """Sums the terms of a batch.

  Args:
    rewards: Terms of the reward.
    parts: Unweighted reward of each term, as in `Graded`.
    failures: Cause and one-line description of the failure of each response without a reward, by
      its index.
  """
  count = len(parts[rewards[0].name])
  failed, details = np.full(count, None, object), np.full(count, "", object)
  for i, (cause, detail) in failures.items():
    failed[i], details[i] = cause, detail
  # Rounded once, at the end.
  weighted = [(reward, reward.weight * parts[reward.name].astype(np.float64)) for reward in rewards if not reward.monitors]
  totals = np.where(np.equal(failed, None), sum(part for _, part in weighted), 0.0)
  # Summed separately rather than by subtraction: equal verdicts are then equal to the last bit.
  verdicts = sum((part for reward, part in weighted if not reward.shapes), np.zeros(count))
  return Graded(np.float32(totals), parts, np.float32(verdicts), failed, details)


def failures_of(graded: Graded) -> dict[int, tuple[str, str]]:
  """Returns the cause and description of each response's failure, by its index, as for `weigh`."""
  return {int(i): (graded.failed[i], graded.details[i]) for i in np.flatnonzero(~graded.valid)}


def with_group_terms(
  rewards: Sequence[WeightedReward], graded: Graded, completions: Sequence[Completion], group_size: int
) -> Graded:
  """Returns the rewards of a batch with the terms that depend on all responses to a prompt.

  Args:
    rewards: Terms that the batch was graded with.
    graded: Rewards of the batch, in which those terms are 0.
    completions: Responses of the batch; those to one prompt are consecutive.
    group_size: Number of responses per prompt.

  Example:
    >>> completions = [Completion(text="4", token_ids=(1,) * n, num_tokens=n, stopped=True) for n in (2, 4)]
    >>> best = lambda verdicts, completions: [float(verdict == max(verdicts)) for verdict in verdicts]
    >>> terms = [WeightedReward("length", lambda y, example: y.num_tokens), WeightedReward("best", lambda y, example: 0.0, of_group=best)]
    >>> with_group_terms(terms, grade(terms, completions, [{}] * 2), completions, 2).totals.tolist()
    [2.0, 5.0]
  """
  parts = dict(graded.parts)
  for term in rewards:
    if term.of_group is not None:
      parts[term.name] = np.zeros(len(completions), np.float32)
      for rows in np.split(np.arange(len(completions)), len(completions) // group_size):
        rows = rows[graded.valid[rows]]
        if len(rows):
          parts[term.name][rows] = term.of_group(graded.verdicts[rows], [completions[i] for i in rows])
  return weigh(rewards, parts, failures_of(graded))


def pending(rewards: Sequence[WeightedReward], count: int) -> Graded:
  """Makes rewards of responses that are yet to be graded."""
  parts = {reward.name: np.zeros(count, np.float32) for reward in rewards}
  return weigh(rewards, parts, dict.fromkeys(range(count), (PENDING, "")))


def put(graded: Graded, rows: Sequence[int] | np.ndarray, own: Graded) -> Graded:
  """Replaces the rewards of the responses in `rows` by `own`, which holds theirs alone."""

  def filled(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[rows] = values
    return x

  return mapped(filled, graded, own)


def failure_metrics(failed: Collection[str | None]) -> dict[str, float]:
  """Counts failed responses, in total and by cause.

  Args:
    failed: Cause of each response's failure, or None if it has a reward; see `Graded`.

  Returns:
    `rewards/failed`, the total, and `rewards/failed/<cause>` for every key of `CAUSES` and every
    other cause that occurred.

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


class NoRewardError(ValueError):
  """Error for so many responses without a reward that continuing would mean little."""


def refuse_failures(who: str, graded: Graded, *, limit: float = 1.0, setting: str = "") -> None:
  """Raises an error if too many responses, or all of them, have no reward.

  Args:
    who: Source of the rewards, for the message.
    graded: Rewards of the responses.
    limit: Largest fraction of responses that may have no reward.
    setting: Name of the setting that defines the limit, for the message.

  Raises:
    NoRewardError: If more than `limit` of the responses, or all of them, have no reward. One line,
      with the causes and the detail.

  Example:
    >>> failures = {0: ("timeout", "no reply in 10 s"), 2: ("timeout", "no reply in 10 s"), 3: ("raised", "1 / 0")}
    >>> graded = weigh([WeightedReward("right", len)], {"right": np.zeros(4)}, failures)
    >>> refuse_failures("rewards", graded, limit=0.5, setting="half")
    Traceback (most recent call last):
    ...
    jaxrl_llm.rewards.outcome.NoRewardError: rewards: found none for 3 of 4 responses
    (timeout 2, raised 1), expected a number for most (half); the first: no reply in 10 s
  """
  counts, size = Counter(filter(None, graded.failed)), len(graded.failed)
  failed = sum(counts.values())
  if failed < size and failed <= limit * size:
    return
  share = f"for {failed} of {size} responses" if failed < size else f"for any of {size} responses"
  shown = ", ".join(f"{cause} {count}" for cause, count in counts.most_common())
  limited = f" ({setting})" if failed < size else ""
  raise NoRewardError(f"{who}: found none {share} ({shown}), expected a number for most{limited}; the first: {graded.detail}")


def number_of(value: Any) -> np.float32 | None:
  """Converts a reward function's result to float32, possibly non-finite.

  Returns None if the result is not one real number.
  """
  try:
    number = np.asarray(value)
  except Exception:  # Some objects cannot be converted to arrays and raise errors of their own.
    return None
  if number.shape != () or number.dtype.kind not in "biuf":
    return None
  with np.errstate(over="ignore"):  # Values too large for float32 become infinite.
    return np.float32(number)
