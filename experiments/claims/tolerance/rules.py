"""The rules that say what counts as reproduced, by the verdicts of `experiments.judging`.

E16 found that GSPO, at the mismatch of large models' engines and with a band that clips 15 % of the
tokens, loses accuracy without recomputed log-probabilities; responses had six tokens. Open was how
the loss depends on the mismatch, on the length of a response, and on experts. A sampler that is
exact has a mismatch of 0, so that the curve has a left end.

Three beds: "short" is E16's, with responses of four to eight tokens; "mixture" the same with eight
experts, of which a token visits two, so that a sampler that rounds visits others; "long" has
responses of 64 tokens. A sampler computes in float32 (an A/A comparison: it differs from the
learner by rounding alone, 1e-7 nats), in bfloat16, or has weights in int8 or float8; on the long
bed, where float8 comes to 6.5e-4 nats a token only, one more has 1.5 times its error. 4 updates of
each rollout batch, as in GSPO's paper; its band is wide enough to clip 15 % of the tokens: 12 times
its paper's on the short bed (E16) and `BANDS` on the others.

Ways: old log-probabilities of the learner ("recompute") or of the sampler ("none"); with float8
also recomputed ones weighed by the mismatch, capped at 2 ("tis"). Differences are paired: a seed
has one warm start, one order of problems and one set of keys.

Looked at before, on the seeds 470 to 473 that serve no other purpose: the share of clipped tokens
of GSPO on the mixture (16.1 % at 12 times, mean of two seeds, 12.5 % at 18 times) and on the long
bed (LONG_LOOK), and what a trial costs. In the first forecast's checks, on another seed, float8's
divergence on the long bed. No accuracy of any of these arms.

What decides the claim is the long bed with a sampler at the mismatch of dense models, since the
paper's argument is about long responses: the mean of many errors is near 0. Everything else is
exploratory. A verdict is "mechanism not engaged" where the sampler's divergence is below `GAP`,
but for the A/A comparison, which has a rule of its own: that nothing is lost.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments import judging
from experiments.claims.bed import Arm, Sizes

SEEDS = tuple(range(1500, 1512))
LONG_SEEDS = tuple(range(1500, 1510))
CONFIRMATORY = {"E23": "E23, long, float8: gspo needs no recomputation"}
"""The one rule of each claim that a verdict is read from; all others are exploratory."""
LEARNING_RATE, PER_ROLLOUT = 1e-3, 4
MARGIN = 0.05
"""Held-out accuracy that counts as a loss. As in E16."""
GAP = 1e-6
"""Nats a token, k3, below which a sampler counts as the learner: a thousandth of published mismatches."""

LONG = Sizes(digits=(64, 64), error_rate=1 / 64, eval_prompts=32, end_prompts=128)
BANDS = {"short": 12.0, "mixture": 12.0, "long": 4.0}
"""GSPO's band, relative to its paper's, at which it clips 15 % of the tokens."""
MODELS = {"short": "dense", "mixture": "experts", "long": "dense"}
SAMPLERS = ("float32", "bfloat16", "int8", "float8")
WIDER = "float8 x 1.5"

Rows = Sequence[Mapping]


def objectives(bed: str) -> dict[str, Arm]:
  """Returns the objectives on a bed."""
  band = BANDS[bed]
  return {
    "grpo": Arm("grpo", (("kl_coef", 0.0),)),
    "gspo": Arm("gspo", (("clip_low", 3e-4 * band), ("clip_high", 4e-4 * band))),
    "sapo": Arm("sapo"),
  }


def samplers(bed: str) -> tuple[str, ...]:
  """Returns the samplers on a bed."""
  return (*SAMPLERS, WIDER) if bed == "long" else SAMPLERS


def ways(bed: str, sampler: str) -> dict[str, dict]:
  """Returns where old log-probabilities come from, by name."""
  plain = {"recompute": {"recompute": True}, "none": {"recompute": False}}
  return plain | ({"tis": {"recompute": True, "correction": "tis"}} if sampler == "float8" and bed != "long" else {})


def arms(bed: str) -> list[tuple[dict, Arm]]:
  """Returns every objective on a bed, with every sampler and in every way."""
  return [
    (
      {"bed": bed, "sampler": sampler, "objective": name, "way": way},
      arm._replace(dtype=sampler, per_rollout=PER_ROLLOUT, learning_rate=LEARNING_RATE, model=MODELS[bed], **options),
    )
    for sampler in samplers(bed)
    for name, arm in objectives(bed).items()
    for way, options in ways(bed, sampler).items()
  ]


def judge(results: Mapping) -> dict[str, dict]:
  """The verdicts of `results.json`, each with its rule in words and the numbers that decided."""
  verdicts = {}
  for bed in BANDS:
    of_run = "second_" if bed == "long" else ""
    trials = [row for row in results.get(f"{of_run}trials", ()) if row["bed"] == bed]
    rows = [row for row in results.get(f"{of_run}divergence", ()) if row["bed"] == bed]
    verdicts |= _of_bed(bed, trials, rows)
  return verdicts


def _of_bed(bed: str, trials: Rows, rows: Rows) -> dict[str, dict]:
  verdicts = {}
  for sampler in samplers(bed):
    at = lambda objective, way, sampler=sampler: judging.solved(trials, sampler=sampler, objective=objective, way=way)
    gaps = [row["k3"] for row in rows if row["sampler"] == sampler]
    gap = float(np.mean(gaps)) if gaps else float("nan")
    engaged = dict(engaged=gap >= GAP or sampler == "float32", gap=gap)
    for name in objectives(bed):
      rule, needs = f"E23, {bed}, {sampler}: {name} needs no recomputation", f"held-out accuracy at the end of {name}, 'none' minus"
      needs += f" 'recompute', above -{MARGIN:g}"
      if not trials:
        verdicts[rule] = judging.waits(needs)
        continue
      recomputed = at(name, "recompute")
      verdicts[rule] = judging.above(needs, judging.paired(at(name, "none"), recomputed), -MARGIN, **engaged)
      if "tis" in ways(bed, sampler):
        gains, values = f"held-out accuracy at the end of {name}, 'tis' minus 'recompute', above 0", judging.paired(at(name, "tis"), recomputed)
        verdicts[f"E23, {bed}, {sampler}: {name} gains by tis"] = judging.above(gains, values, **engaged)
  return verdicts
