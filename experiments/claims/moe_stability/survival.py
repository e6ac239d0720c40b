"""When a run has collapsed, and what a set of runs says of the hazard. No model in here."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

DECAY = 0.7  # Of the running mean of the reward, a rollout batch.
HOLD = 4
"""Rollout batches for which the running reward must stay below half of its maximum: 32 updates at N = 8, about the 30 of the criterion."""
LOW_ENTROPY = 0.05
SPIKE = 10.0


def collapse(rows: Sequence[Mapping]) -> tuple[int, str] | None:
  """When a run collapsed, and by what.

  The first of: the running mean of the reward is below half of its maximum for `HOLD` rollout batches (it counts from the first of them);
  the entropy is below 5 % of that of the first rollout batch; the gradient's norm is above 10 times the median of the rollout batches
  before, of which there are three at least; a loss is not finite.

  Args:
    rows: of `bed.train`, in order.

  Returns:
    The number of the rollout batch, from 1, and "reward", "entropy", "gradient" or "nan"; None for a run that has not.

  Example:
    >>> flat = {"entropy": 1.0, "grad_norm": 1.0, "finite": True}
    >>> collapse([flat | {"reward": reward} for reward in (0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0)])
    (4, 'reward')
  """
  mean = highest = rows[0]["reward"]
  below, found = 0, []
  for index, row in enumerate(rows):
    mean = DECAY * mean + (1 - DECAY) * row["reward"]
    highest = max(highest, mean)
    below = below + 1 if mean < highest / 2 else 0
    if below >= HOLD:
      found.append((index + 2 - HOLD, "reward"))
    if row["entropy"] < LOW_ENTROPY * rows[0]["entropy"]:
      found.append((index + 1, "entropy"))
    if index >= 3 and row["grad_norm"] > SPIKE * float(np.median([before["grad_norm"] for before in rows[:index]])):
      found.append((index + 1, "gradient"))
    if not row["finite"]:
      found.append((index + 1, "nan"))
    if found:
      return min(found)
  return None


def kaplan_meier(lives: Sequence[tuple[float, bool]]) -> tuple[list[float], list[float]]:
  """The survival curve of runs, as the corners of a staircase.

  Args:
    lives: of each run the time at which it collapsed, or at which it was left alive, and whether it collapsed.

  Example:
    >>> kaplan_meier([(1, True), (2, False), (3, True), (4, False)])
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


def log_hazard(lives: Sequence[tuple[float, bool]]) -> float:
  """log of the collapses a unit of time at risk; half a collapse is added, so that none has a logarithm, too."""
  return math.log((sum(ended for _, ended in lives) + 0.5) / sum(time for time, _ in lives))


def hazard_quotient(
  more: Mapping[int, tuple[float, bool]], less: Mapping[int, tuple[float, bool]], *, draws: int = 4000, seed: int = 0
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
