"""The caller of a run's reward functions: safe ones in this process, all others in workers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.rewards import REWARDS, Outcome, RewardSpec, WeightedReward, call_here
from jaxrl_llm.rewards.rubric import Judgements
from jaxrl_llm.rewards.workers import Function, WorkerJob, WorkerPool
from jaxrl_llm.text_types import Completion


class Grader:
  """Callable `(term, completions, examples) -> outcomes` for `rewards.grade`.

  Terms without a spec, and those whose reward is safe, are called in this process. All others are
  called by a pool of worker processes, which is opened at once if needed and closed on leaving the
  context. A term with routes sends each response to the route that its example names. The judges
  among the terms are opened and closed with it.

  Args:
    terms: Terms of the reward.
    judgements: Folder for the judgements of judges, see `Judgements`; None keeps them in memory.
    process: Index of this process among those of the run.
    limits: Settings of the pool, see `WorkerPool`.

  Raises:
    ValueError: If a function cannot be built, a limit is out of range, or a judge does not answer.
  """

  def __init__(self, terms: Sequence[WeightedReward], *, judgements: Path | None = None, process: int = 0, **limits: Any):
    self.pool: WorkerPool | None = None
    self.judgements: Judgements | None = None
    flat = [route for term in terms for route in (term.routes or (term,))]
    self.services = [term.service for term in flat if term.service is not None]
    if functions := {term.name: _function(term.spec) for term in flat if not _stays_here(term)}:
      self.pool = WorkerPool(functions, **limits)
    try:
      if self.services:
        self.judgements = Judgements(judgements, process=process)
      for service in self.services:
        service.open(self.judgements)
    except BaseException:
      self.close()
      raise

  def __call__(self, reward: WeightedReward, completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    if reward.routes:
      return self._routed(reward, completions, examples)
    if _stays_here(reward):
      return call_here(reward, completions, examples)
    return self.pool.call([WorkerJob(reward.name, *pair) for pair in zip(completions, examples, strict=True)])

  def _routed(self, reward: WeightedReward, completions: Sequence[Completion], examples: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    for route in reward.routes:
      own = [i for i, example in enumerate(examples) if example["reward"] == route.name]
      outcomes |= zip(own, self(route, [completions[i] for i in own], [examples[i] for i in own]), strict=True)
    return [outcomes[i] for i in range(len(examples))]

  def waits_for(self) -> str:
    """Describes what the workers are doing; may be called from another thread."""
    workers = "reward functions of this process" if self.pool is None else self.pool.under_way()
    return "; ".join([*(service.waits_for() for service in self.services), workers])

  def metrics(self) -> dict[str, float]:
    """Returns the counts of the judges since the last call; empty without judges."""
    return {name: value for service in self.services for name, value in service.metrics().items()}

  def close(self) -> None:
    """Shuts down the workers and the judges."""
    for service in self.services:
      service.close()
    if self.judgements is not None:
      self.judgements.close()
    if self.pool is not None:
      self.pool.close()

  def __enter__(self) -> "Grader":
    return self

  def __exit__(self, *error: object) -> None:
    self.close()


def _stays_here(term: WeightedReward) -> bool:
  return term.spec is None or REWARDS[term.spec.name].is_safe


def _function(spec: RewardSpec) -> Function:
  reward = REWARDS[spec.name]
  return Function(
    f"{reward.judge.__module__}:{reward.judge.__qualname__}",
    dict(spec.settings) if reward.is_factory else None,
    timeout_s=None if reward.deadline_s is None else reward.deadline_s(spec.settings),
    imports=reward.imports,
  )
