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

The part `accuracy` was added later that day, since runs of 30 steps had improved by 4 points only
and had no arm without a correction. Its runs are longer and evaluated on 1,800 problems, 4 samples
each. Each run has a core for both of its processes, and two runs go on at a time: what they learn
counts, and not how fast. Looked at before, all of seed 100 and without lag: from 13 % with a rate
of 1e-4 (13 to 12 % in 60 steps), from 95 % with 3e-4 (49 % after 60 steps), and from 76 % with 1e-4
and 3e-5 (77 and 80 % after 80 steps). Between them lie the rate and the warm start that were
chosen, which nothing has been run with. The accuracies of the speed trials are no longer judged:
they differ by +0.4 points [-2.3, +3.0].

Without lag the two processes, each on one core, work by turns, as a synchronous loop does with two
groups of devices. One process that draws and learns on both cores by turns is the other comparison.
No rule judges it, and the study has no rows of it: the README quotes a trial of two seeds, in which
it took as long as the pair with lag.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments import judging
from experiments.claims import bed as claims
from experiments.studies.asynchrony.bed import Arm, Plan


class Part(NamedTuple):
  """A part of the study, whose rows stand in `results.json` under its name.

  Attributes:
    seeds: Seeds, which all arms share.
    arms: Arms by name.
    plan: Sizes of runs of a learner and a sampler; None for trials on the small bed.
    cores: Cores of the learner and the sampler of each run that goes on at the same time.
    sizes: Sizes of the small bed; None for its own.
  """

  seeds: tuple[int, ...]
  arms: Mapping[str, Any]
  plan: Plan | None = None
  cores: tuple[tuple[int, int], ...] = ((0, 1),)
  sizes: claims.Sizes | None = None


FASTER, WORSE = 1.6, 0.02
ENGAGED_LAG, ENGAGED_GAIN = 3.0, 0.03
"""Mean lag in steps and gain of the synchronous arm, below which accuracies tell nothing."""
STALE = 0.003
"""Nats a token between learner and sampler, below which a lag of 4 is no lag, as on the ladder."""

ARMS = {"synchronous": Arm(0), "lag 4": Arm(4, "keep")}
"""Runs of a learner and a sampler; the ratio is to the sampler's own log-probabilities."""
ACCURACY_ARMS = ARMS | {"lag 4, no correction": Arm(4, "keep", "learner")}
"""The last takes the learner's own log-probabilities, as if the tokens were drawn by it."""

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

PARTS = {
  "trials": Part((31, 32, 33, 34, 35), ARMS, Plan(steps=30, skipped=6)),
  "accuracy": Part(
    (41, 42, 43, 44, 45), ACCURACY_ARMS, Plan(steps=100, rows=8, held_out=0.3, evaluated=1800, warm_steps=150, learning_rate=5e-5),
    cores=((0, 0), (1, 1)),
  ),
  "lagging": Part(tuple(range(600, 624)), LAGGING),
}  # fmt: skip
_SHORT = Plan(steps=8, skipped=5, warm_steps=20, evaluated=64)
SMOKE = {
  "trials": Part((0,), ARMS, _SHORT),
  "accuracy": Part((0,), ACCURACY_ARMS, _SHORT, cores=((0, 0), (1, 1))),
  "lagging": Part((600,), LAGGING, sizes=claims.SMOKE),
}


def judge(results: Mapping) -> dict[str, dict]:
  """Returns the verdicts of `results.json`, with their rules and the numbers that decided."""
  trials, accuracy, lagging, verdicts = results["trials"], results["accuracy"], results["lagging"], {}
  of = lambda rows, arm, name: {row["seed"]: row[name] for row in rows if row["arm"] == arm}
  before, after = of(trials, "synchronous", "seconds"), of(trials, "lag 4", "seconds")
  skipped = PARTS["trials"].plan.skipped
  rule = f"time of the steps behind the first {skipped}, synchronous divided by lag 4, above {FASTER}"
  verdicts["faster"] = judging.above(rule, [before[seed] / after[seed] for seed in after], FASTER)
  oldest = max(row["lag_max"] - ACCURACY_ARMS[row["arm"]].staleness for row in (*trials, *accuracy))
  verdicts["no token is too old"] = judging.holds("largest lag of any token minus the bound, at most 0", oldest <= 0, identity=True)
  synchronous, lagged = of(accuracy, "synchronous", "accuracy"), of(accuracy, "lag 4", "accuracy")
  numbers = {"gain": float(np.mean(list(synchronous.values())) - np.mean(list(of(accuracy, "synchronous", "first").values())))}
  numbers["lag"] = float(np.mean(list(of(accuracy, "lag 4", "lag_mean").values())))
  engaged = numbers["gain"] >= ENGAGED_GAIN and numbers["lag"] >= ENGAGED_LAG
  rule = f"held-out accuracy at the end, lag 4 minus synchronous, above -{WORSE}"
  gain = judging.paired(lagged, synchronous)
  verdicts["lag 4: learns as well"] = judging.above(rule, gain, -WORSE, engaged=engaged, **numbers)
  gain = judging.paired(of(accuracy, "lag 4, no correction", "accuracy"), lagged)
  rule = "held-out accuracy at the end, lag 4 with no correction minus lag 4, below 0"
  verdicts["lag 4, no correction: learns worse"] = judging.below(rule, gain, engaged=engaged, **numbers)
  at = lambda arm: judging.solved(lagging, arm=arm)
  stale = float(np.mean([row["kl"] for row in lagging if row["arm"] == "lag 4"]))
  for arm in CORRECTED:
    gain, rule = judging.paired(at(arm), at("no lag")), f"held-out accuracy at the end, {arm} minus no lag, above -{WORSE}"
    verdicts[f"small bed, {arm}: learns as well"] = judging.above(rule, gain, -WORSE, engaged=stale >= STALE, kl=stale)
  gain = judging.paired(at("lag 4, no correction"), at("lag 4"))
  rule = "held-out accuracy at the end, lag 4 with no correction minus lag 4, below 0"
  verdicts["small bed, no correction: learns worse"] = judging.below(rule, gain, engaged=stale >= STALE, kl=stale)
  return verdicts
