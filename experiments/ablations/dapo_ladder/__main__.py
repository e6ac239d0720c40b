"""Climbs DAPO's ladder, judges it by `rules.py`, and draws its figure.

  python -m experiments.ablations.dapo_ladder
  python -m experiments.ablations.dapo_ladder --plot_only --format pdf

Results go to `results.json` beside this file, the figure to `figures/`, the runs to `--runs`. One
trial after the other, and every trial is written when it ends: a stopped measurement goes on where
it was with `--resume`. About 75 minutes of two cores that other work shares.
"""

import argparse
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from experiments import judging, provenance
from experiments.ablations.dapo_ladder import bed as beds
from experiments.ablations.dapo_ladder import figures, rules
from experiments.results import from_json, rounded, to_json
from jaxrl_llm.devices import compilation_cache

HERE = pathlib.Path(__file__).parent
TABLES = ("steps", "evals", "looks", "ends")


class Plan(NamedTuple):
  """What is measured.

  Attributes:
    sizes: Sizes of the bed.
    seeds: Seeds of everything.
    arms: Arms of the ladder.
    sides: Arms that are run after all seeds of the ladder.
  """

  sizes: beds.Sizes = beds.Sizes()
  seeds: Sequence[int] = rules.SEEDS
  arms: Sequence[str] = beds.RUNGS
  sides: Sequence[str] = beds.SIDES


SMOKE = Plan(sizes=beds.SMOKE, seeds=(0, 1))


def trials(plan: Plan) -> Iterator[tuple[int, str]]:
  """Returns the seeds and arms in the order in which they run.

  A measurement that is stopped has whole ladders.
  """
  for arms in (plan.arms, plan.sides):
    yield from ((seed, arm) for seed in plan.seeds for arm in arms)


def measure(plan: Plan, path: pathlib.Path, runs: pathlib.Path, *, resume: bool = False) -> None:
  """Runs what is not done yet, and writes the file after every trial."""
  fresh = {"sizes": plan.sizes._asdict(), "seeds": list(plan.seeds), "jax": jax.__version__, "wall_seconds": 0.0}
  fresh |= {"provenance": provenance.record(rules), "done": [], "verdicts": {}} | {name: [] for name in TABLES}
  results = from_json(path.read_text()) if resume and path.exists() else fresh
  beds.write_problems(runs)
  for seed, arm in trials(plan):
    name = f"{arm}, seed {seed}"
    if name in results["done"]:
      continue
    started = time.perf_counter()
    beds.warm_start(plan.sizes, runs, seed)
    for table, rows in beds.climb(plan.sizes, runs, seed, arm).items():
      results[table] += rows
    results["done"].append(name)
    results["wall_seconds"] += time.perf_counter() - started
    print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    path.write_text(to_json(rounded(results)))
  results = from_json(path.read_text())
  results["verdicts"] = rules.judge(results)
  path.write_text(to_json(rounded(results)))


def main(argv: Sequence[str] | None = None) -> None:
  """Parses the command line, measures, writes and draws."""
  parser = argparse.ArgumentParser(prog="python -m experiments.ablations.dapo_ladder", description=__doc__.splitlines()[0])
  parser.add_argument("--folder", type=pathlib.Path, default=HERE, help="where results.json and figures/ go")
  parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/dapo_ladder"), help="where the trials go")
  parser.add_argument("--format", nargs="+", choices=("png", "pdf", "svg"), default=["png"])
  parser.add_argument("--resume", action="store_true", help="keep what results.json holds and run the rest")
  parser.add_argument("--plot_only", action="store_true", help="draw what results.json holds, measure nothing")
  parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that it runs, measures nothing worth having")
  args = parser.parse_args(argv)
  path = args.folder / "results.json"
  if not args.plot_only:
    args.folder.mkdir(parents=True, exist_ok=True)
    compilation_cache.cache_compilations()
    measure(SMOKE if args.smoke else Plan(), path, args.runs, resume=args.resume)
  results = from_json(path.read_text())
  print(judging.lines(results["verdicts"]))
  figures.draw(results, args.folder / "figures", args.format)


if __name__ == "__main__":
  main()
