"""The lag of rollouts: which are drawn while the learner runs, and with which weights.

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

from ml_collections import ConfigDict


def saves(config: ConfigDict, step: int) -> bool:
  """Returns whether an RL step, counted from 0, ends with a checkpoint."""
  return step + 1 == config.num_steps or (step + 1) % config.checkpoint.every == 0


def horizon(config: ConfigDict, step: int) -> int:
  """Returns the first RL step that may not be begun yet at the start of a step; both count from 0.

  Example:
    >>> config = ConfigDict({"num_steps": 9, "checkpoint": {"every": 4}, "rollout": {"staleness": 2}})
    >>> [horizon(config, step) for step in range(9)]
    [3, 4, 4, 4, 7, 8, 8, 8, 9]
  """
  last = next(later for later in range(step, config.num_steps) if saves(config, later))
  return min(step + config.rollout.staleness, last) + 1
