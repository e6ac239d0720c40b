"""How good a forecaster the study would notice, from the published pairs alone.

A bed that ranks the objectives at random gets half of the pairs right on average, with a spread
that follows from how the pairs share objectives. The field has a consensus as far as the pairs
agree: strengths by the model of Bradley and Terry. A bed whose scores correlate with it is a better
forecaster. No trial is read here.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from experiments import judging
from experiments.studies.forecast import rules

DRAWS = 20_000
CORRELATIONS = (0.3, 0.5, 0.7, 0.85, 1.0)


class Power(NamedTuple):
  """Power of the score.

  Attributes:
    of: Number of pairs.
    needed: Least number of right forecasts whose share of random rankings is below 5 %.
    most: Number that the consensus itself gets right.
    spread: Standard deviation of the share of right forecasts of random rankings.
    chances: Probability of a score of at least `needed`, by the correlation of a bed's scores with
      the consensus.
  """

  of: int
  needed: int
  most: int
  spread: float
  chances: dict[float, float]


def strengths(winners: Int[np.ndarray, " n"], losers: Int[np.ndarray, " n"], count: int, *, prior: float = 0.5) -> Float[np.ndarray, " m"]:
  """Returns the log-strengths of Bradley and Terry, standardised.

  Args:
    winners: Number of the winner of each pair.
    losers: Number of the loser.
    count: Number of objectives.
    prior: Wins and losses of each against an objective of mean strength, which keep those that
      always win finite.

  Example:
    >>> (strengths(np.array([0, 1]), np.array([1, 2]), 3).round(2) + 0).tolist()
    [1.22, 0.0, -1.22]
  """
  logits = np.zeros(count)
  for _ in range(2000):
    gaps = 1 / (1 + np.exp(logits[winners] - logits[losers]))
    gradient = np.bincount(winners, gaps, count) - np.bincount(losers, gaps, count) - 2 * prior * (1 / (1 + np.exp(-logits)) - 0.5)
    logits += 0.3 * gradient
  return (logits - np.mean(logits)) / np.std(logits)


def power(pairs: Sequence[Mapping]) -> Power:
  """Computes the power of the score of some published pairs.

  A bed is taken to rank the objectives alike in all conditions.
  """
  decided = [pair for pair in pairs if pair["winner"]]
  names = sorted({pair[side] for pair in decided for side in ("winner", "loser")})
  winners, losers = (np.array([names.index(pair[side]) for pair in decided]) for side in ("winner", "loser"))
  consensus, rng = strengths(winners, losers, len(names)), np.random.default_rng(0)
  rights = lambda scores: np.sum(scores[:, winners] > scores[:, losers], axis=1)
  by_chance = rights(rng.normal(size=(DRAWS, len(names))))
  needed = next(count for count in range(len(decided) + 2) if np.mean(by_chance >= count) < judging.ALPHA)

  def chance(correlation: float) -> float:
    noise = rng.normal(size=(DRAWS, len(names)))
    # The correlation holds over the objectives of each draw, and not only on average.
    noise -= np.mean(noise, axis=1, keepdims=True)
    noise -= (noise @ consensus / len(names))[:, None] * consensus
    noise /= np.std(noise, axis=1, keepdims=True)
    return float(np.mean(rights(correlation * consensus + math.sqrt(1 - correlation**2) * noise) >= needed))

  most, spread = int(rights(consensus[None])[0]), float(np.std(by_chance) / len(decided))
  return Power(len(decided), needed, most, spread, {correlation: chance(correlation) for correlation in CORRELATIONS})


def lines() -> list[str]:
  """Describes the power of the score, and of that of pairs without a paper's own method."""
  pairs = json.loads(rules.PUBLISHED.read_text())
  shown = []
  for name, chosen in (("all pairs", pairs), ("neutral pairs", [pair for pair in pairs if not pair["own_method"]])):
    own = power(chosen)
    told = ", ".join(f"{correlation:g}: {share:.0%}" for correlation, share in own.chances.items())
    spread = f"random rankings spread by {own.spread:.1%}"
    shown.append(f"{name}: {own.needed} of {own.of} needed ({spread}); the consensus gets {own.most}; power by correlation with it {told}")
  return shown
