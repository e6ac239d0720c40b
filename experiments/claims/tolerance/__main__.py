"""Trains with old log-probabilities of samplers that differ from the learner, more and less.

The command then judges by `rules.py` and draws the figure.

  python -m experiments.claims.tolerance
  python -m experiments.claims.tolerance --plot_only --format pdf

Results go to `results.json` beside this file, the figure to `figures/`. A stopped run resumes with
the same command.
"""

import functools
import pathlib
from collections.abc import Mapping, Sequence

from experiments.claims import bed as beds
from experiments.claims import study
from experiments.claims.tolerance import divergence, figures, rules

HERE = pathlib.Path(__file__).parent


@functools.cache
def divergences(sizes: beds.Sizes, seeds: Sequence[int], bed: str) -> list[dict]:
  """Measures how far the samplers are from the learner on the warm starts of a bed."""
  rows = [row for seed in seeds for row in divergence.measure(sizes, seed, rules.MODELS[bed], rules.SAMPLERS[bed])]
  return [{"bed": bed} | row for row in rows]


def tables(sizes: beds.Sizes, trials: Sequence[Mapping]) -> dict:
  """Returns the entries of `results.json` that are added to the trials."""
  seeds = tuple(sorted({row["seed"] for row in trials}))
  return {"divergence": [row for bed in dict.fromkeys(row["bed"] for row in trials) for row in divergences(sizes, seeds, bed)]}


STUDY = study.Study(
  package="experiments.claims.tolerance",
  about=__doc__.splitlines()[0],
  arms=(rules.arms("short"), rules.arms("mixture")),
  seeds=rules.SEEDS,
  rules=rules,
  draw=figures.draw,
  tables=tables,
)


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the study's command line."""
  study.main(STUDY, argv, HERE)


if __name__ == "__main__":
  main()
