"""Percentile bootstrap intervals for means over problems."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

_MAX_DRAWS = 2**22  # Indices drawn at once: 32 MB.


class Interval(NamedTuple):
  """A mean with its bootstrap interval.

  Attributes:
    mean: Mean over the problems.
    low: Lower end of the interval.
    high: Upper end of the interval.
  """

  mean: float
  low: float
  high: float


def bootstrap_interval(
  per_problem: Float[np.ndarray, " n"], *, confidence: float = 0.95, num_resamples: int = 1000, seed: int = 0
) -> Interval:
  """Returns the mean over problems with its bootstrap interval.

  Problems are resampled rather than samples, because the samples of one problem are not
  independent. The interval therefore covers the results of other problems of the same kind. It is
  wider than an interval that only covers other samples of the same problems.

  Args:
    per_problem: One number per problem, such as the result of `pass_at_k`. NaN entries are left
      out.
    confidence: Confidence level of the interval, between 0 and 1.
    num_resamples: Number of bootstrap draws.
    seed: Seed of the bootstrap draws.

  Raises:
    ValueError: If no problem has a known number, or `confidence` is not between 0 and 1.

  Example:
    >>> bootstrap_interval(np.ones(4))
    Interval(mean=1.0, low=1.0, high=1.0)

  References:
    B. Efron, Bootstrap Methods: Another Look at the Jackknife, Annals of Statistics 7, 1979.

  Note:
    If all problems are right, or all are wrong, the interval is a single point and carries no
    information. For ten problems or fewer it is too narrow.
  """
  if not 0 < confidence < 1:
    raise ValueError(f"confidence: found {confidence!r}, expected a number between 0 and 1")
  known = per_problem[~np.isnan(per_problem)]
  if not len(known):
    raise ValueError(f"bootstrap: found {len(per_problem)} problems and none of known reward, expected at least one")
  rng = np.random.default_rng(seed)
  means, rows = [], max(_MAX_DRAWS // len(known), 1)
  for start in range(0, num_resamples, rows):
    draws = rng.integers(len(known), size=(min(rows, num_resamples - start), len(known)))
    means.append(known[draws].mean(axis=1))
  low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
  return Interval(float(known.mean()), float(low), float(high))
