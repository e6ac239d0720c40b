"""The rules that say what counts as reproduced. Written before the measured run, and not changed after it.

Looked at beforehand: GRPO alone, on one pilot seed (100, not among the seeds of the run), N = 16 updates a rollout batch: experts without
replay, with R2, and the control, at the rates 1e-3, where all three learnt (from 32 % to 76, 78 and 79 %; 5 % of the activated experts
changed over 15 updates), and 2e-3, where none did (35, 27 and 42 %; 9 %, about the paper's tenth). Each of the six trials showed a sign of
collapse, a jump of the gradient's norm. An earlier study of E6 decided nothing, on a bed that learnt at neither of its rates; see LOG.md.

A verdict is "mechanism not engaged" where fewer than `MOVED` of the activated experts change without replay, mean over the seeds and
rollout batches, and for hazards also where neither of the two arms collapses in any seed. All differences are paired: a seed has one warm
start a model, one order of problems and one set of keys. A rule on hazards passes if two intervals lie above 0: the bootstrap's over the
seeds for log of the quotient of the hazards, and Student's for the difference of the updates until collapse, which end with the trial.
Accuracy passes if both the hierarchical bootstrap's interval over seeds and problems and Student's over the seeds lie above 0. Nothing is
corrected for the number of rules.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.ablations.routing_replay.measures import log_quotient, where
from experiments.claims.bed import Arm
from experiments.claims.intervals import difference, interval, solved, verdict
from experiments.claims.moe_stability.survival import Life, hazard_quotient
from experiments.claims.staleness.rules import BAND

SEEDS = tuple(range(8))
RATES = (2e-3, 1e-3)
STALE = (16, 64)
"""Updates of a rollout batch (N); 1 is on policy, where replay changes nothing."""
MOVED = 0.03
EARLY = 3
"""Rollout batches of which the spread of the ratios is compared: later ones are of policies that have little in common."""

WAYS = {
  "GRPO": Arm("grpo", (("kl_coef", 0.0),), model="experts"),
  "GRPO with R2": Arm("grpo", (("kl_coef", 0.0),), model="experts", replay="R2"),
  "GSPO": Arm("gspo", BAND, model="experts"),
  "GSPO with R2": Arm("gspo", BAND, model="experts", replay="R2"),
  "SAPO": Arm("sapo", model="experts"),
  "GRPO, control": Arm("grpo", (("kl_coef", 0.0),), model="all experts"),
}
"""What is run, by name."""

HAZARDS = (
  ("GRPO", "GRPO with R2"), ("GRPO", "GSPO"), ("GSPO", "GSPO with R2"), ("GSPO", "SAPO"), ("GRPO", "GRPO, control"),
)  # fmt: skip
"""Which is said to collapse before which."""

ACCURACIES = (("GRPO with R2", "GRPO"), ("GSPO", "GRPO"), ("GSPO with R2", "GSPO"))
"""Which is said to end above which."""

Rows = Sequence[Mapping]


def arms(rate: float) -> list[tuple[dict, Arm]]:
  """What is run at a rate."""
  on_policy = [(name, 1) for name in ("GRPO", "GRPO, control")]
  return [
    ({"way": name, "updates": count, "rate": rate}, WAYS[name]._replace(per_rollout=count, learning_rate=rate, recompute=True))
    for name, count in [*((name, count) for count in STALE for name in WAYS), *on_policy]
  ]


def judge(trials: Rows) -> dict[str, dict]:
  """All verdicts, each with its rule in words and the numbers that decided."""
  found = {}
  for rate in [rate for rate in RATES if where(trials, rate=rate)]:
    for count in STALE:
      mine, at = where(trials, rate=rate, updates=count), f"N = {count}, rate {rate:g}"
      change = float(np.mean([_mean(row["change"]) for row in where(mine, way="GRPO")]))
      for more, less in HAZARDS:
        found[f"E6, hazard: {more} above {less}, {at}"] = _hazard(mine, more, less, change)
      for more, less in ACCURACIES:
        gap = difference(solved(mine, way=more), solved(mine, way=less))
        found[f"E6, accuracy: {more} above {less}, {at}"] = verdict(
          "held-out accuracy at the end, the first minus the second, above 0: both intervals", gap.low > 0, engaged=change >= MOVED,
          **gap._asdict(),
        )  # fmt: skip
      found[f"E6, ratios: R2 narrows GRPO's, {at}"] = _spread(mine, change)
  return found


def lives(trials: Rows, way: str) -> dict[int, Life]:
  """Of each seed the updates until it collapsed, or until the trial ended, and whether it collapsed."""
  mine = where(trials, way=way)
  return {row["seed"]: Life(row["collapsed_at"] or row["trained"], row["collapsed_at"] is not None) for row in mine}


def _hazard(trials: Rows, more: str, less: str, change: float) -> dict:
  above, below = lives(trials, more), lives(trials, less)
  quotient = hazard_quotient(above, below)
  longer = interval([below[seed].time - above[seed].time for seed in sorted(above)])
  first, second = (sum(life.ended for life in arm.values()) for arm in (above, below))
  rule = (
    "log of the quotient of the hazards, collapses an update at risk, above 0, and the second arm's updates until collapse minus the "
    "first's above 0: both intervals"
  )
  numbers = dict(interval=quotient, updates_longer=longer, collapsed=first, collapsed_of_second=second, of=len(above), change=change)
  engaged = change >= MOVED and first + second > 0
  return verdict(rule, min(quotient["low"], longer["low"]) > 0, engaged=engaged, **numbers)


def _spread(trials: Rows, change: float) -> dict:
  early = lambda way: {row["seed"]: _mean(row["log_r"][:EARLY]) for row in where(trials, way=way)}
  live, replayed = early("GRPO"), early("GRPO with R2")
  at = log_quotient(*([arm[seed] for seed in sorted(arm)] for arm in (replayed, live)))
  rule = f"log of the quotient of std(log r) with and without replay, mean of the first {EARLY} rollout batches, below 0: the interval"
  return verdict(rule, at["high"] < 0, engaged=change >= MOVED, interval=at, factor=math.exp(at["mean"]))


def _mean(values: Sequence[float | None]) -> float:
  """The mean of what is finite."""
  return float(np.nanmean(np.array(values, float)))
