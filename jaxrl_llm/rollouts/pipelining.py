"""Which rollouts are drawn while the learner still learns from others, and with which weights.

Without lag, the rollouts of an RL step are drawn with its own weights: the sampler waits for the learner, and the learner for the sampler.
With a lag of one, a step's rollouts are drawn with the weights of the step before, while that step rewards and learns:

  learner:          | learn 0 | learn 1 | learn 2 | save |         | learn 3 | ...
  sampler: | draw 0 | draw 1  | draw 2  |         |      | draw 3  | draw 4  | ...
  weights:     θ0       θ0        θ1                         θ3        θ3

Nothing is in flight across a checkpoint, so that it holds all that the next step depends on, and a resumed run draws what an unbroken one
does. The price is that the learner waits for one batch after each.
"""

from collections.abc import Callable
from typing import NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm.rollouts.rollout import Drawn

ArriveFn = Callable[[Callable[[], None]], tuple[Drawn, dict[str, float]]]
"""`(between) -> (drawn, metrics)`: waits for rollouts, and calls `between` whenever the host has something to do meanwhile."""


class InFlight(NamedTuple):
  """Rollouts that the sampler has been told to draw.

  Attributes:
    version: Number of RL steps that their weights have behind them.
    arrive: Function that waits for them.
  """

  version: int
  arrive: ArriveFn


def saves(config: ConfigDict, step: int) -> bool:
  """Whether an RL step, counted from 0, ends with a checkpoint."""
  return step + 1 == config.num_steps or (step + 1) % config.checkpoint.every == 0


def draws_ahead(config: ConfigDict, step: int) -> bool:
  """Whether the rollouts of the next RL step are drawn during this one, counted from 0.

  Example:
    >>> config = ConfigDict({"num_steps": 5, "checkpoint": {"every": 3}, "rollout": {"staleness": 1}})
    >>> [draws_ahead(config, step) for step in range(5)]
    [True, True, False, True, False]
  """
  return config.rollout.staleness == 1 and not saves(config, step)
