"""The rollouts that a run draws ahead of the step that learns from them.

A training loop asks for the rollouts of each step in turn, and says when the sampler may go on:

  ahead.take(step)  -> waits for the step's rollouts; they may have been begun earlier
  ahead.begin(step) -> begins what may be begun once these have arrived
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm.rollouts import pipelining, rollout, versions
from jaxrl_llm.run.sample import begin_queued, launch, move_weights, publish, wait, wait_queued
from jaxrl_llm.run.start import Run


@runtime_checkable
class Ahead(Protocol):
  """How a run draws ahead."""

  @property
  def is_empty(self) -> bool:
    """Whether nothing is begun, so that a checkpoint holds all that the next step depends on."""
    ...

  def take(self, step: int, *, between: Callable[[], None]) -> tuple[rollout.Drawn, dict[str, Any]]:
    """Returns the rollouts of a step, and metrics; calls `between` while it waits."""
    ...

  def begin(self, step: int) -> None:
    """Begins later rollouts, once those of a step have arrived."""
    ...


def make_ahead(run: Run) -> Ahead:
  """Returns how a run draws ahead, by its config."""
  return FromQueue(run) if run.config.rollout.queue else OneStep(run)


class OneStep:
  """At most the next step's rollouts are drawn ahead; see `pipelining`.

  Args:
    run: RL run.
  """

  def __init__(self, run: Run):
    self._run = run
    self._drawing: pipelining.InFlight | None = None

  @property
  def is_empty(self) -> bool:
    """Whether nothing is begun."""
    return self._drawing is None

  def take(self, step: int, *, between: Callable[[], None]) -> tuple[rollout.Drawn, dict[str, Any]]:
    """Returns the rollouts of a step; see `Ahead`."""
    run = self._run
    if self._drawing is None or pipelining.draws_ahead(run.config, step):
      move_weights(run)
    run.phases.begin("rollout")
    current, self._drawing = self._drawing or launch(run, step), None
    drawn, metrics = wait(run, current, between=between)
    # Older weights drew what is carried.
    if run.config.rollout.staleness and not run.config.rollout.spare_prompts:
      drawn = drawn._replace(rollouts=versions.of_one_version(drawn.rollouts, current.version))
    return drawn, metrics | {"rollout/staleness": step - current.version}

  def begin(self, step: int) -> None:
    """Begins the next step's rollouts, to overlap with this one's updates."""
    if pipelining.draws_ahead(self._run.config, step):
      self._drawing = launch(self._run, step + 1)


class FromQueue:
  """Several steps' rollouts are open at a time; see `drawing_queue`.

  Args:
    run: RL run.
  """

  def __init__(self, run: Run):
    self._run, self._begun = run, run.record.rl_steps

  @property
  def is_empty(self) -> bool:
    """Whether nothing is begun."""
    return self._begun <= self._run.record.rl_steps

  def take(self, step: int, *, between: Callable[[], None]) -> tuple[rollout.Drawn, dict[str, Any]]:
    """Returns the rollouts of a step, after it has begun all that may be begun by now."""
    run = self._run
    publish(run, between=between)
    run.phases.begin("rollout")
    for later in range(self._begun, pipelining.horizon(run.config, step)):
      begin_queued(run, later)
      self._begun = later + 1
    return wait_queued(run, step, between=between)

  def begin(self, step: int) -> None:
    """Does nothing: all that may be begun has been."""
