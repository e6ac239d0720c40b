"""Weights tokens with old log-probabilities of lower precision, and trains with them.

The command then judges by `rules.py` and draws the figure.

  python -m experiments.claims.precision
  python -m experiments.claims.precision --second
  python -m experiments.claims.precision --plot_only --format pdf

Results go to `results.json` beside this file, the figure to `figures/`. A stopped run resumes with
the same command.
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
  """Measures the effect of errors on weights, in one row per seed, objective and error."""
  updates = min(rules.STALE_UPDATES, sizes.updates)
  return [row for seed in seeds for row in distortion.measure(sizes, seed, rules.OBJECTIVES, rules.ERRORS, updates=updates)]


def tables(sizes: beds.Sizes, trials: Sequence[Mapping]) -> dict:
  """Returns the entries of `results.json` that are added to the trials."""
  rows = distortions(sizes, tuple(sorted({row["seed"] for row in trials})))
  return {"distortion": rows}


def second_tables(sizes: beds.Sizes, trials: Sequence[Mapping]) -> dict:
  """Returns what the samplers of the second run change on the warm starts of its seeds."""
  seeds, updates = sorted({row["seed"] for row in trials}), min(rules.STALE_UPDATES, sizes.updates)
  measured = (distortion.measure(sizes, seed, rules.SECOND_OBJECTIVES, rules.MISMATCHES, updates=updates) for seed in seeds)
  return {"distortion": [row for rows in measured for row in rows]}


STUDY = study.Study(
  package="experiments.claims.precision",
  about=__doc__.splitlines()[0],
  arms=rules.arms(),
  seeds=rules.SEEDS,
  rules=rules,
  draw=figures.draw,
  tables=tables,
  second=study.Second(rules.second_arms(), rules.SECOND_SEEDS, second_tables),
)


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the study's command line."""
  study.main(STUDY, argv, HERE)


if __name__ == "__main__":
  main()
