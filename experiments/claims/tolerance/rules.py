"""The rules that say what counts as reproduced, by the verdicts of `experiments.judging`.

E16 found that GSPO, at the mismatch of large models' engines and with a band that clips 15 % of the
tokens, loses accuracy without recomputed log-probabilities. Open was how the loss depends on the
mismatch, down to one of 0, and on experts: a sampler that rounds visits other experts than the
learner, whose ratios then jump.

Two beds: "short" is E16's, with responses of four to eight tokens; "mixture" the same with eight
experts, of which a token visits two. A sampler computes in float32 (an A/A comparison: it differs
from the learner by rounding alone, 1e-7 nats), in bfloat16, or has weights in int8 or float8. 4
updates of each rollout batch, as in GSPO's paper; its band is 12 times its paper's, so that it clips
15 % of the tokens.

Ways: old log-probabilities of the learner ("recompute") or of the sampler ("none"); with float8
also recomputed ones weighed by the mismatch, capped at 2 ("tis"). Differences are paired: a seed
has one warm start, one order of problems and one set of keys.

Looked at before, on the seeds 470 and 471 that serve no other purpose: the share of clipped tokens
of GSPO on the mixture at 12 times its paper's band (17.6 and 14.6 %), and what a trial costs. E16's
results on the short bed, at other mismatches but for float8, where GSPO's band was wider. Of the
mixture no accuracy of any of these arms.

The mixture with float8 decides the claim: it is made of large mixtures and the engines that draw
for them. Everything else is exploratory. A verdict is "mechanism not engaged" where the sampler's
divergence is below `GAP`, but for the A/A comparison, in which nothing is to be lost.

Not in this run: long responses. On the same task with 32 and 64 digits a seed's imitation takes
more than 400 s of a core, and its arms as much again.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments import judging
from experiments.claims.bed import Arm

SEEDS = tuple(range(1500, 1512))
CONFIRMATORY = {"E23": "E23, mixture, float8: gspo needs no recomputation"}
"""The one rule of each claim that a verdict is read from; all others are exploratory."""
LEARNING_RATE, PER_ROLLOUT = 1e-3, 4
MARGIN = 0.05
"""Held-out accuracy that counts as a loss. As in E16."""
GAP = 1e-6
"""Nats a token, k3, below which a sampler counts as the learner: a thousandth of published mismatches."""

BAND = 12.0
"""GSPO's band, relative to its paper's, at which it clips 15 % of the tokens."""
MODELS = {"short": "dense", "mixture": "experts"}
SAMPLERS = {"short": ("float32", "bfloat16", "int8", "float8"), "mixture": ("float32", "bfloat16", "float8")}
OBJECTIVES = {
  "grpo": Arm("grpo", (("kl_coef", 0.0),)),
  "gspo": Arm("gspo", (("clip_low", 3e-4 * BAND), ("clip_high", 4e-4 * BAND))),
  "sapo": Arm("sapo"),
}

Rows = Sequence[Mapping]


def ways(sampler: str) -> dict[str, dict]:
  """Returns where old log-probabilities come from, by name."""
  plain = {"recompute": {"recompute": True}, "none": {"recompute": False}}
  return plain | ({"tis": {"recompute": True, "correction": "tis"}} if sampler == "float8" else {})


def arms(bed: str) -> list[tuple[dict, Arm]]:
  """Returns every objective on a bed, with every sampler and in every way."""
  return [
    (
      {"bed": bed, "sampler": sampler, "objective": name, "way": way},
      arm._replace(dtype=sampler, per_rollout=PER_ROLLOUT, learning_rate=LEARNING_RATE, model=MODELS[bed], **options),
    )
    for sampler in SAMPLERS[bed]
    for name, arm in OBJECTIVES.items()
    for way, options in ways(sampler).items()
  ]


def judge(results: Mapping) -> dict[str, dict]:
  """The verdicts of `results.json`, each with its rule in words and the numbers that decided."""
  verdicts = {}
  for bed in MODELS:
    trials, rows = ([row for row in results.get(table, ()) if row["bed"] == bed] for table in ("trials", "divergence"))
    verdicts |= _of_bed(bed, trials, rows)
  return verdicts


def _of_bed(bed: str, trials: Rows, rows: Rows) -> dict[str, dict]:
  verdicts = {}
  for sampler in SAMPLERS[bed]:
    at = lambda objective, way, sampler=sampler: judging.solved(trials, sampler=sampler, objective=objective, way=way)
    gaps = [row["k3"] for row in rows if row["sampler"] == sampler]
    gap = float(np.mean(gaps)) if gaps else float("nan")
    engaged = dict(engaged=gap >= GAP or sampler == "float32", gap=gap)
    for name in OBJECTIVES:
      rule, needs = f"E23, {bed}, {sampler}: {name} needs no recomputation", f"held-out accuracy at the end of {name}, 'none' minus"
      needs += f" 'recompute', above -{MARGIN:g}"
      if not trials:
        verdicts[rule] = judging.waits(needs)
        continue
      recomputed = at(name, "recompute")
      verdicts[rule] = judging.above(needs, judging.paired(at(name, "none"), recomputed), -MARGIN, **engaged)
      if "tis" in ways(sampler):
        gains = f"held-out accuracy at the end of {name}, 'tis' minus 'recompute', above 0"
        values = judging.paired(at(name, "tis"), recomputed)
        verdicts[f"E23, {bed}, {sampler}: {name} gains by tis"] = judging.above(gains, values, **engaged)
  return verdicts
