"""The rules that say what counts as reproduced. Written before the measured run, and not changed after it.

Looked at beforehand: one pilot seed (100, not among the seeds of the run). Its warm start, at two learning rates and two error rates of
the teacher; 8 updates of E5 at rates 1e-4 to 3e-3 with 4 layers, in which deeper layers changed more; 10 to 20 rollout batches without
replay at rates from 1e-4 to 2e-3, to find one that learns and one that falls apart; and 10 rollout batches with R3 at 1e-3 and 2e-3, in
which the KL was mostly lower than without. So the directions of E5 and of the KL are confirmed on fresh seeds, not predicted blindly.

A verdict is "reproduced", "not reproduced" or "mechanism not engaged", the last where nothing in the run could have decided. Intervals are
Student's 95 % over the seeds.
"""

import math
from collections.abc import Mapping, Sequence

from experiments.ablations.ratio_lab.measures import interval
from experiments.ablations.routing_replay.measures import collapsed, line, log_quotient, mean_of, per_seed, where
from experiments.ablations.routing_replay.studies import Arm

SEEDS = (0, 1, 2)

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
CONTROL_FACTOR = 0.01
"""What the float32 sampler's divergence may be at most, in parts of the bfloat16 one's, if precision is its cause."""


def judge(
  updates: Sequence[Mapping], rollouts: Sequence[Mapping], spreads: Sequence[Mapping], ends: Sequence[Mapping], checks: Sequence[Mapping]
) -> dict[str, dict]:
  """All verdicts, each with its rule in words and the numbers that decided.

  Args:
    updates: rows of E5, see `studies.drift`.
    rollouts: rows of E7, see `studies.train`.
    spreads: the same.
    ends: a row a run of E7 with its held-out accuracy at the `start` and the `end`.
    checks: a row a seed, see `studies.checks`.
  """
  return _identities(rollouts, checks) | _drift(updates) | _divergence(rollouts) | _ratios(spreads) | _training(rollouts, ends)


