"""The rules that say what was found, by the verdicts of `experiments.judging`.

Looked at before the run of 2026-11-26, on seed 0 of a weaker policy (20 % right, as by chance): the
times of a step without lag, 0.5 s of drawing and 0.4 s of updates, by which 16 rows were chosen for
the sampler; and that runs with and without lag finish. No trained accuracy was seen.

A run without lag has the same two processes, each on one core, and therefore uses one of them at a
time. That is what a synchronous loop does with two groups of devices. A process that draws and
learns on both cores by turns is the other comparison; it is measured beside the arms and judged by
no rule.
"""

from collections.abc import Mapping

import numpy as np

from experiments import judging
from experiments.studies.asynchrony.bed import Arm

SEEDS = tuple(range(5))
STEPS, SKIPPED = 40, 6
"""RL steps of a run, and those at its beginning that the time leaves out."""
WARM_STEPS = 2200
FASTER, WORSE = 1.6, 0.02

ARMS = {
  "synchronous": Arm(0),
  "ratio to the sampler, lag 4": Arm(4, "keep"),
  "decoupled, lag 4": Arm(4, "keep", old_logprobs="learner", tis=2.0),
  "no correction, lag 4": Arm(4, "keep", old_logprobs="learner"),
}
CORRECTED = ("ratio to the sampler, lag 4", "decoupled, lag 4")


def judge(results: Mapping) -> dict[str, dict]:
  """Returns the verdicts of `results.json`, with their rules and the numbers that decided."""
  trials, verdicts = results["trials"], {}
  of = lambda arm, name: {row["seed"]: row[name] for row in trials if row["arm"] == arm}
  before = of("synchronous", "seconds")
  for arm in ARMS:
    if arm == "synchronous" or not (seconds := of(arm, "seconds")):
      continue
    speed = [before[seed] / seconds[seed] for seed in seconds]
    lag = float(np.mean([row["lag_mean"] for row in trials if row["arm"] == arm]))
    gain = judging.paired(of(arm, "accuracy"), of("synchronous", "accuracy"))
    if arm in CORRECTED:
      rule = f"time of the steps behind the first {SKIPPED}, synchronous divided by {arm}, above {FASTER}"
      verdicts[f"{arm}: faster"] = judging.above(rule, speed, FASTER, lag=lag)
      rule = f"held-out accuracy at the end, {arm} minus synchronous, above -{WORSE}"
      verdicts[f"{arm}: learns as well"] = judging.above(rule, gain, -WORSE, lag=lag)
    else:
      rule = f"held-out accuracy at the end, {arm} minus synchronous, below 0"
      verdicts[f"{arm}: learns worse"] = judging.below(rule, gain, lag=lag)
  oldest = max(row["lag_max"] - ARMS[row["arm"]].staleness for row in trials)
  verdicts["no token is too old"] = judging.holds("largest lag of any token minus the bound, at most 0", oldest <= 0, identity=True)
  return verdicts
