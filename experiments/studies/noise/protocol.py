"""Conditions, seeds and constants of the study. Nothing here was chosen by a result of it.

Pilots of one to three other seeds (500 to 502) had shown the direction of the first three rules at
8 and 64 digits, with another estimate of the noise.
"""

import json
import pathlib
from typing import NamedTuple

from experiments.claims.bed import Sizes
from experiments.studies.forecast import protocol as forecast

LENGTHS = (8, 16, 32, 64)
"""Digits of a problem, and tokens of a response that is written as the teacher writes it."""

LONGER = (128, 256)
"""Lengths that run after the others, and that no rule reads."""

STALENESS = (1, 3, 7, 15)
"""Numbers of GRPO updates between the policy that draws and the one that is measured."""

SEEDS = tuple(range(900, 912))
CALIBRATION_SEEDS = (880, 881)
CALIBRATED_AT = 3
"""Number of updates at which clips are calibrated."""

CLIPPED = 0.15
"""Share of the tokens that a calibrated clip leaves out: GSPO's in its paper."""

RATE = 1e-3
UPDATE_PROMPTS, PROMPTS = 4, 64
"""Prompts of an update, and of the responses that are measured; each has a group of eight."""


class Measured(NamedTuple):
  """Objective of the study.

  Attributes:
    objective: Key of `objectives.OBJECTIVES`.
    settings: Settings.
  """

  objective: str
  settings: dict[str, float | str]


def sizes(length: int) -> Sizes:
  """Returns the bed of a length: the teacher makes one slip in a response on average."""
  return forecast.sizes(length)._replace(num_prompts=UPDATE_PROMPTS)


CALIBRATION = pathlib.Path(__file__).with_name("calibration.json")
"""File of the widths of GRPO's and GSPO's clips, by length; see `calibrate`."""


def measured(length: int) -> dict[str, Measured]:
  """Returns the objectives of a length by name.

  "15 %" marks a clip that leaves out as many tokens as GSPO's does in its paper. All others have
  the constants of their papers. "token", "sequence" and "product" are ratios without a clip.
  """
  widths = json.loads(CALIBRATION.read_text())[str(length)]
  unclipped = lambda ratio: Measured("custom", {"ratio": ratio, "gate": "none", "weights": "sequence_mean"})
  band = {"clip_low": 3e-4 * widths["gspo"], "clip_high": 4e-4 * widths["gspo"]}
  paper = lambda name: Measured(name, dict(forecast.settings(name, 1.0, 8)))
  return {
    "token": unclipped("token"),
    "sequence": unclipped("sequence"),
    "product": unclipped("product"),
    "grpo": paper("grpo"),
    "grpo 15 %": Measured("grpo", {"clip_low": widths["grpo"], "clip_high": widths["grpo"], "kl_coef": 0.0}),
    "gspo 15 %": Measured("gspo", band),
    "gspo_token 15 %": Measured("gspo_token", band),
    "sapo": paper("sapo"),
    "dapo": paper("dapo"),
    "cispo": paper("cispo"),
    "gmpo": paper("gmpo"),
    "vespo": paper("vespo"),
    "dppo_tv": paper("dppo_tv"),
    "minirl": paper("minirl"),
  }
