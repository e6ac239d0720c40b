"""The rules that say what counts as reproduced, by the verdicts of `experiments.judging`.

Looked at before the run of 2026-11-21: one pilot seed (100, not among the seeds of the run). Its
warm start, at two learning rates and two error rates of the teacher; 8 updates of E5 at rates 1e-4
to 3e-3 with 4 layers, in which deeper layers changed more; 10 to 20 rollout batches without replay
at rates from 1e-4 to 2e-3, to find one that learns and one that falls apart; and 10 rollout batches
with R3 at 1e-3 and 2e-3, in which the KL was mostly lower than without. So the directions of E5 and
of the KL are confirmed on fresh seeds, not predicted blindly.

Changed on 2026-11-25, when the results were known: the five verdicts; what is algebra is called an
identity; the one endpoint of collapse that all studies share, with the two evaluations that a run
here has; and whether a rule about ratios and training is engaged: replay narrows nothing where next
to no expert changes, so the third update has to change `MOVED` of them.

That R3's lead over R2 grows with staleness, the second half of E7's claim, is not tested: R2 has
one number of updates.
"""

import math
from collections.abc import Mapping, Sequence

from experiments.ablations.routing_replay.measures import line, log_quotients, mean_of, per_seed, where
from experiments.ablations.routing_replay.studies import Arm
from experiments.judging import CALIBRATION, above, below, collapsed, holds, more_often

SEEDS = (0, 1, 2)

CONFIRMATORY = {"E5": "E5, depth of the model", "E7": "E7, KL: R3 below none, N = 4, rate 0.0003"}
"""The one rule of each claim that a verdict is read from; all others are exploratory."""

DEPTHS = (2, 4, 8)
DRIFT_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
DRIFT_RATE = 1e-3  # At which E5 is judged.
DRIFT_UPDATES = 12
DRIFT_WARM_STEPS = 100
PAPER_CHANGE = 0.1
"""Of the activated experts, in the GSPO paper, after one update. Which learning rate lands near it here is calibration, not evidence."""

RATE = 3e-4  # At which the pilot learnt.
HOT_RATE = 2e-3  # At which it fell apart within a run.
ARMS = (
  Arm(4, "none", "bfloat16", RATE),
  Arm(4, "R2", "bfloat16", RATE),
  Arm(4, "R3", "bfloat16", RATE),
  Arm(1, "none", "bfloat16", RATE),
  Arm(1, "R3", "bfloat16", RATE),
  Arm(4, "none", "float32", RATE),
  Arm(4, "none", "bfloat16", HOT_RATE),
  Arm(4, "R2", "bfloat16", HOT_RATE),
  Arm(4, "R3", "bfloat16", HOT_RATE),
)
"""R2 with one update a rollout batch changes nothing, so it has no arm."""

WARMUP = 8
ROLLOUTS = 12
EVERY = 4
MOVED = 0.03
"""Share of the experts that an update changes, from which replay has something to change."""
GAP = 1e-3
"""Nats a token, k3 of sampler and learner without replay, from which training can feel the mismatch; as in E17."""
CONTROL_FACTOR = 0.01
"""What the float32 sampler's divergence may be at most, in parts of the bfloat16 one's, if precision is its cause."""


def judge(results: Mapping) -> dict[str, dict]:
  """The verdicts of `results.json`, each with its rule in words and the numbers that decided.

  Args:
    results: `updates`, rows of E5, see `studies.drift`; `rollouts` and `spreads`, rows of E7, see
      `studies.train`; `ends`, a row for each run of E7 with its held-out accuracy at the `start` and
      the `end`; `checks`, a row for each seed, see `studies.checks`.
  """
  updates, rollouts, spreads, ends, checks = (results[name] for name in ("updates", "rollouts", "spreads", "ends", "checks"))
  return _identities(rollouts, checks) | _drift(updates) | _divergence(rollouts) | _ratios(spreads) | _training(rollouts, ends)


def _identities(rollouts: Sequence[Mapping], checks: Sequence[Mapping]) -> dict[str, dict]:
  r3 = where(rollouts, replay="R3")
  largest = max((row["first_ratio"] for row in rollouts), default=math.nan)
  smallest = min((row["overlap"] for row in r3), default=math.nan)
  return {
    "T38": holds(
      "replaying the learner's own top k gives the same bits as routing live, in the same compiled program",
      all(row["own_routes"] for row in checks), identity=True,
      largest_r_minus_1_between_programs=max(row["own_routes_gap"] for row in checks),
    ),
    "T39, R2": holds(
      "R2's first mini-batch has r = 1 exactly where both passes are the same compiled program",
      all(row["r2_same_program"] == 0 for row in checks), identity=True,
      largest_r_minus_1_in_the_update=largest, largest_r_minus_1_for_fewer_rows=max(row["r2_other_rows"] for row in checks),
    ),
    "T39, R3": holds(
      "under R3 the learner visits exactly the sampler's experts, in every rollout batch", smallest == 1, identity=True,
      smallest_overlap=smallest,
    ),
  }  # fmt: skip


