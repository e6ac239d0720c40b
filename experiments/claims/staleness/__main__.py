"""Trains every objective with 1 to 64 updates per rollout batch.

It judges the trials by `rules.py` and draws the figures.

  python -m experiments.claims.staleness
  python -m experiments.claims.staleness --second
  python -m experiments.claims.staleness --plot_only --format pdf

Results go to `results.json` beside this file, figures to `figures/`. A trial becomes a line of
`trials.jsonl` when it ends, so the same command resumes a run that was stopped. The objectives that
have rules of their own come first. Once all their trials are done, they are judged and written; the
other objectives follow.
"""

import pathlib
import sys
from collections.abc import Sequence

from experiments.claims import study
from experiments.claims.staleness import figures, rules

HERE = pathlib.Path(__file__).parent
SMOKE = ("grpo", "vespo")


def plan(*, smoke: bool) -> study.Study:
  """Returns the plan of the study; a smoke run has two objectives."""
  blocks = (SMOKE,) if smoke else (rules.MAIN, rules.OTHERS)
  arms = [
    [
      ({"objective": name, "per_rollout": per_rollout}, rules.ARMS[name]._replace(per_rollout=per_rollout))
      for name in block
      for per_rollout in rules.LADDER
    ]
    for block in blocks
  ]
  second = study.Second(rules.second_arms(), rules.SECOND_SEEDS)
  return study.Study("experiments.claims.staleness", __doc__.splitlines()[0], arms, rules.SEEDS, rules, figures.draw, second=second)


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the command line of the study; see `study_command.run`."""
  words = sys.argv[1:] if argv is None else argv
  study.main(plan(smoke="--smoke" in words), words, HERE)


if __name__ == "__main__":
  main()
