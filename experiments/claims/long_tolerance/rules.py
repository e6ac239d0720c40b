"""The rules that say what counts as reproduced, by the verdicts of `experiments.judging`.

E16 found on responses of six tokens that GSPO needs recomputed log-probabilities at the mismatch of
large mixtures (k3 1.5e-3), and E23 tries experts. The paper's argument is about long responses: the
errors of their many tokens average out. So does what GSPO's band has to be if it clips 15 % of the
tokens, which is why arithmetic does not decide.

Bed: E16's with 64 digits and so 64 tokens a response. A warm start takes three to nine minutes of a
core, so that there are two (seeds `WARM`), and on each `DRAWS` sets of samples: a pair of arms shares warm
start, problems and keys. The verdicts are about these two policies; the pairs of one are no sample
of policies. The sampler's weights have `SHARE` times the error of their float8 rounding, so that its
divergence is 1.5e-3 on average of both; a verdict is "mechanism not engaged" where the mean is not
within a factor of 1.5 of that. 4 updates of each rollout batch; GSPO's band is `BAND` times its
paper's.

Looked at before, on these warm starts: the divergence of samplers (float8: 2.2e-3 and 1.2e-3, so
0.94 of its error gives 1.5e-3), and in three trials of the first one, with other samples and an
exact sampler, the share of the tokens that GSPO clips: 20.5, 14.0 and 13.1 % at 1, 1.5 and 2 times
its paper's band. No accuracy. How E16 ended was known, and of E23 nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments import judging
from experiments.claims.bed import Arm, Sizes

SIZES = Sizes(digits=(64, 64), error_rate=1 / 64, eval_prompts=32, end_prompts=128)
WARM = (1600, 1601)
DRAWS = (1, 2, 3, 4)
CONFIRMATORY = {"E24": "E24, gspo needs no recomputation"}
"""The one rule of each claim that a verdict is read from; all others are exploratory."""
LEARNING_RATE, PER_ROLLOUT = 1e-3, 4
MARGIN = 0.05
"""Held-out accuracy that counts as a loss. As in E16."""
TARGET = 1.5e-3
"""Nats a token, k3: the divergence of large mixtures' engines."""
SHARE = 0.94
BAND = 1.5
SAMPLER = f"float8 x {SHARE:g}"

OBJECTIVES = {
  "grpo": Arm("grpo", (("kl_coef", 0.0),)),
  "gspo": Arm("gspo", (("clip_low", 3e-4 * BAND), ("clip_high", 4e-4 * BAND))),
  "sapo": Arm("sapo"),
}
WAYS = {"recompute": {"recompute": True}, "none": {"recompute": False}}

Rows = Sequence[Mapping]


def arms() -> list[tuple[dict, Arm]]:
  """Returns every objective in both ways, with every set of samples."""
  options = dict(dtype=SAMPLER, per_rollout=PER_ROLLOUT, learning_rate=LEARNING_RATE)
  return [
    ({"objective": name, "way": way, "draw": draw}, arm._replace(**options, **of_way))
    for draw in DRAWS
    for name, arm in OBJECTIVES.items()
    for way, of_way in WAYS.items()
  ]


def judge(results: Mapping) -> dict[str, dict]:
  """The verdicts of `results.json`, each with its rule in words and the numbers that decided."""
  trials, gaps = results["trials"], [row["k3"] for row in results["divergence"] if row["sampler"] == SAMPLER]
  gap = float(np.mean(gaps))
  engaged = dict(engaged=TARGET / 1.5 <= gap <= TARGET * 1.5, gap=gap)
  column = lambda name, way, value: {
    (row["seed"], row["draw"]): value(row) for row in trials if (row["objective"], row["way"]) == (name, way)
  }
  right = lambda row: float(np.mean([int(x) for x in row["right"]])) / row["samples"]
  lost = lambda name, value=right: judging.paired(column(name, "none", value), column(name, "recompute", value))
  verdicts = {}
  for name in OBJECTIVES:
    rule = f"held-out accuracy at the end of {name}, 'none' minus 'recompute', above -{MARGIN:g}"
    verdicts[f"E24, {name} needs no recomputation"] = judging.above(rule, lost(name), -MARGIN, **engaged)
  verdicts["E24, gspo tolerates more than grpo"] = judging.above(
    "accuracy, 'none' minus 'recompute', of gspo minus that of grpo, above 0", lost("gspo") - lost("grpo"), **engaged
  )
  verdicts["E24, gspo clips more without recomputation"] = judging.above(
    "clipped fraction of the tokens of gspo, mean over training, 'none' minus 'recompute', above 0",
    lost("gspo", lambda row: row["clipped"]), **engaged,
  )  # fmt: skip
  return verdicts