def _drift(updates: Sequence[Mapping]) -> dict[str, dict]:
  main = where(updates, learning_rate=DRIFT_RATE)
  deepest = max(row["depth"] for row in main)
  layers = [
    {"seed": row["seed"], "layer": layer, "change": change}
    for row in where(main, depth=deepest)
    for layer, change in enumerate(row["layers"])
  ]
  swept = sorted({row["learning_rate"] for row in updates})
  rates = {rate: mean_of("change")(where(updates, learning_rate=rate)) for rate in swept}
  nearest = min(rates, key=lambda rate: abs(math.log(max(rates[rate], 1e-9) / PAPER_CHANGE)))
  by_rate = [row | {"log": math.log(max(row["change"], 1e-6))} for row in updates]
  return {
    "E5, depth of the model": above(
      "slope of the changed fraction against log2(layers) above 0", line(main, "depth", "change", of=math.log2)
    ),
    "E5, layer": above(
      "slope of the changed fraction against the layer's number, in the deepest model, above 0", line(layers, "layer", "change", of=float)
    ),
    "E5, learning rate": above(
      "slope of log(changed fraction) against log(learning rate) above 0", line(by_rate, "learning_rate", "log", of=math.log)
    ),
    "E5, calibration": {
      "rule": "none: the learning rate whose changed fraction is nearest to the paper's 10 %", "verdict": CALIBRATION,
      "nearest": nearest, "change": {f"{rate:g}": change for rate, change in rates.items()},
    },
  }  # fmt: skip


def _of(rows: Sequence[Mapping], updates: int, replay: str, rate: float = RATE, sampler: str = "bfloat16", **more) -> list[Mapping]:
  return where(rows, updates=updates, replay=replay, sampler=sampler, rate=rate, **more)


def _divergence(rollouts: Sequence[Mapping]) -> dict[str, dict]:
  read = lambda name, *arm: per_seed(_of(rollouts, *arm), mean_of(name))
  verdicts = {}
  for updates, replay, rate in ((4, "none", RATE), (4, "R2", RATE), (1, "none", RATE), (4, "none", HOT_RATE), (4, "R2", HOT_RATE)):
    quotients = log_quotients(read("k3", updates, "R3", rate), read("k3", updates, replay, rate))
    name = f"E7, KL: R3 below {replay}, N = {updates}, rate {rate:g}"
    verdicts[name] = below("log of the quotient of the two arms' k3-KL(mu || pi_old) below 0", quotients)
  for updates, rate in ((4, RATE), (1, RATE), (4, HOT_RATE)):
    quotients = log_quotients(read("k3", updates, "R3", rate), read("k3_live", updates, "R3", rate))
    name = f"E7, KL on the same tokens, N = {updates}, rate {rate:g}"
    verdicts[name] = below("log of the quotient of k3-KL with and without the replayed routes, in the arm of R3, below 0", quotients)
  f2 = {replay: read("f2", 4, replay) for replay in ("none", "R2", "R3")}
  less = [min(a, b) - c for a, b, c in zip(f2["none"], f2["R2"], f2["R3"], strict=True)]
  verdicts["E7, F(2): R3 lowest"] = above(
    "F(2) between sampler and pi_old of none or R2, whichever is less, minus R3's, above 0", less, engaged=max(f2["none"] + f2["R2"]) > 0,
    f2={replay: sum(x) / len(x) for replay, x in f2.items()},
  )  # fmt: skip
  control = log_quotients(read("k3", 4, "none", RATE, "float32"), read("k3", 4, "none"))
  rule = f"log of the float32 sampler's k3-KL over the bfloat16 sampler's, below log {CONTROL_FACTOR}"
  verdicts["E7, control: float32 sampler"] = below(rule, control, math.log(CONTROL_FACTOR))
  return verdicts


def _ratios(spreads: Sequence[Mapping]) -> dict[str, dict]:
  # Before the last of four updates: what no update has seen yet, at its most stale.
  late = where(spreads, update=3)
  moved = mean_of("change")(_of(late, 4, "none", view="live"))
  engaged, verdicts = dict(engaged=moved >= MOVED, change=moved), {}
  for name, words in (("std_log_r", "token"), ("std_log_s", "sequence")):
    read = lambda replay, view, name=name: per_seed(_of(late, 4, replay, view=view), mean_of(name))
    rule = f"log of the quotient of the standard deviations of the {words} log-ratios after 3 updates, with and without replay, below 0"
    live = read("none", "live")
    verdicts[f"E7, {words} ratios: same weights"] = below(rule, log_quotients(read("none", "replay"), live), **engaged)
    for replay in ("R2", "R3"):
      verdicts[f"E7, {words} ratios: {replay} against none"] = below(rule, log_quotients(read(replay, "replay"), live), **engaged)
  return verdicts


def _training(rollouts: Sequence[Mapping], ends: Sequence[Mapping]) -> dict[str, dict]:
  has_collapsed = lambda rows: collapsed([rows[0]["start"], rows[0]["end"]])
  fallen = {replay: dict(enumerate(per_seed(_of(ends, 4, replay, HOT_RATE), has_collapsed))) for replay in ("none", "R2")}
  end = lambda replay, rate: per_seed(_of(ends, 4, replay, rate), mean_of("end"))
  gains = per_seed(_of(ends, 4, "none"), lambda rows: rows[0]["end"] - rows[0]["start"])
  verdicts = {
    "E7, GRPO learns": above(f"held-out accuracy without replay at rate {RATE:g}, at the end minus at the start, above 0", gains),
    "E6, GRPO collapses without replay": more_often(
      f"at rate {HOT_RATE:g}, more seeds collapse (`judging.collapsed`) without replay than with R2", fallen["none"], fallen["R2"]
    ),
  }
  for better, worse, rate in (("R3", "R2", RATE), ("R3", "none", RATE), ("R3", "R2", HOT_RATE), ("R3", "none", HOT_RATE)):
    gap = mean_of("k3")(_of(rollouts, 4, "none", rate))
    values = [a - b for a, b in zip(end(better, rate), end(worse, rate), strict=True)]
    rule = f"held-out accuracy at the end with {better} minus with {worse}, above 0"
    verdicts[f"E7, accuracy: {better} above {worse}, N = 4, rate {rate:g}"] = above(rule, values, engaged=gap >= GAP, gap=gap)
  return verdicts
