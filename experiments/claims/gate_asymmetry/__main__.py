"""Trains SAPO with gates that are sharper for advantages of one sign.

The command then judges by `rules.py` and draws the figure.

  python -m experiments.claims.gate_asymmetry
  python -m experiments.claims.gate_asymmetry --second
  python -m experiments.claims.gate_asymmetry --plot_only --format pdf

Results go to `results.json` beside this file, the figure to `figures/`. A stopped run resumes with
the same command.
"""

import pathlib
from collections.abc import Sequence

from experiments.claims import study
from experiments.claims.gate_asymmetry import figures, rules

HERE = pathlib.Path(__file__).parent
SECOND = study.Second(rules.second_arms(), rules.SECOND_SEEDS)
STUDY = study.Study(
  "experiments.claims.gate_asymmetry", __doc__.splitlines()[0], (rules.arms(),), rules.SEEDS, rules, figures.draw, second=SECOND
)


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the study's command line."""
  study.main(STUDY, argv, HERE)


if __name__ == "__main__":
  main()
