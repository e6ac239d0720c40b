"""Trains mixtures of experts until they collapse, judges them by `rules.py`, and draws the figure.

  python -m experiments.claims.moe_stability
  python -m experiments.claims.moe_stability --plot_only --format pdf

Results go to `results.json` beside this file, the figure to `figures/`. One trial after the other, and every trial is written when it ends:
a stopped measurement goes on where it was when it is launched again; `--fresh` begins anew.
"""

import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax

from experiments.ablations.routing_replay import bed as routed
from experiments.claims import study_command
from experiments.claims.moe_stability import bed as beds
from experiments.claims.moe_stability import figures, rules
from experiments.results import from_json, rounded, to_json

HERE = pathlib.Path(__file__).parent


class Plan(NamedTuple):
  """What is measured.

  Attributes:
    sizes: of the bed.
    seeds: of everything.
    rates: learning rates.
    rollouts: the most rollout batches of a trial.
  """

  sizes: routed.Sizes = beds.SIZES
  seeds: Sequence[int] = rules.SEEDS
  rates: Sequence[float] = rules.RATES
  rollouts: int = rules.ROLLOUTS


SMOKE = Plan(sizes=beds.SMOKE, seeds=(0, 1), rates=(rules.E5_RATE,), rollouts=1)


def measure(plan: Plan, path: pathlib.Path) -> None:
  """Runs what is not done yet, and writes the file after every trial."""
  fresh = {"sizes": plan.sizes._asdict(), "seeds": list(plan.seeds), "jax": jax.__version__, "processor_seconds": 0.0}
  fresh |= {"done": [], "verdicts": {}, "rows": []}
  results = from_json(path.read_text()) if path.exists() else fresh
  for seed in plan.seeds:
    params = {}
    for arm in (arm for rate in plan.rates for arm in rules.arms(rate)):
      name = f"{arm.model}, {arm.objective}, {arm.replay}, N = {arm.updates}, rate {arm.rate:g}, seed {seed}"
      if name in results["done"]:
        continue
      started = time.process_time()
      if arm.model not in params:
        params[arm.model] = routed.warm_params(beds.bed_of(plan.sizes, arm.model), seed)
      found = beds.train(plan.sizes, params[arm.model], seed, arm, rollouts=plan.rollouts, warmup=rules.WARMUP)
      results["rows"] += [{"seed": seed} | arm._asdict() | row for row in found]
      results["done"].append(name)
      seconds = time.process_time() - started
      results["processor_seconds"] += seconds
      print(f"{name}: {len(found)} rollout batches, {seconds:.1f} s of processor time", flush=True)
      path.write_text(to_json(rounded(results)))
  results = from_json(path.read_text())
  results["verdicts"] = rules.judge(results["rows"])
  path.write_text(to_json(rounded(results)))


def main(argv: Sequence[str] | None = None) -> None:
  """The command line, see `study_command.run`."""
  study_command.run(
    argv, package="experiments.claims.moe_stability", about=__doc__.splitlines()[0], here=HERE, fresh=True,
    measure=lambda folder, smoke: measure(SMOKE if smoke else Plan(), folder / "results.json"), draw=figures.draw,
  )  # fmt: skip


if __name__ == "__main__":
  main()
