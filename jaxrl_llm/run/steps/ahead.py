"""The rollouts that a run has begun: those of the step that learns next, and of later ones."""

from collections.abc import Callable
from typing import Any

from jaxrl_llm.rollouts import lag, rollout
from jaxrl_llm.run.setup.start import Run
from jaxrl_llm.run.steps.sample import InFlight, launch, move_weights, publish, wait


class Ahead:
  """Begins rollouts as early as the lag allows, and waits for those of a step; see `rollouts.lag`.

  Args:
    run: RL run.
  """

  def __init__(self, run: Run):
    self._run, self._next = run, run.record.rl_steps
    self._open: dict[int, InFlight] = {}
    self._queue = run.experiment.drawing.queue
    # Groups that a step carries on are known once those of the step before have arrived, and other
    # weights may wait for them.
    self._one_by_one = run.config.rollout.spare_prompts > 0 or self._queue.waits

  @property
  def is_empty(self) -> bool:
    """Whether nothing is begun, so that a checkpoint holds all that the next step depends on."""
    return not self._open

  def take(self, step: int, *, between: Callable[[], None]) -> tuple[rollout.DrawnBatch, dict[str, Any]]:
    """Returns the rollouts of a step, and metrics, once all is begun that may be begun by then.

    Args:
      step: RL step, from 0.
      between: Function called while this waits. If it raises, the rollouts are given up.
    """
    run, horizon = self._run, lag.horizon(self._run.config, step)
    if self._queue.joins:
      publish(run, between=between)  # What is in progress may go on with them.
    elif self._next < horizon:
      # `launch` would do it as well, within the time of the rollouts.
      move_weights(run)
    run.phases.begin("rollout")
    self._begin(step + 1 if self._one_by_one else horizon)
    drawn, metrics = wait(run, self._open.pop(step), between=between)
    self._begin(horizon)
    return drawn, metrics

  def _begin(self, horizon: int) -> None:
    """Begins the rollouts of all steps before `horizon`."""
    for step in range(self._next, horizon):
      self._open[step] = launch(self._run, step)
    self._next = max(self._next, horizon)
