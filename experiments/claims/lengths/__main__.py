"""Trains with different token weights, and judges the lengths of responses by `rules.py`.

  python -m experiments.claims.lengths
  python -m experiments.claims.lengths --plot_only --format pdf

Results go to `results.json` beside this file, the figure to `figures/`. Trials run one after the
other, and each is written when it ends. A stopped run resumes when it is launched again; with
`--fresh` it starts over.
"""

import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax

from experiments import provenance
from experiments.claims import study_command
from experiments.claims.lengths import bed as beds
from experiments.claims.lengths import figures, rules
from experiments.results import from_json, rounded, to_json

HERE = pathlib.Path(__file__).parent


class Plan(NamedTuple):
  """Plan of the study.

  Attributes:
    sizes: Sizes of the bed.
    seeds: Seeds of the trials.
    steps: Number of rollout batches of a trial.
    held_out: Number of batches of held-out problems at the end of a trial.
  """

  sizes: beds.Sizes = beds.Sizes()
  seeds: Sequence[int] = rules.SEEDS
  steps: int = rules.STEPS
  held_out: int = 4


SMOKE = Plan(sizes=beds.SMOKE, seeds=(0, 1), steps=2, held_out=1)


def measure(plan: Plan, path: pathlib.Path) -> None:
  """Runs the trials that are not in the file yet, and writes the file after each of them."""
  fresh = {"sizes": plan.sizes._asdict(), "seeds": list(plan.seeds), "jax": jax.__version__, "processor_seconds": 0.0}
  fresh |= {"provenance": provenance.record(rules), "verdicts": {}, "rows": [], "ends": []}
  results = from_json(path.read_text()) if path.exists() else fresh
  done = {tuple(end[name] for name in ("seed", *beds.Arm._fields)) for end in results["ends"]}
  for seed in plan.seeds:
    for arm in rules.ARMS:
      if (seed, *arm) in done:
        continue
      started = time.process_time()
      rows, end = beds.train(plan.sizes, arm, seed, steps=plan.steps, held_out=plan.held_out)
      at = {"seed": seed} | arm._asdict()
      results["rows"] += [at | row for row in rows]
      results["ends"].append(at | end)
      seconds = time.process_time() - started
      results["processor_seconds"] += seconds
      print(f"{arm.objective}, std {arm.std}, seed {seed}: {seconds:.1f} s of processor time", flush=True)
      path.write_text(to_json(rounded(results)))
    beds.warm_params.cache_clear()
  results = from_json(path.read_text())
  results["verdicts"] = rules.judge(results)
  path.write_text(to_json(rounded(results)))


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the study's command line."""
  study_command.run(
    argv, package="experiments.claims.lengths", about=__doc__.splitlines()[0], here=HERE, fresh=True,
    measure=lambda folder, smoke: measure(SMOKE if smoke else Plan(), folder / "results.json"), draw=figures.draw,
  )  # fmt: skip


if __name__ == "__main__":
  main()
