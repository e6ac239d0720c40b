"""What is run, on which seeds, and with which constants. Nothing in here has been chosen by a result of this study.

Looked at before: the staleness ladder (E20, seeds 0 to 4, responses of six tokens), whose order at 64
updates is that of VESPO's Table 2; and, on one warm start of each length (tuning seed 500), that
imitation reaches 30 %, how far a float8 sampler is from the learner, and how wide GSPO's band has to be
to clip as many tokens as in its paper. No objective had been trained on responses longer than eight
tokens for more than eight updates.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.claims.bed import Arm, Sizes
from experiments.claims.running_sums import response_tokens

LENGTHS = (8, 64)
"""Digits of a problem, and tokens of a response that is written as the teacher writes it. 256 would
have to be calibrated first, and a trial of it takes minutes."""
UPDATES = (1, 8, 64)
"""Updates of each rollout batch."""
TUNING_SEEDS, SEEDS = (500, 501), tuple(range(600, 624))
TUNED_AT = (64, 8)
"""Length and updates at which every objective gets its constants."""
DRAWS = 8
"""Pairs of learning rate and width that every objective is tried with: the same pairs for all."""
MARGIN = 0.03
"""Difference of the area under the accuracy curve, as a share, below which two objectives count as equal."""


class Cell(NamedTuple):
  """A condition.

  Attributes:
    length: Digits of a problem.
    updates: Updates of each rollout batch.
    mismatch: "none", or "float8": the sampler's weights are rounded.
  """

  length: int
  updates: int
  mismatch: str = "none"


BLOCKS = (
  tuple(Cell(8, updates) for updates in UPDATES),
  tuple(Cell(64, updates, mismatch) for mismatch in ("none", "float8") for updates in UPDATES),
)
"""In the order in which they run: seed by seed within a block, since the conditions of one length share its warm start."""
BAND = {8: 48.0, 64: 7.0}
"""How many times as wide GSPO's published band has to be, by length, to clip 15 % of the tokens as in
its paper: GRPO's ratios over 4 updates of a rollout batch at 1e-3, six batches of the first tuning seed."""

BASELINE, AGAIN = "grpo", "grpo again"
"""GRPO, and GRPO once more with other samples: what differs between them is noise."""


def settings(objective: str, factor: float, length: int) -> tuple[tuple[str, float], ...]:
  """Constants of an objective: those of its paper, with the one width that it has scaled by a factor.

  Args:
    objective: A name of `OBJECTIVES`.
    factor: 1 is the paper's width. Bands grow with it and so does a cap; SAPO's temperatures and
      VESPO's exponents become sharper.
    length: Tokens of a response. Bands of a sequence's ratio are `BAND` times the published ones.

  Example:
    >>> settings("dapo", 0.5, 64)
    (('clip_low', 0.1), ('clip_high', 0.14))
  """
  band = BAND[length] * factor
  if objective not in (*OBJECTIVES, AGAIN):
    return ("factor", factor), ("length", length)  # An entry to the leaderboard: its file makes of them what it likes.
  constants = {
    "grpo": {"clip_low": 0.2 * factor, "clip_high": 0.2 * factor, "kl_coef": 0.0},
    "dr_grpo": {"clip_low": 0.2 * factor, "clip_high": 0.2 * factor, "max_tokens": response_tokens(length)},
    "dapo": {"clip_low": 0.2 * factor, "clip_high": 0.28 * factor},
    "gspo": {"clip_low": 3e-4 * band, "clip_high": 4e-4 * band},
    "sapo": {"tau_pos": factor, "tau_neg": 1.05 * factor},
    "cispo": {"clip_high": 4.0 * factor},
    "gmpo": {"log_clip_low": 0.4 * factor, "log_clip_high": 0.4 * factor},
    "luspo": {"clip_low": min(0.9, 2e-3 * band), "clip_high": 2.5e-3 * band},
    "vespo": {"k_pos": 2.0 * factor, "lambda_pos": 3.0 * factor, "k_neg": 3.0 * factor, "lambda_neg": 2.0 * factor},
    "dppo_tv": {"delta_low": 0.15 * factor, "delta_high": 0.15 * factor},
    "minirl": {"clip_low": 0.2 * factor, "clip_high": 0.27 * factor},
    "reinforce": {},
  }[objective.removesuffix(" again")]
  return tuple((name, value if isinstance(value, int) else float(f"{value:.6g}")) for name, value in constants.items())


OBJECTIVES = ("grpo", "dr_grpo", "dapo", "gspo", "sapo", "cispo", "gmpo", "luspo", "vespo", "dppo_tv", "minirl", "reinforce")
CENTRED = ("dr_grpo", "minirl")
"""Those whose papers do not divide advantages by the standard deviation of their group."""


def draws() -> list[tuple[float, float]]:
  """Pairs of learning rate and factor; the first is the rate of E20 with every paper's constants."""
  rng = np.random.default_rng(20261125)
  rates, factors = 10 ** rng.uniform(-3.5, -2.5, DRAWS - 1), 2 ** rng.uniform(-2, 2, DRAWS - 1)
  return [(1e-3, 1.0), *((float(f"{rate:.3g}"), float(f"{factor:.3g}")) for rate, factor in zip(rates, factors, strict=True))]


def sizes(length: int) -> Sizes:
  """The bed for one length: the teacher makes one slip in a response on average, whatever its length."""
  small = {} if length <= 8 else {"eval_prompts": 32, "end_prompts": 128}
  return Sizes(digits=(length, length), error_rate=1 / length, **small)


def arm(objective: str, cell: Cell, rate: float, factor: float, *, advantages: str | None = None) -> Arm:
  """One way to train in one condition; `advantages` None takes those of the objective's paper."""
  return Arm(
    objective.removesuffix(" again"), settings(objective, factor, cell.length),
    advantages or ("centred" if objective in CENTRED else "group"),
    per_rollout=cell.updates, learning_rate=rate, dtype="float32" if cell.mismatch == "none" else cell.mismatch,
    recompute=cell.mismatch != "none",
  )  # fmt: skip


def tuning(names: Sequence[str]) -> list[dict]:
  """Every trial of the tuning of some objectives, by the columns that name it."""
  length, updates = TUNED_AT
  return [
    {"stage": "tune", "objective": name, "seed": seed, "draw": draw} | Cell(length, updates)._asdict()
    for draw, seed, name in itertools.product(range(DRAWS), TUNING_SEEDS, names)
  ]


def main_trials(names: Sequence[str]) -> list[dict]:
  """Every trial of some objectives that counts, by the columns that name it; a stopped study has whole seeds."""
  return [
    {"stage": "main", "objective": name, "seed": seed, "draw": -1} | cell._asdict()
    for block in BLOCKS
    for seed, cell, name in itertools.product(SEEDS, block, names)
  ]


def chosen(rows: Sequence[Mapping], names: Sequence[str]) -> dict[str, int]:
  """The draw of every objective: the highest mean area under the curve on the tuning seeds.

  Raises:
    ValueError: the tuning has not been run to its end.
  """
  tuned = {name: {} for name in names}
  for row in rows:
    if row["stage"] == "tune" and row["objective"] in tuned:
      tuned[row["objective"]].setdefault(row["draw"], []).append(row["area"])
  if any(len(areas) < DRAWS or min(map(len, areas.values())) < len(TUNING_SEEDS) for areas in tuned.values()):
    raise ValueError("found a tuning with trials missing, expected all: run --stage=tune first")
  return {name: max(areas, key=lambda draw, areas=areas: float(np.mean(areas[draw]))) for name, areas in tuned.items()}
