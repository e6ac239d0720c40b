"""The rules that say what counts as reproduced. Written before the measured run, and not changed after it.

Looked at beforehand: GRPO alone on a pilot seed (100, not among the seeds of the run), to choose the learning rate. Of errors in the old
log-probabilities nothing. By arithmetic, an independent error of each token shrinks as 1/sqrt(T) in GSPO's ratio; so does GSPO's band, so
that fewer tokens crossing the clip's bound is not to be expected: that rule is the claim, and we expect it to fail.

Two measurements. `distortion`: a policy made stale by 16 exact updates on one rollout batch, whose tokens are then weighed with exact and
with wrong old log-probabilities (bfloat16, or an error of 0.02 or 0.1 nats of each token's own). Training: a sampler in bfloat16, 4 updates
a rollout batch, old log-probabilities recomputed by the learner ("recompute"), taken from the sampler ("none"), or recomputed and
weighed by the mismatch, capped at 2 ("tis") or dropped above it ("mis").

Differences are paired: a seed has one warm start, one order of problems and one set of keys. Accuracy passes if both intervals lie where
the rule says: the hierarchical bootstrap's over seeds and problems, and Student's over the seeds; all else goes by Student's. Nothing is
corrected for the number of rules. A verdict of training is "mechanism not engaged" where GRPO's sampler and learner differ by less than
`GAP`; one about the clip's bound, where no token crosses it.

Mended after the run: the mismatch of sampler and learner was at first read from the updates, which adds the staleness of 4 updates a
rollout batch (1.5e-3 nats a token) to it, and called training "engaged". It is now read from `distortion`, where nothing is stale.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.claims.bed import Arm
from experiments.claims.intervals import difference, interval, solved, verdict

SEEDS = (0, 1, 2, 3, 4)
LEARNING_RATE = 1e-3
PER_ROLLOUT = 4
STALE_UPDATES = 16
ERRORS: dict[str, float | None] = {"bfloat16": None, "0.02": 0.02, "0.1": 0.1}
MAIN_ERROR = "0.02"
GAP = 1e-4
"""Nats a token, k3: the divergence of the sampler over a trial."""
TINY = 1e-12  # A smoke run may have nothing to weigh.
MARGIN = 0.05
"""Held-out accuracy that counts as a loss."""

SHORTER = (4096 / 6) ** 0.5
"""GSPO's ratio spreads as 1/sqrt(length): its band was made for thousands of tokens, and responses have 6 here. 4096 is our guess."""

OBJECTIVES = {
  "grpo": Arm("grpo", (("kl_coef", 0.0),), learning_rate=LEARNING_RATE),
  "gspo": Arm("gspo", (("clip_low", 3e-4 * SHORTER), ("clip_high", 4e-4 * SHORTER)), learning_rate=LEARNING_RATE),
  "sapo": Arm("sapo", learning_rate=LEARNING_RATE),
}
WAYS = {
  "recompute": {"recompute": True},
  "none": {"recompute": False},
  "tis": {"recompute": True, "correction": "tis"},
  "mis": {"recompute": True, "correction": "mis"},
}

Rows = Sequence[Mapping]


def arms() -> list[list[tuple[dict, Arm]]]:
  """Every objective in every way, in two blocks: the corrections come last."""
  return [
    [
      ({"objective": name, "way": way}, arm._replace(dtype="bfloat16", per_rollout=PER_ROLLOUT, **WAYS[way]))
      for name, arm in OBJECTIVES.items()
      for way in ways
    ]
    for ways in (("recompute", "none"), ("tis", "mis"))
  ]


def judge_distortion(rows: Rows) -> dict[str, dict]:
  """The verdicts about weights and clips."""
  found = {}
  column = lambda objective, error, name: {
    row["seed"]: row[name] for row in rows if row["objective"] == objective and row["error"] == error
  }
  for error in ERRORS:
    less = column("gspo", error, "ratio"), column("grpo", error, "ratio")
    at = interval([float(np.log((less[0][seed] + TINY) / (less[1][seed] + TINY))) for seed in sorted(less[0])])
    found[f"E16, ratios, error {error}"] = verdict(
      "log of the mean error of GSPO's ratio over that of GRPO's, below 0: the whole interval", at["high"] < 0, interval=at,
      gspo=float(np.mean(list(less[0].values()))), grpo=float(np.mean(list(less[1].values()))),
    )  # fmt: skip
    for name, words, label in (
      ("weight", "mean error of a token's weight, clip and gate included", "weights"),
      ("flips", "fraction of the tokens of which the clip binds with exact or with wrong log-probabilities alone", "membership"),
    ):
      ours, theirs = column("gspo", error, name), column("grpo", error, name)
      at = interval([ours[seed] - theirs[seed] for seed in sorted(ours)])
      found[f"E16, {label}, error {error}"] = verdict(
        f"{words}, GSPO minus GRPO, below 0: the whole interval", at["high"] < 0,
        engaged=label == "weights" or any(theirs.values()) or any(ours.values()), interval=at,
        gspo=float(np.mean(list(ours.values()))), grpo=float(np.mean(list(theirs.values()))),
      )  # fmt: skip
  return found


def judge(trials: Rows, rows: Rows) -> dict[str, dict]:
  """The verdicts about training; of the rows of `distortion` the mismatch of bfloat16 alone is read."""
  found = {}
  gap = float(np.mean([row["k3"] for row in rows if row["objective"] == "grpo" and row["error"] == "bfloat16"]))
  at = lambda objective, way: solved(trials, objective=objective, way=way)
  for objective in OBJECTIVES:
    loss = difference(at(objective, "none"), at(objective, "recompute"))
    found[f"E16, training: {objective} needs no recomputation"] = verdict(
      f"held-out accuracy at the end of {objective}, 'none' minus 'recompute', above -{MARGIN:g}: both intervals", loss.low > -MARGIN,
      engaged=gap >= GAP, **loss._asdict(), gap=gap,
    )  # fmt: skip
    for way in ("tis", "mis"):
      if not at(objective, way):
        continue
      gain = difference(at(objective, way), at(objective, "recompute"))
      found[f"E16, training: {objective} gains by {way}"] = verdict(
        f"held-out accuracy at the end of {objective}, '{way}' minus 'recompute', above 0: both intervals", gain.low > 0,
        engaged=gap >= GAP, **gain._asdict(),
      )  # fmt: skip
  return found
