"""Differences of paired arms with two intervals, and the three verdicts. Shared by the studies of claims."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.ablations.dapo_ladder.measures import paired_problems
from experiments.ablations.ratio_lab.measures import interval

__all__ = ["Difference", "difference", "interval", "paired_problems", "solved", "verdict"]

REPRODUCED, NOT_REPRODUCED, NOT_ENGAGED = "reproduced", "not reproduced", "mechanism not engaged"


class Difference(NamedTuple):
  """A mean over paired seeds and its two 95 % intervals.

  Attributes:
    interval: of the hierarchical bootstrap over seeds and problems.
    over_seeds: Student's over the seeds.
  """

  interval: dict[str, float]
  over_seeds: dict[str, float]

  @property
  def low(self) -> float:
    """The lower of both lower ends."""
    return min(self.interval["low"], self.over_seeds["low"])

  @property
  def high(self) -> float:
    """The higher of both upper ends."""
    return max(self.interval["high"], self.over_seeds["high"])


def solved(trials: Sequence[Mapping], **where) -> dict[int, np.ndarray]:
  """Of each seed the fraction of the samples of each held-out problem that is right at the end.

  Args:
    trials: rows with `seed`, `right` (a digit for each problem) and `samples`.
    **where: what the rows must hold.
  """
  rows = [row for row in trials if all(row[name] == value for name, value in where.items())]
  return {row["seed"]: np.array([int(x) for x in row["right"]]) / row["samples"] for row in rows}


def difference(more: Mapping[int, np.ndarray], less: Mapping[int, np.ndarray]) -> Difference:
  """The difference of two arms, by problem and by seed; two maps of seeds to problems, in one order.

  Example:
    >>> ones, zeros = {0: np.ones(4), 1: np.ones(4)}, {0: np.zeros(4), 1: np.zeros(4)}
    >>> difference(ones, zeros).low
    1.0
  """
  seeds = sorted(more)
  over_seeds = interval([float(np.mean(more[seed]) - np.mean(less[seed])) for seed in seeds])
  return Difference(paired_problems(more, less), over_seeds)


def verdict(rule: str, passed: bool, *, engaged: bool = True, **numbers) -> dict:
  """A row of "verdicts".

  Args:
    rule: in words.
    passed: whether it holds.
    engaged: whether anything in the run could have decided.
    **numbers: those that did.
  """
  return {"rule": rule, "verdict": (REPRODUCED if passed else NOT_REPRODUCED) if engaged else NOT_ENGAGED, **numbers}
