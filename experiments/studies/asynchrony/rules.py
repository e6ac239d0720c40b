"""The rules that say what was found, by the verdicts of `experiments.judging`.

Looked at before the run of 2026-11-26, all without lag and on a busy machine: seed 0 with a rate of
3e-4 (from 34 to 21 % right in 14 steps), and seed 100 with 1e-4 (from 35 to 39 % in 30 steps, 1.0 s
of drawing and 1.6 s of updates a step), by which the rate and the 8 rows of the sampler were chosen.
One run with lag 4 on an earlier bed had finished. Nothing had been run on the small bed.

Changed on the same day, after three trials of the first plan (8 rows, five seeds): seed 1 took 68.1
s without lag and 43.7 s with it, 1.56 times, and seed 2 took 75.6 s without. Drawing was then 1.1 of
2.8 s of a step, which bounds the gain by 1.7. With 4 rows the sampler takes about as long as the
learner, which is where asynchrony gains most; seeds are new. Three are enough for a ratio of times,
and the small bed decides about accuracy.

Changed again on 2026-11-27, when the three seeds of that plan were known (1.61, 1.69 and 1.53
times; accuracies 6.2, 1.1 and -2.6 points apart). With lag the learner had worked all the time and
the sampler three quarters of it, so the sampler now has 3 rows. There are five seeds, all new. The
rows of the three seeds are kept as `earlier_trials`, and no rule reads them. The trials of the
small bed stand as they are.

Changed a last time on that day, after one seed on a machine with another processor (21): 45.7 s
without lag and 29.2 s with it, 1.57 times; accuracies 38.7 and 37.5 %. Drawing took 0.78 s there and
an update 1.10 s, so that the sampler was idle for 38 % of the time. The rows are now chosen so that
drawing takes about as long as learning, by these times: 2. Seeds are new. The two trials of seed 31
ran under that plan, whose third arm, without a correction, a sampler process refuses; it was left
out, since the small bed has it.

Without lag the two processes, each on one core, work by turns, as a synchronous loop does with two
groups of devices. One process that draws and learns on both cores by turns is the other comparison;
it is measured beside the arms and judged by no rule.
"""

from collections.abc import Mapping

import numpy as np

from experiments import judging
from experiments.claims import bed as claims
from experiments.studies.asynchrony.bed import Arm

SEEDS = (31, 32, 33, 34, 35)
STEPS, SKIPPED = 30, 6
"""RL steps of a run, and those at its beginning that the time leaves out."""
WARM_STEPS = 120
FASTER, WORSE = 1.6, 0.02

ARMS = {"synchronous": Arm(0), "lag 4": Arm(4, "keep")}
"""Runs of a learner and a sampler; the ratio is to the sampler's own log-probabilities."""

LAGGING_SEEDS = tuple(range(600, 624))
_ARM = claims.Arm("dapo", per_rollout=4)
LAGGING = {
  "no lag": (_ARM, 0),
  "lag 1": (_ARM, 1),
  "lag 4": (_ARM, 4),
  "lag 4, decoupled": (_ARM._replace(recompute=True, correction="tis"), 4),
  "lag 4, no correction": (_ARM._replace(recompute=True), 4),
}
"""Trials on the small bed: arm, and lag in RL steps of four updates."""
CORRECTED = ("lag 1", "lag 4", "lag 4, decoupled")
STALE = 0.003
"""Nats a token between learner and sampler, below which a lag of 4 is no lag, as on the ladder."""


def judge(results: Mapping) -> dict[str, dict]:
  """Returns the verdicts of `results.json`, with their rules and the numbers that decided."""
  trials, lagging, verdicts = results["trials"], results["lagging"], {}
  of = lambda arm, name: {row["seed"]: row[name] for row in trials if row["arm"] == arm}
  before, after = of("synchronous", "seconds"), of("lag 4", "seconds")
  rule = f"time of the steps behind the first {SKIPPED}, synchronous divided by lag 4, above {FASTER}"
  verdicts["two processes: faster"] = judging.above(rule, [before[seed] / after[seed] for seed in after], FASTER)
  rule = f"held-out accuracy at the end, lag 4 minus synchronous, above -{WORSE}"
  gain = judging.paired(of("lag 4", "accuracy"), of("synchronous", "accuracy"))
  verdicts["two processes: learns as well"] = judging.above(rule, gain, -WORSE)
  oldest = max(row["lag_max"] - ARMS[row["arm"]].staleness for row in trials)
  rule = "largest lag of any token minus the bound, at most 0"
  verdicts["two processes: no token is too old"] = judging.holds(rule, oldest <= 0, identity=True)
  at = lambda arm: judging.solved(lagging, arm=arm)
  stale = float(np.mean([row["kl"] for row in lagging if row["arm"] == "lag 4"]))
  for arm in CORRECTED:
    gain, rule = judging.paired(at(arm), at("no lag")), f"held-out accuracy at the end, {arm} minus no lag, above -{WORSE}"
    verdicts[f"small bed, {arm}: learns as well"] = judging.above(rule, gain, -WORSE, engaged=stale >= STALE, kl=stale)
  gain = judging.paired(at("lag 4, no correction"), at("lag 4"))
  rule = "held-out accuracy at the end, lag 4 with no correction minus lag 4, below 0"
  verdicts["small bed, no correction: learns worse"] = judging.below(rule, gain, engaged=stale >= STALE, kl=stale)
  return verdicts
