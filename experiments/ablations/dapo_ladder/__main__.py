"""Climbs DAPO's ladder, judges it by `rules.py`, and draws its figures.

  python -m experiments.ablations.dapo_ladder
  python -m experiments.ablations.dapo_ladder --plot_only --format pdf

Results are written to `results.json` beside this file, figures to `figures/`, and runs to `--runs`.
Trials run one after the other, and each is written when it ends. `--resume` continues a stopped
measurement. The study takes about 75 minutes on two cores that are shared with other work.
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
  """Plan of a measurement.

  Attributes:
    sizes: Sizes of the bed.
    seeds: Seeds of the trials.
    arms: Arms of the ladder.
    sides: Arms that run after the ladders of all seeds.
  """

  sizes: beds.Sizes = beds.Sizes()
  seeds: Sequence[int] = rules.SEEDS
  arms: Sequence[str] = beds.RUNGS
  sides: Sequence[str] = beds.SIDES


SMOKE = Plan(sizes=beds.SMOKE, seeds=(0, 1))


def trials(plan: Plan) -> Iterator[tuple[int, str]]:
  """Yields the seeds and arms in the order in which they run.

  A stopped measurement has complete ladders, because a ladder ends before the next seed begins.
  """
  for arms in (plan.arms, plan.sides):
    yield from ((seed, arm) for seed in plan.seeds for arm in arms)


def measure(plan: Plan, path: pathlib.Path, runs: pathlib.Path, *, resume: bool = False) -> None:
  """Runs the trials that are not done yet, and writes the file after every trial.

  Args:
    plan: Plan of the measurement.
    path: File of the results.
    runs: Folder of the trials.
    resume: Whether to keep the results that the file holds.
  """
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
  parser.add_argument("--folder", type=pathlib.Path, default=HERE, help="folder of results.json and figures/")
  parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/dapo_ladder"), help="folder of the trials")
  parser.add_argument("--format", nargs="+", choices=("png", "pdf", "svg"), default=["png"])
  parser.add_argument("--resume", action="store_true", help="keep the trials in results.json and run the rest")
  parser.add_argument("--plot_only", action="store_true", help="draw results.json without measuring")
  parser.add_argument("--smoke", action="store_true", help="use tiny sizes to show that the study runs; the measurements are meaningless")
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
