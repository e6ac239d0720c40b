"""How far to trust a mean over problems: the percentile bootstrap."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float

_MAX_DRAWS = 2**22  # Indices at once: 32 MB.


class Interval(NamedTuple):
  """A mean and its bootstrap interval.

  Attributes:
    mean: over the problems.
    low: lower end.
    high: upper end.
  """

  mean: float
  low: float
  high: float


def bootstrap_interval(
  per_problem: Float[np.ndarray, " n"], *, confidence: float = 0.95, num_resamples: int = 1000, seed: int = 0
) -> Interval:
  """The mean over problems, with the interval that resampling the problems gives.

  Problems are resampled, not samples: those of one problem are not independent. So the interval says what other problems of the same kind
  would give, and is wider than one that only says what other samples would.

  Args:
    per_problem: one number a problem, such as `pass_at_k`'s; NaN is left out.
    confidence: of the interval, between 0 and 1.
    num_resamples: bootstrap draws.
    seed: of them.

  Raises:
    ValueError: no problem whose number is known, or a confidence that is not between 0 and 1.

  Example:
    >>> bootstrap_interval(np.ones(4))
    Interval(mean=1.0, low=1.0, high=1.0)

  References:
    B. Efron, Bootstrap Methods: Another Look at the Jackknife, Annals of Statistics 7, 1979.

  Note:
    With all problems right, or all wrong, the interval is a point, which says nothing; and for ten problems or fewer it is too narrow.
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
