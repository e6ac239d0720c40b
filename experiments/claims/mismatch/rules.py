"""The rules that say what counts as reproduced, by the verdicts of `experiments.judging`.

Looked at before the run of 2026-11-22: GRPO alone on a pilot seed (100, not among the seeds of the
run), to choose the learning rate. Of a sampler that differs from the learner nothing was looked at.

On policy, one update a rollout batch; the old log-probabilities are the learner's, so every ratio
is 1 and the mismatch k = pi_old / mu is all there is. The sampler draws at temperature 0.7 or 1.4,
where the learner's is 1, or computes in bfloat16 or with weights in float8. Arms: "IS", the plain policy gradient (token sum,
advantages without the deviation, as in MiniRL) weighed by min(k, 5); "none", without the weights;
"length norm", with the weights and the mean over each response in the place of the sum.

Changed on 2026-11-25, when the results of seeds 0 to 4 were known: the five verdicts and Student's
interval alone; the one endpoint of collapse that all studies share (before, an entropy near 0
counted, which seeds showed that had solved the task); `GAP`, which was 1e-3; and a sampler in float8,
whose mismatch is that of the engines of large models, has the confirmatory rule: bfloat16 of so small
a model hardly differs, and a temperature shifts every token the same way. Seeds 340 to 371 are fresh,
and nothing has been trained with a float8 sampler on this bed.

Differences are paired: a seed has one warm start, one order of problems and one set of keys. A
verdict is "mechanism not engaged" where the k3 divergence of learner and sampler, mean over the
"none" trials, is below `GAP`; and for collapses, also where no trial collapses.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments import judging
from experiments.claims.bed import Arm

SEEDS = tuple(range(340, 372))
CONFIRMATORY = {"E17": "E17, accuracy: IS above none, float8"}
"""The one rule of each claim that a verdict is read from; all others are exploratory."""
LEARNING_RATE = 1e-3
SAMPLERS = {
  "T = 0.7": {"temperature": 0.7}, "T = 1.4": {"temperature": 1.4}, "bfloat16": {"dtype": "bfloat16"}, "float8": {"dtype": "float8"},
}  # fmt: skip
GAP = 6e-4
"""Nats a token, k3. Published mismatches of dense models are near 6e-4, of large mixtures of experts 1.5e-3."""

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


def judge(results: Mapping) -> dict[str, dict]:
  """The verdicts of `results.json`, each with its rule in words and the numbers that decided."""
  trials = results["trials"]
  verdicts = {}
  for sampler in SAMPLERS:
    mine = [row for row in trials if row["sampler"] == sampler]
    gap = float(np.mean([row["gap"] for row in mine if row["way"] == "none"]))
    engaged = dict(engaged=gap >= GAP, gap=gap)
    at = lambda way, mine=mine: judging.solved(mine, way=way)
    for less in ("none", "length norm"):
      rule = f"held-out accuracy at the end, 'IS' minus '{less}', above 0"
      verdicts[f"E17, accuracy: IS above {less}, {sampler}"] = judging.above(rule, judging.paired(at("IS"), at(less)), **engaged)
    entropy, fallen = ({way: {row["seed"]: read(row) for row in mine if row["way"] == way} for way in WAYS} for read in (_last, _collapsed))
    verdicts[f"E17, entropy drops without IS, {sampler}"] = judging.below(
      "entropy at the last update in nats a token, 'none' minus 'IS', below 0", judging.paired(entropy["none"], entropy["IS"]), **engaged
    )
    rule = "more seeds collapse (`judging.collapsed`) under 'none' than under 'IS'"
    verdicts[f"E17, none collapses first, {sampler}"] = judging.more_often(rule, fallen["none"], fallen["IS"], **engaged)
  return verdicts


def _last(row: Mapping) -> float:
  return [x for x in row["entropy"] if x is not None][-1]


def _collapsed(row: Mapping) -> bool:
  return judging.collapsed(row["curve"])