def _identities(rollouts: Sequence[Mapping], checks: Sequence[Mapping]) -> dict[str, dict]:
  r3 = where(rollouts, replay="R3")
  largest = max((row["first_ratio"] for row in rollouts), default=math.nan)
  smallest = min((row["overlap"] for row in r3), default=math.nan)
  return {
    "T38": _verdict(
      "replaying the learner's own top k gives the same bits as routing live, in the same compiled program",
      all(row["own_routes"] for row in checks), largest_r_minus_1_between_programs=max(row["own_routes_gap"] for row in checks),
    ),
    "T39, R2": _verdict(
      "R2's first mini-batch has r = 1 exactly where both passes are the same compiled program",
      all(row["r2_same_program"] == 0 for row in checks),
      largest_r_minus_1_in_the_update=largest, largest_r_minus_1_for_fewer_rows=max(row["r2_other_rows"] for row in checks),
    ),
    "T39, R3": _verdict(
      "under R3 the learner visits exactly the sampler's experts, in every rollout batch", smallest == 1, smallest_overlap=smallest,
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
    "E5, depth of the model": _above(
      "slope of the changed fraction against log2(layers) above 0", line(main, "depth", "change", of=math.log2)
    ),
    "E5, layer": _above(
      "slope of the changed fraction against the layer's number, in the deepest model, above 0", line(layers, "layer", "change", of=float)
    ),
    "E5, learning rate": _above(
      "slope of log(changed fraction) against log(learning rate) above 0", line(by_rate, "learning_rate", "log", of=math.log)
    ),
    "E5, calibration": {
      "rule": "none: the learning rate whose changed fraction is nearest to the paper's 10 %", "verdict": "calibration",
      "nearest": nearest, "change": {f"{rate:g}": change for rate, change in rates.items()},
    },
  }  # fmt: skip


def _of(rows: Sequence[Mapping], updates: int, replay: str, rate: float = RATE, sampler: str = "bfloat16", **more) -> list[Mapping]:
  return where(rows, updates=updates, replay=replay, sampler=sampler, rate=rate, **more)


def _divergence(rollouts: Sequence[Mapping]) -> dict[str, dict]:
  read = lambda name, *arm: per_seed(_of(rollouts, *arm), mean_of(name))
  found = {}
  for updates, replay, rate in ((4, "none", RATE), (4, "R2", RATE), (1, "none", RATE), (4, "none", HOT_RATE), (4, "R2", HOT_RATE)):
    at = log_quotient(read("k3", updates, "R3", rate), read("k3", updates, replay, rate))
    name = f"E7, KL: R3 below {replay}, N = {updates}, rate {rate:g}"
    found[name] = _below("log of the quotient of the two arms' k3-KL(mu || pi_old) below 0", at)
  for updates, rate in ((4, RATE), (1, RATE), (4, HOT_RATE)):
    at = log_quotient(read("k3", updates, "R3", rate), read("k3_live", updates, "R3", rate))
    name = f"E7, KL on the same tokens, N = {updates}, rate {rate:g}"
    found[name] = _below("log of the quotient of k3-KL with and without the replayed routes, in the arm of R3, below 0", at)
  f2 = {replay: read("f2", 4, replay) for replay in ("none", "R2", "R3")}
  less = interval([min(a, b) - c for a, b, c in zip(f2["none"], f2["R2"], f2["R3"], strict=True)])
  found["E7, F(2): R3 lowest"] = _above(
    "F(2) between sampler and pi_old of none or R2, whichever is less, minus R3's, above 0", less, engaged=max(f2["none"] + f2["R2"]) > 0,
    f2={replay: sum(x) / len(x) for replay, x in f2.items()},
  )  # fmt: skip
  control = log_quotient(read("k3", 4, "none", RATE, "float32"), read("k3", 4, "none"))
  rule = f"the float32 sampler's k3-KL is at most {CONTROL_FACTOR} of the bfloat16 sampler's: the whole interval"
  found["E7, control: float32 sampler"] = _verdict(rule, control["high"] < math.log(CONTROL_FACTOR), interval=control)
  return found


def _ratios(spreads: Sequence[Mapping]) -> dict[str, dict]:
  # Before the last of four updates: what no update has seen yet, at its most stale.
  late = where(spreads, update=3)
  found = {}
  for name, words in (("std_log_r", "token"), ("std_log_s", "sequence")):
    read = lambda replay, view, name=name: per_seed(_of(late, 4, replay, view=view), mean_of(name))
    rule = f"log of the quotient of the standard deviations of the {words} log-ratios after 3 updates, with and without replay, below 0"
    found[f"E7, {words} ratios: same weights"] = _below(rule, log_quotient(read("none", "replay"), read("none", "live")))
    for replay in ("R2", "R3"):
      found[f"E7, {words} ratios: {replay} against none"] = _below(rule, log_quotient(read(replay, "replay"), read("none", "live")))
  return found


def _training(rollouts: Sequence[Mapping], ends: Sequence[Mapping]) -> dict[str, dict]:
  arms = ("none", "R2", "R3")
  has_fallen = lambda rows: collapsed([row["reward"] for row in rows])
  fallen = {replay: sum(per_seed(_of(rollouts, 4, replay, HOT_RATE), has_fallen)) for replay in arms}
  end = lambda replay, rate: per_seed(_of(ends, 4, replay, rate), mean_of("end"))
  learnt = _of(ends, 4, "none")
  found = {
    "E7, GRPO learns": _above(
      f"held-out accuracy without replay at rate {RATE:g}, at the end minus at the start, above 0",
      interval(per_seed(learnt, lambda rows: rows[0]["end"] - rows[0]["start"])),
    ),
    "E6, GRPO collapses without replay": {
      "rule": f"at rate {HOT_RATE:g}, more runs collapse (running reward below half its maximum) without replay than with R2 and with R3",
      "verdict": "mechanism not engaged" if not sum(fallen.values()) else _said(fallen["none"] > max(fallen["R2"], fallen["R3"])),
      "collapsed": fallen, "of": len(end("none", HOT_RATE)),
    },
  }  # fmt: skip
  for better, worse, rate in (("R3", "R2", RATE), ("R3", "none", RATE), ("R3", "R2", HOT_RATE), ("R3", "none", HOT_RATE)):
    at = interval([a - b for a, b in zip(end(better, rate), end(worse, rate), strict=True)])
    rule = f"held-out accuracy at the end with {better} minus with {worse}, above 0"
    found[f"E7, accuracy: {better} above {worse}, N = 4, rate {rate:g}"] = _above(rule, at)
  return found


def _said(passed: bool) -> str:
  return "reproduced" if passed else "not reproduced"


def _verdict(rule: str, passed: bool, **numbers) -> dict:
  return {"rule": rule, "verdict": _said(passed), **numbers}


def _above(rule: str, at: Mapping[str, float], *, engaged: bool = True, **numbers) -> dict:
  verdict = _said(at["low"] > 0) if engaged else "mechanism not engaged"
  return {"rule": f"{rule}: the whole interval", "verdict": verdict, "interval": dict(at), **numbers}


def _below(rule: str, at: Mapping[str, float]) -> dict:
  return {"rule": f"{rule}: the whole interval", "verdict": _said(at["high"] < 0), "interval": dict(at)}
