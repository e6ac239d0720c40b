"""Elo ratings estimated from the problems that a contestant solves."""

from collections.abc import Callable
from math import inf, log
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

_LOWEST, _HIGHEST = -2000.0, 6000.0
_DROP = 1.9207  # Half the 95 % quantile of χ² with one degree of freedom.


class Rating(NamedTuple):
  """A rating with its confidence interval, in points.

  Attributes:
    rating: Maximum-likelihood rating; -inf if nothing is solved, inf if everything is.
    low: Lower end of the 95 % interval; -inf if nothing is solved.
    high: Upper end of the 95 % interval; inf if everything is solved.
  """

  rating: float
  low: float
  high: float


def solve_probability(rating: float, problem_ratings: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
  """Returns the probability, by Elo's formula, that a contestant solves each problem.

  P = 1 / (1 + 10^((d − r)/400)),  with contestant rating r and problem rating d; 1/2 if r = d

  Example:
    >>> solve_probability(1600.0, np.array([1600., 2000.])).round(3).tolist()
    [0.5, 0.091]
  """
  return 1 / (1 + 10 ** np.clip((problem_ratings - rating) / 400, -300, 300))


def estimate_rating(problem_ratings: Float[np.ndarray, " n"], solved: Float[np.ndarray, " n"]) -> Rating:
  """Estimates the maximum-likelihood rating, with a likelihood-ratio interval.

  Σ P(r, d_i) = Σ solved_i,  so the expected number of solved problems equals the actual one

  The 95 % interval contains the ratings whose log-likelihood is at most 1.92 below the maximum.
  Each problem counts once, regardless of its number of samples, because the interval covers the
  results of other problems.

  Args:
    problem_ratings: Difficulty of each problem in points, as published by CodeForces.
    solved: 1 if a problem was solved, else 0. A fraction of the samples is also accepted; the
      rating is then that of a single sample.

  Raises:
    ValueError: If there are no problems, the lengths differ, a rating is not finite, or a result is
      not from 0 to 1.

  Example:
    >>> rating = estimate_rating(np.array([1200., 1600., 2000.]), np.array([1., 1., 0.]))
    >>> round(rating.rating), rating.low < 1600 < rating.high
    (1814, True)

  References:
    A. Elo, The Rating of Chessplayers, Past and Present, 1978. Problem ratings:
    codeforces.com/blog/entry/76635. CodeElo, arXiv:2501.01257, 2025, instead ranks a model among
    the contestants of real contests, with penalties for wrong submissions.

  Note:
    The estimate comes from single problems, without contests, time or penalties. Compare it only
    with estimates of the same kind.
  """
  if problem_ratings.shape != solved.shape or not len(solved):
    raise ValueError(f"rating: found {len(problem_ratings)} problem ratings and {len(solved)} results, expected as many of each, and some")
  if not np.isfinite(problem_ratings).all() or not ((solved >= 0) & (solved <= 1)).all():
    raise ValueError("rating: found ratings that are not finite or results outside 0 to 1, expected points and flags")

  def log_likelihood(rating: float) -> float:
    gap = (problem_ratings - rating) * (log(10) / 400)
    return float(-(solved * np.logaddexp(0, gap) + (1 - solved) * np.logaddexp(0, -gap)).sum())

  if not solved.any():
    best, greatest = -inf, 0.0  # The likelihood tends to 1 as the rating tends to minus infinity.
  elif (solved == 1).all():
    best, greatest = inf, 0.0
  else:
    best = _root(lambda r: float((solved - solve_probability(r, problem_ratings)).sum()), _LOWEST, _HIGHEST)
    greatest = log_likelihood(best)
  start = min(max(best, _LOWEST), _HIGHEST)
  inside = lambda r: log_likelihood(r) - greatest + _DROP
  low = -inf if best == -inf else -_root(lambda r: inside(-r), -start, -_LOWEST)
  high = inf if best == inf else _root(inside, start, _HIGHEST)
  return Rating(best, low, high)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
  """Finds the zero of a decreasing function by bisection.

  If there is no zero inside the interval, the result is one of its ends.
  """
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (middle, high) if falling(middle) > 0 else (low, middle)
  return (low + high) / 2
