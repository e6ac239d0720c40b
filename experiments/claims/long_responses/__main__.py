"""Trains on responses of 16, 64 and 256 tokens to one task, with stale samples.

The command then judges by `rules.py` and draws the figure.

  python -m experiments.claims.long_responses
  python -m experiments.claims.long_responses --plot_only --format pdf

Results go to `results.json` beside this file, the figure to `figures/`. A stopped run resumes with
the same command.
"""

import pathlib
from collections.abc import Sequence

from experiments.claims import study
from experiments.claims.long_responses import figures, rules

HERE = pathlib.Path(__file__).parent
STUDY = study.Study(
  "experiments.claims.long_responses", __doc__.splitlines()[0], (rules.arms(),), rules.SEEDS, rules, figures.draw, sizes=rules.SIZES,
  sized=rules.sized,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the study's command line."""
  study.main(STUDY, argv, HERE)


if __name__ == "__main__":
  main()
