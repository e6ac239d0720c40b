"""The smallest difference between two evaluations that problems and samples can show."""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxrl_llm.evaluation.repeated import avg_at_n


class Spread(NamedTuple):
  """Variances of the rewards of repeated samples.

  Attributes:
    between: Variance of the problems' expected rewards.
    within: Mean variance of a problem's samples.
  """

  between: float
  within: float


WIDEST = Spread(0.0, 0.25)
"""Spread of samples half of which are right, on problems of the same difficulty."""


def spread_of(rewards: Float[np.ndarray, "n s"]) -> Spread:
  """Estimates the spread of samples without bias, by an analysis of variance.

  within = mean_j s²_j,  between = max(0, s²(means) − within / s)

  Args:
    rewards: Reward of each sample; unknown ones are NaN, and problems with fewer than two known
      ones are left out.

  Returns:
    The spread. It is `WIDEST` if there are fewer than two such problems, or all rewards are equal,
    from which no spread follows.

  Example:
    >>> spread_of(np.array([[1., 1.], [0., 0.]]))
    Spread(between=0.5, within=0.0)
  """
  counts = np.sum(~np.isnan(rewards), axis=1)
  rewards, counts = rewards[counts >= 2], counts[counts >= 2]
  if len(rewards) < 2:
    return WIDEST
  within = float(np.mean(np.nanvar(rewards, axis=1, ddof=1)))
  between = max(0.0, float(np.var(avg_at_n(rewards), ddof=1) - within * np.mean(1 / counts)))
  return Spread(between, within) if between + within > 0 else WIDEST


def smallest_difference(
  spread: Spread, *, problems: int, samples: int, kept: float = 1.0, power: float = 0.8, level: float = 0.05
) -> float:
  """Returns the smallest difference of two evaluations on the same problems that is likely seen.

  δ = (z(1 − level/2) + z(power)) · √(V / n),  V = 2·((1 − kept)·between + within / s)

  n is the number of problems and s that of samples. V is the variance of a problem's difference
  between the two evaluations, which are compared problem by problem. A difference is seen if the
  interval of `bootstrap_interval` over the problems' differences does not contain 0.

  Args:
    spread: Spread of both evaluations.
    problems: Number of problems.
    samples: Number of samples per problem.
    kept: Correlation, over problems, of the expected rewards in the two evaluations: 1 if the
      policy improves by as much on every problem, 0 if which problems are hard is drawn anew.
    power: Probability that the difference is seen.
    level: Probability that a difference is seen where there is none.

  Example:
    >>> round(smallest_difference(Spread(between=0.1, within=0.15), problems=256, samples=4), 3)
    0.048

  References:
    Adding Error Bars to Evals: A Statistical Approach to Language Model Evaluations,
    arXiv:2411.00640, 2024.

  Note:
    Rewards near 0 or 1 spread less, so that a policy that comes from there, or arrives there, has
    other spreads before and after.
  """
  return _reach(power, level) * (_variance(spread, samples, kept) / problems) ** 0.5


def problems_needed(
  spread: Spread,
  difference: float,
  *,
  samples: int,
  kept: float = 1.0,
  power: float = 0.8,
  level: float = 0.05,
) -> int:
  """Returns the number of problems at which `smallest_difference` is `difference`, rounded up.

  Example:
    >>> problems_needed(Spread(between=0.1, within=0.15), 0.05, samples=4)
    236
  """
  return int(np.ceil(_variance(spread, samples, kept) * (_reach(power, level) / difference) ** 2))


def _variance(spread: Spread, samples: int, kept: float) -> float:
  return 2 * ((1 - kept) * spread.between + spread.within / samples)


def _reach(power: float, level: float) -> float:
  quantile = NormalDist().inv_cdf
  return quantile(1 - level / 2) + quantile(power)
