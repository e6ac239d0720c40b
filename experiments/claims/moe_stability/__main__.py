"""Trains mixtures of experts with and without replayed routes until they collapse.

The command then judges by `rules.py` and draws the figure.

  python -m experiments.claims.moe_stability
  python -m experiments.claims.moe_stability --plot_only --format pdf

Results go to `results.json` beside this file, the figure to `figures/`. A stopped run resumes with
the same command.
"""

import pathlib
from collections.abc import Sequence

from experiments.claims import study
from experiments.claims.moe_stability import figures, rules

HERE = pathlib.Path(__file__).parent
BLOCKS = tuple(rules.arms(rate) for rate in rules.RATES)
STUDY = study.Study("experiments.claims.moe_stability", __doc__.splitlines()[0], BLOCKS, rules.SEEDS, rules, figures.draw)


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the study's command line."""
  study.main(STUDY, argv, HERE)


if __name__ == "__main__":
  main()
