"""The rules that say what counts as reproduced. Written before the measured run, and not changed after it.

Looked at beforehand: GRPO alone on a pilot seed (100, not among the seeds of the run), to choose the learning rate. Of a sampler that
differs from the learner nothing was looked at.

On policy, one update a rollout batch; the old log-probabilities are the learner's, so every ratio is 1 and the mismatch k = pi_old / mu
is all there is. The sampler draws at temperature 0.7 or 1.4, where the learner's is 1, or computes in bfloat16. Arms: "IS", the plain
policy gradient (token sum, advantages without the deviation, as in MiniRL) weighed by min(k, 5); "none", without the weights; "length
norm", with the weights and the mean over each response in the place of the sum.

Differences are paired: a seed has one warm start, one order of problems and one set of keys. Accuracy passes if both intervals lie where
the rule says: the hierarchical bootstrap's over seeds and problems, and Student's over the seeds. Nothing is corrected for the number of
rules. A verdict is "mechanism not engaged" where the k3 divergence of learner and sampler, mean over the "none" trials, is below `GAP`;
and for collapses, also where no trial collapses.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.claims.bed import Arm
from experiments.claims.intervals import difference, interval, solved, verdict

SEEDS = (0, 1, 2, 3, 4)
LEARNING_RATE = 1e-3
SAMPLERS = {"T = 0.7": {"temperature": 0.7}, "T = 1.4": {"temperature": 1.4}, "bfloat16": {"dtype": "bfloat16"}}
GAP = 1e-3
"""Nats a token. Published mismatches of large mixtures of experts are near 1.5e-3, of dense models 6e-4."""

_SUM = (("weights", "sequence_sum"),)
_MEAN = (("weights", "sequence_mean"),)
WAYS = {
  "IS": Arm("reinforce", _SUM, "centred", recompute=True, correction="tis5"),
  "none": Arm("reinforce", _SUM, "centred", recompute=True),
  "length norm": Arm("reinforce", _MEAN, "centred", recompute=True, correction="tis5"),
}

Rows = Sequence[Mapping]


def arms() -> list[tuple[dict, Arm]]:
  """Every way under every sampler."""
  return [
    ({"way": way, "sampler": sampler}, arm._replace(learning_rate=LEARNING_RATE, **changes))
    for sampler, changes in SAMPLERS.items()
    for way, arm in WAYS.items()
  ]


def judge(trials: Rows) -> dict[str, dict]:
  """All verdicts, each with its rule in words and the numbers that decided."""
  found = {}
  for sampler in SAMPLERS:
    mine = [row for row in trials if row["sampler"] == sampler]
    gap = float(np.mean([row["gap"] for row in mine if row["way"] == "none"]))
    engaged = dict(engaged=gap >= GAP)
    for less in ("none", "length norm"):
      gain = difference(solved(mine, way="IS"), solved(mine, way=less))
      found[f"E17, accuracy: IS above {less}, {sampler}"] = verdict(
        f"held-out accuracy at the end, 'IS' minus '{less}', above 0: both intervals", gain.low > 0, **engaged, **gain._asdict(), gap=gap
      )
    entropy = {way: {row["seed"]: _last(row) for row in mine if row["way"] == way} for way in WAYS}
    drop = interval([entropy["none"][seed] - entropy["IS"][seed] for seed in sorted(entropy["IS"])])
    found[f"E17, entropy drops without IS, {sampler}"] = verdict(
      "entropy at the last update in nats a token, 'none' minus 'IS', below 0: the whole interval", drop["high"] < 0, **engaged,
      interval=drop,
    )  # fmt: skip
    found[f"E17, none collapses first, {sampler}"] = _collapses(mine, gap)
  return found


def _last(row: Mapping) -> float:
  return [x for x in row["entropy"] if x is not None][-1]


def _collapses(trials: Rows, gap: float) -> dict:
  count = {way: sum(row["collapse"] != "" for row in trials if row["way"] == way) for way in WAYS}
  rule = "at least two seeds more show a sign of collapse under 'none' than under 'IS'"
  numbers = {way.replace(" ", "_"): value for way, value in count.items()} | {"of": len({row["seed"] for row in trials})}
  return verdict(rule, count["none"] - count["IS"] >= 2, engaged=gap >= GAP and any(count.values()), **numbers)
