"""Trains every objective with 1 to 64 updates of each rollout batch.

Judges them by `rules.py` and draws the figures.

  python -m experiments.claims.staleness
  python -m experiments.claims.staleness --plot_only --format pdf

Results go to `results.json` in the folder, figures to `figures/`. Every trial is a line of
`trials.jsonl` as soon as it ends: a stopped measurement goes on where it was when it is launched
again. The objectives that rules are about come first; when all their trials are there, they are
judged and written, and the others follow.
"""

import pathlib
import sys
from collections.abc import Sequence

from experiments.claims import study
from experiments.claims.staleness import figures, rules

HERE = pathlib.Path(__file__).parent
SMOKE = ("grpo", "vespo")


def plan(*, smoke: bool) -> study.Study:
  """Returns the trials; a smoke run has two objectives."""
  blocks = (SMOKE,) if smoke else (rules.MAIN, rules.OTHERS)
  arms = [
    [
      ({"objective": name, "per_rollout": per_rollout}, rules.ARMS[name]._replace(per_rollout=per_rollout))
      for name in block
      for per_rollout in rules.LADDER
    ]
    for block in blocks
  ]
  return study.Study("experiments.claims.staleness", __doc__.splitlines()[0], arms, rules.SEEDS, rules, figures.draw)


def main(argv: Sequence[str] | None = None) -> None:
  """Parses the command line, measures, writes and draws."""
  words = sys.argv[1:] if argv is None else argv
  study.main(plan(smoke="--smoke" in words), words, HERE)


if __name__ == "__main__":
  main()
