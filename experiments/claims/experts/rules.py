"""The rules of E6 on a deep mixture, by the verdicts of `experiments.judging`.

They replace those of `moe_stability`, whose two layers of 8 experts decided nothing: replaying the
routes was not shown to narrow the ratios there. Here a token visits 2 of 32 experts in each of 8
layers.

Looked at before the rules: seed 500, which is not among the seeds below, GRPO at the rates 1e-3,
1.4e-3 and 2e-3. At the two larger ones it falls from the beginning. At 1e-3 it learns for about 300
of 1,024 updates and then falls, so 1e-3 and 1,024 updates were chosen for all arms. On the same
seed GRPO with R2 fell too, and GSPO did not by `judging.fell`. SAPO and the control were not
looked at, the frozen router for 192 updates only.

The mechanism is engaged, for rules on replay, if both hold over the seeds of GRPO and the first
quarter of the training, in which it learns:

- between 5 and 15 % of the experts that tokens visit change over the 15 updates between the
  responses and the last update on them (the paper's tenth is of one update; such an update does not
  learn on this bed);
- the routes of π_old narrow the ratios: the mean over the rollout batches of log(std(log r) with
  those routes / std(log r) without), at the same weights, lies below 0.

A rule on collapses is also "not engaged" if neither arm collapses in any seed. A trial has
collapsed if `judging.fell`. The sampler computes in float32 as the learner does, so that its routes
(R3) are those of π_old (R2), and R3 is no arm of its own. All differences are paired: a seed has one
warm start a model, one order of problems and one set of keys.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from experiments import judging
from experiments.ablations.routing_replay.measures import where
from experiments.claims.bed import Arm, Sizes
from experiments.claims.staleness.rules import BAND

SEEDS = tuple(range(700, 724))
SIZES = Sizes(num_layers=8, num_experts=32, top_k=2, d_ff=32, updates=1024, evaluations=16)
RATE, STALE = 1e-3, 16
MOVED = (0.05, 0.15)
"""Smallest and largest share of changed experts with which the mechanism is engaged."""

CONFIRMATORY = {"E6": "E6, collapses: GRPO above GRPO with R2"}
"""The one rule of each claim that a verdict is read from; all others are exploratory."""

_GRPO = (("kl_coef", 0.0),)
WAYS = {
  "GRPO": Arm("grpo", _GRPO, model="experts"),
  "GRPO with R2": Arm("grpo", _GRPO, model="experts", replay="R2"),
  "GSPO": Arm("gspo", BAND, model="experts"),
  "SAPO": Arm("sapo", model="experts"),
  "GRPO, router frozen": Arm("grpo", _GRPO, model="experts", frozen="router"),
  "GRPO, nothing to route": Arm("grpo", _GRPO, model="all experts"),
}
"""What is run, by name.

With nothing to route, a token visits both of two experts. That model has as many active weights, and
a warm start of its own.
"""

COLLAPSES = (
  ("GRPO", "GRPO with R2"), ("GRPO", "GSPO"), ("GRPO", "SAPO"), ("SAPO", "GSPO"), ("GRPO", "GRPO, router frozen"),
  ("GRPO", "GRPO, nothing to route"),
)  # fmt: skip
"""Which is said to collapse more often than which."""

ACCURACIES = (("GRPO with R2", "GRPO"), ("GSPO", "GRPO"), ("GSPO", "SAPO"))
"""Which is said to end above which."""

Rows = Sequence[Mapping]


def arms() -> list[tuple[dict, Arm]]:
  """What is run."""
  return [({"way": name}, way._replace(per_rollout=STALE, learning_rate=RATE, recompute=True)) for name, way in WAYS.items()]


def judge(results: Mapping) -> dict[str, dict]:
  """The verdicts of `results.json`, each with its rule in words and the numbers that decided."""
  trials = results["trials"]
  early = {row["seed"]: row for row in where(trials, way="GRPO")}
  change = float(np.mean([np.mean(_first_quarter(row["change"])) for row in early.values()]))
  moved = MOVED[0] <= change <= MOVED[1]
  quotients = {seed: narrowing(row) for seed, row in early.items()}
  rule = "log of the quotient of std(log r) with the routes of π_old and without, at the same weights, below 0"
  mean = np.mean(list(quotients.values()))
  numbers = {"factor": math.exp(mean), "share_of_variance": 1 - math.exp(2 * mean)}
  narrows = judging.below(rule, quotients.values(), engaged=moved, **numbers)
  replay_acts = narrows["verdict"] == judging.REPRODUCED
  verdicts = {}
  for more, less in COLLAPSES:
    fallen = [{row["seed"]: judging.fell(row["curve"]) for row in where(trials, way=way)} for way in (more, less)]
    engaged = moved and (replay_acts or "R2" not in less)
    rule = f"more seeds collapse (`judging.fell`) with {more} than with {less}"
    verdicts[f"E6, collapses: {more} above {less}"] = judging.more_often(rule, *fallen, engaged=engaged, change=change)
  for more, less in ACCURACIES:
    gap = judging.paired(*(judging.solved(trials, way=way) for way in (more, less)))
    rule = "held-out accuracy at the end, the first minus the second, above 0"
    engaged = moved and (replay_acts or "R2" not in more)
    verdicts[f"E6, accuracy: {more} above {less}"] = judging.above(rule, gap, engaged=engaged, change=change)
  return verdicts | {"E6, ratios: R2 narrows GRPO's": narrows}


def narrowing(row: Mapping) -> float:
  """Returns the mean of log(std(log r) with the routes of π_old / without) over a trial's first quarter.

  Batches in which a spread is 0 or not finite are left out.
  """
  pairs = zip(_first_quarter(row["log_r_replayed"]), _first_quarter(row["log_r"]), strict=True)
  return float(np.mean([math.log(replayed / own) for replayed, own in pairs if replayed and own]))


def _first_quarter(values: Sequence[float | None]) -> Sequence[float | None]:
  return values[: max(1, len(values) // 4)]
