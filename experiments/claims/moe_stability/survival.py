"""What a set of trials, each with the time of its collapse, says of the hazard. No model in here."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Life(NamedTuple):
  """How long a trial stood.

  Attributes:
    time: at which it collapsed, or at which it was left alive.
    ended: whether it collapsed.
  """

  time: float
  ended: bool


def kaplan_meier(lives: Sequence[Life]) -> tuple[list[float], list[float]]:
  """The survival curve of trials, as the corners of a staircase.

  Args:
    lives: of the trials.

  Example:
    >>> kaplan_meier([Life(1, True), Life(2, False), Life(3, True), Life(4, False)])
    ([0.0, 1.0, 3.0, 4.0], [1.0, 0.75, 0.375, 0.375])
  """
  times, alive = [0.0], [1.0]
  for time in sorted({time for time, ended in lives if ended}):
    at_risk = sum(mine >= time for mine, _ in lives)
    ends = sum(mine == time and ended for mine, ended in lives)
    times.append(float(time))
    alive.append(alive[-1] * (1 - ends / at_risk))
  times.append(float(max(time for time, _ in lives)))
  return times, [*alive, alive[-1]]


def log_hazard(lives: Sequence[Life]) -> float:
  """log of the collapses a unit of time at risk; half a collapse is added, so that none has a logarithm, too."""
  return math.log((sum(ended for _, ended in lives) + 0.5) / sum(time for time, _ in lives))


def hazard_quotient(
  more: Mapping[int, Life], less: Mapping[int, Life], *, draws: int = 4000, seed: int = 0
) -> dict[str, float]:
  """log of the quotient of two arms' hazards, and its bootstrap 95 % interval over the paired seeds.

  Args:
    more: of each seed its life.
    less: the same of the arm that is divided by.
    draws: of the bootstrap.
    seed: of it.
  """
  seeds, rng = sorted(more), np.random.default_rng(seed)
  quotient = lambda chosen: log_hazard([more[s] for s in chosen]) - log_hazard([less[s] for s in chosen])
  found = [quotient(rng.choice(seeds, len(seeds))) for _ in range(draws)]
  low, high = np.quantile(found, (0.025, 0.975))
  return {"mean": quotient(seeds), "low": float(low), "high": float(high)}
