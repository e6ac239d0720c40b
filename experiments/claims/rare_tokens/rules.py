"""The rules that say what counts as reproduced. Written before the measured run, and not changed after it.

Looked at beforehand: one pilot seed (100, not among the seeds of the run) with both optimizers, both kinds of batch and four and three
learning rates. So every direction below is confirmed on fresh bandits, not predicted blindly: in the pilot the rules of the claim passed,
and those of Adam's overshoot and of the expected batch are there because the pilot looked like that.

A verdict is "reproduced", "not reproduced" or "mechanism not engaged", the last where not even the unclipped ratio would have left the
band. Differences are paired: the same seed has the same bandits. Both intervals must lie where the rule says: the hierarchical bootstrap's
over seeds and bandits, and Student's over the seeds. Nothing is corrected for the number of rules.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.ablations.dapo_ladder.measures import paired_problems
from experiments.ablations.ratio_lab.measures import interval
from experiments.ablations.routing_replay.measures import where

SEEDS = tuple(range(10))
BANDITS = 64
ARMS = 32
UPDATES = 16  # As in MiniMax-M1, for each rollout batch.


class Condition(NamedTuple):
  """How the logits are moved.

  Attributes:
    drawn: what the rollout batch is, see `bandit.make_bandits`.
    optimizer: a key of `bandit.OPTIMIZERS`.
    learning_rate: of it.
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


def judge(ends: Rows) -> dict[str, dict]:
  """All verdicts, each with its rule in words and the numbers that decided.

  Args:
    ends: a row for each condition, method and seed, with `log_ratio`, of each bandit log(p/p_old) of the rare arm after all updates.
  """
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


def compared(more: Mapping[int, np.ndarray], less: Mapping[int, np.ndarray]) -> dict[str, dict[str, float]]:
  """Both intervals of the mean paired difference: over seeds and bandits, and over the seeds."""
  over_seeds = interval([float(np.mean(more[seed] - less[seed])) for seed in sorted(more)])
  return {"interval": paired_problems(more, less), "over_seeds": over_seeds}


def _stalls(ends: Rows, condition: Condition, method: str, band: float) -> dict:
  at = log_ratios(ends, condition, method)
  found = compared(at, {seed: np.full(len(x), math.log1p(band)) for seed, x in at.items()})
  rule = f"log of p(rare)/(p_old(1 + {band:g})) after {UPDATES} updates, mean, between -log {STALL:g} and log {STALL:g}: both intervals"
  passed = all(-math.log(STALL) < x["low"] and x["high"] < math.log(STALL) for x in found.values())
  return _verdict(rule, passed, _engaged(ends, condition, band), factor=_factor(found), **found)


def _rises(ends: Rows, condition: Condition, method: str) -> dict:
  found = compared(log_ratios(ends, condition, method), log_ratios(ends, condition, "clip_higher"))
  rule = f"log of p(rare) with {method} over p(rare) with PPO's 0.28 after {UPDATES} updates, mean, above log {RISE:g}: both intervals"
  passed = all(x["low"] > math.log(RISE) for x in found.values())
  return _verdict(rule, passed, _engaged(ends, condition, BANDS["clip_higher"]), factor=_factor(found), **found)


def _engaged(ends: Rows, condition: Condition, band: float) -> bool:
  """Whether the unclipped ratio moves by more than the band, up or down, in at least half of the bandits."""
  moved = np.concatenate(list(log_ratios(ends, condition, "unclipped").values()))
  return bool(np.mean(np.abs(moved) > math.log1p(band)) >= 0.5)


def _factor(found: Mapping[str, Mapping[str, float]]) -> float:
  return math.exp(found["interval"]["mean"])


def _verdict(rule: str, passed: bool, engaged: bool, **numbers) -> dict:
  verdict = ("reproduced" if passed else "not reproduced") if engaged else "mechanism not engaged"
  return {"rule": rule, "verdict": verdict, **numbers}
