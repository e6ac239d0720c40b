"""The rollouts that a run has begun: those of the step that learns next, and of later ones.

Without lag, the rollouts of an RL step are drawn with the step's own weights: the sampler waits for
the learner, and the learner for the sampler. With a lag of η, the rollouts of a step are begun η
steps earlier, with the weights of that step, and drawn while the learner grades and learns. For
η = 1:

  learner:          | learn 0 | learn 1 | learn 2 | save |         | learn 3 | ...
  sampler: | draw 0 | draw 1  | draw 2  |         |      | draw 3  | draw 4  | ...
  weights:     θ0       θ0        θ1                         θ3        θ3

No rollouts are in flight across a checkpoint. It therefore holds all that the next step depends on,
and a resumed run draws the same rollouts as an unbroken one. The price is that the learner waits
for one batch after each checkpoint.
"""

from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.rollouts.arrivals import DrawnBatch
from jaxrl_llm.rollouts.window import Lengths, steps_ahead
from jaxrl_llm.run.setup.start import Run
from jaxrl_llm.run.steps.sample import InFlight, launch, move_weights, publish, wait, window_of


def saves(config: ConfigDict, step: int) -> bool:
  """Returns whether an RL step, counted from 0, ends with a checkpoint."""
  return step + 1 == config.num_steps or (step + 1) % config.checkpoint.every == 0


def horizon(config: ConfigDict, step: int) -> int:
  """Returns the first RL step that may not be begun yet at the start of a step; both count from 0.

  Example:
    >>> section = {"staleness": 2, "window": 0.0, "num_prompts": 8}
    >>> config = ConfigDict({"num_steps": 9, "checkpoint": {"every": 4}, "rollout": section})
    >>> [horizon(config, step) for step in range(9)]
    [3, 4, 4, 4, 7, 8, 8, 8, 9]
  """
  last = next(later for later in range(step, config.num_steps) if saves(config, later))
  ahead = steps_ahead(window_of(config), staleness=config.rollout.staleness, num_prompts=config.rollout.num_prompts)
  return min(step + ahead, last) + 1


class Ahead:
  """Begins rollouts as early as the lag allows, and waits for those of a step.

  Args:
    run: RL run.
  """

  def __init__(self, run: Run):
    self._run, self._next = run, run.record.rl_steps
    self._open: dict[int, InFlight] = {}
    self._queue, self._lengths = run.experiment.drawing.queue, None
    if window_of(run.config) > 1:
      self._lengths = Lengths(run.record.rl_steps)
    # Groups that a step carries on are known once those of the step before have arrived, and other
    # weights may wait for them.
    self._one_by_one = run.config.rollout.spare_prompts > 0 or self._queue.waits

  @property
  def is_empty(self) -> bool:
    """Whether nothing is begun, so that a checkpoint holds all that the next step depends on."""
    return not self._open

  def take(self, step: int, *, between: Callable[[], None]) -> tuple[DrawnBatch, dict[str, Any]]:
    """Returns the rollouts of a step, and metrics, once all is begun that may be begun by then.

    Args:
      step: RL step, from 0.
      between: Function called while this waits. If it raises, the rollouts are given up.
    """
    run, last = self._run, horizon(self._run.config, step)
    if self._queue.joins:
      publish(run, between=between)  # What is in progress may go on with them.
    elif self._next < last:
      # `launch` would do it as well, within the time of the rollouts.
      move_weights(run)
    run.phases.begin("rollout")
    self._begin(step + 1 if self._one_by_one else last)
    drawn, metrics = wait(run, step, *self._open.values(), lengths=self._lengths, between=between)
    self._open = {own: begun for own, begun in self._open.items() if begun.arrivals.left}
    self._begin(last)
    return drawn, metrics

  def _begin(self, end: int) -> None:
    """Begins the rollouts of all steps before `end`."""
    for step in range(self._next, end):
      self._open[step] = launch(self._run, step)
    self._next = max(self._next, end)
