"""The rules that say what counts as reproduced, by the verdicts of `experiments.judging`.

Looked at before the run of 2026-11-23: GRPO alone, on one pilot seed (100, not among the seeds of
the run), N = 16 updates a rollout batch: experts without replay, with R2, and the control, at the
rates 1e-3, where all three learnt (from 32 % to 76, 78 and 79 %; 5 % of the activated experts
changed over 15 updates), and 2e-3, where none did (35, 27 and 42 %; 9 %). Each of the six trials
showed a jump of the gradient's norm, those that learnt as well. An earlier study of E6 decided
nothing, on a bed that learnt at neither of its rates; see LOG.md.

Changed on 2026-11-25, when the results were known: the five verdicts and Student's interval alone;
the one endpoint of collapse that all studies share, in the place of the first of several signs,
which in all 38 "collapses" of GRPO and GSPO was a jump of the gradient, of trials that learnt as
well as others; and a manipulation check. The paper has a tenth of the experts change at *one*
update, this bed at fifteen. So a rule about replay is "mechanism not engaged" unless replaying the
routes narrows the spread of GRPO's token ratios (the interval of the log quotient lies below 0):
the claim is that it does, and that training is steadier for it.

Every rule is "mechanism not engaged" where fewer than `MOVED` of the activated experts change
without replay, mean over the seeds and rollout batches; a rule on collapses, also where neither of
the two arms collapses in any seed. All differences are paired: a seed has one warm start a model,
one order of problems and one set of keys.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from experiments import judging
from experiments.ablations.routing_replay.measures import where
from experiments.claims.bed import Arm
from experiments.claims.staleness.rules import BAND

SEEDS = tuple(range(8))
CONFIRMATORY = {"E6": "E6, collapses: GRPO above GRPO with R2, N = 16, rate 0.002"}
"""The one rule of each claim that a verdict is read from; all others are exploratory."""
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

COLLAPSES = (
  ("GRPO", "GRPO with R2"), ("GRPO", "GSPO"), ("GSPO", "GSPO with R2"), ("GSPO", "SAPO"), ("GRPO", "GRPO, control"),
)  # fmt: skip
"""Which is said to collapse more often than which."""

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


def judge(results: Mapping) -> dict[str, dict]:
  """The verdicts of `results.json`, each with its rule in words and the numbers that decided."""
  trials = results["trials"]
  verdicts = {}
  for rate in [rate for rate in RATES if where(trials, rate=rate)]:
    for count in STALE:
      mine, at = where(trials, rate=rate, updates=count), f"N = {count}, rate {rate:g}"
      change = float(np.mean([_mean(row["change"]) for row in where(mine, way="GRPO")]))
      narrows = _spread(mine, change >= MOVED)
      narrowed = narrows["verdict"] == judging.REPRODUCED
      engaged = lambda *ways, change=change, narrowed=narrowed: {
        "engaged": change >= MOVED and (narrowed or not any("R2" in way for way in ways)), "change": change,
      }  # fmt: skip
      for more, less in COLLAPSES:
        fallen = [{row["seed"]: judging.collapsed(row["curve"]) for row in where(mine, way=way)} for way in (more, less)]
        rule = f"more seeds collapse (`judging.collapsed`) with {more} than with {less}"
        verdicts[f"E6, collapses: {more} above {less}, {at}"] = judging.more_often(rule, *fallen, **engaged(more, less))
      for more, less in ACCURACIES:
        gap = judging.paired(*(judging.solved(mine, way=way) for way in (more, less)))
        rule = "held-out accuracy at the end, the first minus the second, above 0"
        verdicts[f"E6, accuracy: {more} above {less}, {at}"] = judging.above(rule, gap, **engaged(more, less))
      verdicts[f"E6, ratios: R2 narrows GRPO's, {at}"] = narrows
  return verdicts


def _spread(trials: Rows, moved: bool) -> dict:
  early = lambda way: {row["seed"]: math.log(max(_mean(row["log_r"][:EARLY]), 1e-12)) for row in where(trials, way=way)}
  values = judging.paired(early("GRPO with R2"), early("GRPO"))
  rule = f"log of the quotient of std(log r) with and without replay, mean of the first {EARLY} rollout batches, below 0"
  return judging.below(rule, values, engaged=moved, factor=math.exp(np.mean(values)))


def _mean(values: Sequence[float | None]) -> float:
  """The mean of what is finite."""
  return float(np.nanmean(np.array(values, float)))
