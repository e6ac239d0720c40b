"""The rules that say what counts as reproduced, by the verdicts of `experiments.judging`.

Looked at before the run of 2026-11-22: one pilot seed (100, not among the seeds of the run) with
both optimizers, both kinds of batch and four and three learning rates. So every direction below is
confirmed on fresh bandits, not predicted blindly: in the pilot the rules of the claim passed, and
those of Adam's overshoot and of the expected batch are there because the pilot looked like that.

Changed on 2026-11-25, when the results were known: the five verdicts and Student's interval alone.

The mechanism is not engaged where not even the unclipped ratio would have left the band.
Differences are paired: the same seed has the same bandits.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments import judging
from experiments.ablations.routing_replay.measures import where

SEEDS = tuple(range(10))
CONFIRMATORY = {"E19": "E19, cispo rises"}
"""The one rule of each claim that a verdict is read from; all others are exploratory."""
BANDITS = 64
ARMS = 32
UPDATES = 16  # As in MiniMax-M1, for each rollout batch.


class Condition(NamedTuple):
  """How the logits are moved.

  Attributes:
    drawn: Name of the rollout batch; see `bandit.make_bandits`.
    optimizer: Key of `bandit.OPTIMIZERS`.
    learning_rate: Learning rate of the optimizer.
  """

  drawn: str
  optimizer: str
  learning_rate: float


MAIN = Condition("once", "sgd", 2.0)
"""Where the claim is judged. The rare arm's logit moves by 1/8 at the first update."""
MOMENTUM = Condition("once", "adam", 0.1)
EXPECTED = Condition("expected", "sgd", 2.0)
SWEEP = tuple(Condition("once", "sgd", rate) for rate in (0.25, 0.5, 1.0, 4.0))
CONDITIONS = (MAIN, MOMENTUM, EXPECTED, *SWEEP)

BANDS = {"ppo": 0.2, "clip_higher": 0.28}
RISERS = ("cispo", "sapo", "dppo_tv")
STALL = 1.25
"""A ratio within this factor of the clip's bound has stalled there."""
RISE = 2.0
"""A ratio above this multiple of the wider PPO's has risen."""

Rows = Sequence[Mapping]


def judge(results: Mapping) -> dict[str, dict]:
  """The verdicts of `results.json`, each with its rule in words and the numbers that decided.

  Args:
    results: `ends`, a row for each condition, method and seed; its `log_ratio` is log(p/p_old) of the rare arm of each bandit after all
      updates.
  """
  ends = results["ends"]
  found = {}
  for method, band in BANDS.items():
    found[f"E19, PPO with {band:g} stalls"] = _stalls(ends, MAIN, method, band)
  for method in RISERS:
    found[f"E19, {method} rises"] = _rises(ends, MAIN, method)
  found["E19, PPO with 0.28 stalls under Adam, too"] = _stalls(ends, MOMENTUM, "clip_higher", BANDS["clip_higher"])
  found["E19, cispo rises under Adam, too"] = _rises(ends, MOMENTUM, "cispo")
  found["E19, cispo rises where the batch is the expectation"] = _rises(ends, EXPECTED, "cispo")
  return found


def log_ratios(ends: Rows, condition: Condition, method: str) -> dict[int, np.ndarray]:
  """Of each seed log(p/p_old) of the rare arm at the end, a number a bandit."""
  return {row["seed"]: np.array(row["log_ratio"]) for row in where(ends, method=method, **condition._asdict())}


def _stalls(ends: Rows, condition: Condition, method: str, band: float) -> dict:
  values = [float(np.mean(x)) - math.log1p(band) for _, x in sorted(log_ratios(ends, condition, method).items())]
  rule = f"log of p(rare)/(p_old(1 + {band:g})) after {UPDATES} updates, mean, between -log {STALL:g} and log {STALL:g}"
  edge = math.log(STALL)
  return judging.within(rule, values, -edge, edge, engaged=_engaged(ends, condition, band), factor=math.exp(np.mean(values)))


def _rises(ends: Rows, condition: Condition, method: str) -> dict:
  means = [{seed: float(np.mean(x)) for seed, x in log_ratios(ends, condition, name).items()} for name in (method, "clip_higher")]
  values = judging.paired(*means)
  rule = f"log of p(rare) with {method} over p(rare) with PPO's 0.28 after {UPDATES} updates, mean, above log {RISE:g}"
  engaged = _engaged(ends, condition, BANDS["clip_higher"])
  return judging.above(rule, values, math.log(RISE), engaged=engaged, factor=math.exp(np.mean(values)))


def _engaged(ends: Rows, condition: Condition, band: float) -> bool:
  """Whether the unclipped ratio moves by more than the band, up or down, in at least half of the bandits."""
  moved = np.concatenate(list(log_ratios(ends, condition, "unclipped").values()))
  return bool(np.mean(np.abs(moved) > math.log1p(band)) >= 0.5)
