"""Follows a rare token through the updates of one rollout batch.

The command then judges by `rules.py` and draws the figure.

  python -m experiments.claims.rare_tokens
  python -m experiments.claims.rare_tokens --plot_only --format pdf

Results go to `results.json` beside this file, the figure to `figures/`. A run takes about a minute
on one core.
"""

import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np

from experiments import provenance
from experiments.claims import study_command
from experiments.claims.rare_tokens import bandit as beds
from experiments.claims.rare_tokens import figures, rules
from experiments.results import rounded, to_json

HERE = pathlib.Path(__file__).parent


def measure(seeds: Sequence[int], *, count: int, arms: int, updates: int) -> dict:
  """Runs every condition and method, and judges the results.

  Args:
    seeds: Seeds of the bandits.
    count: Number of bandits per seed.
    arms: Number of arms of a bandit.
    updates: Number of updates on the rollout batch.

  Returns:
    The contents of `results.json`.
  """
  started, recorded, curves, ends = time.process_time(), provenance.record(rules), [], []
  for condition in rules.CONDITIONS:
    for seed in seeds:
      bandits = beds.make_bandits(seed, count=count, arms=arms, drawn=condition.drawn)
      for method in beds.METHODS:
        at = condition._asdict() | {"method": method, "seed": seed}
        moves = dict(optimizer=condition.optimizer, learning_rate=condition.learning_rate, updates=updates)
        followed = beds.follow(bandits, method, **moves)
        log_ratio = np.log(followed["rare"] / beds.RARE_PROBABILITY)
        ever = followed["cut"].any(axis=0)
        first_cut = float(np.median(followed["cut"].argmax(axis=0)[ever])) if ever.any() else None
        # The mean is enough for conditions that no rule reads.
        kept = [float(log_ratio[-1].mean())] if condition in rules.SWEEP else log_ratio[-1].tolist()
        ends.append(at | {"ever_cut": float(ever.mean()), "first_cut": first_cut, "log_ratio": kept})
        last = {name: float(followed[name][-1].mean()) for name in ("reward", "entropy")}
        curves.append(at | {"log_ratio": log_ratio.mean(axis=1).tolist()} | last)
  results = {"seeds": list(seeds), "count": count, "arms": arms, "jax": jax.__version__, "updates": updates}
  results |= {"processor_seconds": time.process_time() - started, "provenance": recorded, "verdicts": {}, "curves": curves, "ends": ends}
  results = rounded(results)
  return results | {"verdicts": rounded(rules.judge(results))}


def measure_in(folder: pathlib.Path, smoke: bool) -> None:
  """Measures in float64 and writes `results.json`."""
  sizes = dict(count=4, arms=8, updates=4) if smoke else dict(count=rules.BANDITS, arms=rules.ARMS, updates=rules.UPDATES)
  with jax.enable_x64(True):
    (folder / "results.json").write_text(to_json(measure((0, 1) if smoke else rules.SEEDS, **sizes)))


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the study's command line."""
  about, draw = __doc__.splitlines()[0], figures.draw
  study_command.run(argv, package="experiments.claims.rare_tokens", about=about, here=HERE, measure=measure_in, draw=draw)


if __name__ == "__main__":
  main()
