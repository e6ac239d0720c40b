"""Weighs tokens with old log-probabilities of lower precision, and trains with them.

Judges by `rules.py` and draws the figure.

  python -m experiments.claims.precision
  python -m experiments.claims.precision --plot_only --format pdf

Results go to `results.json` beside this file, the figure to `figures/`. A run that was stopped goes
on where it was with the same command.
"""

import functools
import pathlib
from collections.abc import Mapping, Sequence

from experiments.claims import bed as beds
from experiments.claims import study
from experiments.claims.precision import distortion, figures, rules

HERE = pathlib.Path(__file__).parent


@functools.cache
def distortions(sizes: beds.Sizes, seeds: Sequence[int]) -> list[dict]:
  """Returns what errors do to weights, a row for each seed, objective and error."""
  updates = min(rules.STALE_UPDATES, sizes.updates)
  return [row for seed in seeds for row in distortion.measure(sizes, seed, rules.OBJECTIVES, rules.ERRORS, updates=updates)]


def tables(sizes: beds.Sizes, trials: Sequence[Mapping]) -> dict:
  """Returns what goes into `results.json` beside the trials."""
  rows = distortions(sizes, tuple(sorted({row["seed"] for row in trials})))
  return {"distortion": rows}


STUDY = study.Study(
  package="experiments.claims.precision",
  about=__doc__.splitlines()[0],
  arms=rules.arms(),
  seeds=rules.SEEDS,
  rules=rules,
  draw=figures.draw,
  tables=tables,
)


def main(argv: Sequence[str] | None = None) -> None:
  """Parses the command line, measures, writes and draws."""
  study.main(STUDY, argv, HERE)


if __name__ == "__main__":
  main()
