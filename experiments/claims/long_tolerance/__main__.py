"""Trains with old log-probabilities of a sampler that differs, on responses of 64 tokens.

The command then judges by `rules.py` and draws the figure.

  python -m experiments.claims.long_tolerance
  python -m experiments.claims.long_tolerance --plot_only --format pdf

Results go to `results.json` beside this file, the figure to `figures/`. A stopped run resumes with
the same command.
"""

import pathlib
from collections.abc import Mapping, Sequence

from experiments.claims import bed as beds
from experiments.claims import study
from experiments.claims.long_tolerance import figures, rules
from experiments.claims.tolerance import divergence

HERE = pathlib.Path(__file__).parent


def tables(sizes: beds.Sizes, trials: Sequence[Mapping]) -> dict:
  """Returns how far the sampler is from the learner on the warm starts."""
  seeds = sorted({row["seed"] for row in trials})
  return {"divergence": [row for seed in seeds for row in divergence.measure(sizes, seed, "dense", (rules.SAMPLER,))]}


STUDY = study.Study(
  "experiments.claims.long_tolerance", __doc__.splitlines()[0], (rules.arms(),), rules.WARM, rules, figures.draw, tables, sizes=rules.SIZES
)


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the study's command line."""
  study.main(STUDY, argv, HERE)


if __name__ == "__main__":
  main()
