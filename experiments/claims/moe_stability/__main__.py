"""Trains mixtures of experts until they collapse, judges them by `rules.py`, and draws the figure.

  python -m experiments.claims.moe_stability
  python -m experiments.claims.moe_stability --plot_only --format pdf

Results go to `results.json` beside this file, the figure to `figures/`. One trial after the other, and every trial is written when it ends:
a stopped measurement goes on where it was when it is launched again; `--fresh` begins anew.
"""

import argparse
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax

from experiments.ablations.ratio_lab.__main__ import from_json, rounded, to_json
from experiments.ablations.routing_replay import bed as routed
from experiments.claims.moe_stability import bed as beds
from experiments.claims.moe_stability import figures, rules
from jaxrl_llm import platform

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
  """Parses the command line, measures, writes and draws."""
  parser = argparse.ArgumentParser(prog="python -m experiments.claims.moe_stability", description=__doc__.splitlines()[0])
  parser.add_argument("--folder", type=pathlib.Path, default=HERE, help="where results.json and figures/ go")
  parser.add_argument("--format", nargs="+", choices=("png", "pdf", "svg"), default=["png"])
  parser.add_argument("--fresh", action="store_true", help="begin anew: what results.json holds is lost")
  parser.add_argument("--plot_only", action="store_true", help="draw what results.json holds, measure nothing")
  parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that it runs, measures nothing worth having")
  args = parser.parse_args(argv)
  path = args.folder / "results.json"
  if args.smoke and args.folder == HERE:
    raise SystemExit("error: --smoke would write over the measured results: give --folder=DIR with it")
  if not args.plot_only:
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.fresh:
      path.unlink(missing_ok=True)
    platform.cache_compilations()
    measure(SMOKE if args.smoke else Plan(), path)
  if not path.exists():
    raise SystemExit(f"error: {path}: found no such file, expected the results of a run: leave --plot_only out once")
  results = from_json(path.read_text())
  for name, verdict in results["verdicts"].items():
    numbers = {key: value for key, value in verdict.items() if key not in ("rule", "verdict")}
    print(f"{name}: {verdict['verdict']} ({numbers})")
  figures.draw(results, args.folder / "figures", args.format)


if __name__ == "__main__":
  main()
