"""The rating that a contestant who solves just these problems would have."""

from collections.abc import Callable
from math import inf, log
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

_LOWEST, _HIGHEST = -2000.0, 6000.0
_DROP = 1.9207  # Half the 95 % quantile of χ² with one degree of freedom.


class Rating(NamedTuple):
  """A rating and its interval, in points.

  Attributes:
    rating: the most likely one; -inf where nothing is solved and inf where everything is.
    low: lower end of the 95 % interval; -inf where nothing is solved.
    high: upper end; inf where everything is.
  """

  rating: float
  low: float
  high: float


def solve_probability(rating: float, problem_ratings: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
  """Elo's expectation: how likely somebody of a rating solves problems of theirs.

  P = 1 / (1 + 10^((d − r)/400)),  with r the contestant's rating and d the problem's: 1/2 where they are equal

  Example:
    >>> solve_probability(1600.0, np.array([1600., 2000.])).round(3).tolist()
    [0.5, 0.091]
  """
  return 1 / (1 + 10 ** np.clip((problem_ratings - rating) / 400, -300, 300))


def estimate_rating(problem_ratings: Float[np.ndarray, " n"], solved: Float[np.ndarray, " n"]) -> Rating:
  """The rating of greatest likelihood, given which problems were solved, with the interval of the likelihood ratio.

  It is the one at which as many problems are expected to be solved as were: Σ P(r, d_i) = Σ solved_i. The 95 % interval holds the ratings
  whose log-likelihood is at most 1.92 below the greatest. A problem counts once, however many samples it had: the interval says what
  other problems would give.

  Args:
    problem_ratings: difficulty of each problem in points, as CodeForces publishes it.
    solved: 1 where it was solved, 0 where it was not, or the fraction of samples that solved it: then the rating is that of one sample.

  Raises:
    ValueError: no problems, another number of ratings than of flags, or values that make no sense.

  Example:
    >>> rating = estimate_rating(np.array([1200., 1600., 2000.]), np.array([1., 1., 0.]))
    >>> round(rating.rating), rating.low < 1600 < rating.high
    (1814, True)

  References:
    A. Elo, The Rating of Chessplayers, Past and Present, 1978; the ratings of problems: codeforces.com/blog/entry/76635. CodeElo,
    arXiv:2501.01257, 2025, ranks a model among the contestants of real contests instead, with penalties for wrong submissions.

  Note:
    An estimate from single problems, without contests, time or penalties: compare it with others of its kind only.
  """
  if problem_ratings.shape != solved.shape or not len(solved):
    raise ValueError(f"rating: found {len(problem_ratings)} problem ratings and {len(solved)} results, expected as many of each, and some")
  if not np.isfinite(problem_ratings).all() or not ((solved >= 0) & (solved <= 1)).all():
    raise ValueError("rating: found ratings that are not finite or results outside 0 to 1, expected points and flags")

  def log_likelihood(rating: float) -> float:
    gap = (problem_ratings - rating) * (log(10) / 400)
    return float(-(solved * np.logaddexp(0, gap) + (1 - solved) * np.logaddexp(0, -gap)).sum())

  if not solved.any():
    best, greatest = -inf, 0.0  # The likelihood tends to 1 with the rating to minus infinity.
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
  """Where a falling function is 0, by bisection; an end of the interval where it is 0 nowhere inside."""
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (middle, high) if falling(middle) > 0 else (low, middle)
  return (low + high) / 2
