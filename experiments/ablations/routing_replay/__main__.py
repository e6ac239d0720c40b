"""Runs the routing-replay ablation, judges it by `rules.py`, and draws its figures.

  python -m experiments.ablations.routing_replay
  python -m experiments.ablations.routing_replay --plot_only --format pdf

Results are written to `results.json` beside this file, and figures to `figures/`. Runs follow one
another, and each is written when it ends. `--resume` continues a stopped measurement. The study
takes about 27 minutes on one core.
"""

import argparse
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from experiments import judging, provenance
from experiments.ablations.routing_replay import bed as beds
from experiments.ablations.routing_replay import figures, rules, studies
from experiments.results import from_json, rounded, to_json

HERE = pathlib.Path(__file__).parent
TABLES = ("updates", "rollouts", "spreads", "ends", "checks")
Rows = Iterator[tuple[str, dict]]


class Plan(NamedTuple):
  """Plan of a measurement.

  Attributes:
    sizes: Sizes of E7's bed.
    seeds: Seeds of the runs.
    depths: Depths of E5's models.
    drift_rates: Learning rates of E5.
    drift_updates: Number of updates per model in E5.
    drift_warm_steps: Number of supervised steps of E5's models.
    arms: Arms of E7.
    warmup: Number of updates over which an arm's learning rate rises.
    rollouts: Number of rollout batches per arm.
    every: Number of rollout batches between measurements of the ratios.
    held_out: Number of batches of held-out problems.
  """

  sizes: beds.Sizes = beds.Sizes()
  seeds: Sequence[int] = rules.SEEDS
  depths: Sequence[int] = rules.DEPTHS
  drift_rates: Sequence[float] = rules.DRIFT_RATES
  drift_updates: int = rules.DRIFT_UPDATES
  drift_warm_steps: int = rules.DRIFT_WARM_STEPS
  arms: Sequence[studies.Arm] = rules.ARMS
  warmup: int = rules.WARMUP
  rollouts: int = rules.ROLLOUTS
  every: int = rules.EVERY
  held_out: int = 4


SMOKE = Plan(
  sizes=beds.SMOKE, seeds=(0, 1), depths=(1, 2), drift_rates=(rules.DRIFT_RATE, 1e-2), drift_updates=2, drift_warm_steps=1, rollouts=1,
  every=1, held_out=1,
)  # fmt: skip


def pieces(plan: Plan, seed: int) -> Iterator[tuple[str, Callable[[], Rows]]]:
  """Yields the runs of one seed.

  Each comes with its name, which marks it as done in the results.
  """
  for depth in plan.depths:
    yield f"drift, {depth} layers, seed {seed}", lambda depth=depth: _drift(plan, seed, depth)
  bed, params = beds.make_bed(plan.sizes), None

  def warm():
    """Trains the weights of the warm start at the first call, and keeps them for later calls."""
    nonlocal params
    params = beds.warm_params(bed, seed) if params is None else params
    return params

  yield f"checks, seed {seed}", lambda: iter([("checks", studies.checks(bed, warm(), seed))])
  settings = dict(warmup=plan.warmup, rollouts=plan.rollouts, every=plan.every, held_out=plan.held_out)
  for arm in plan.arms:
    name = f"{arm.replay}, {arm.updates} updates, {arm.sampler}, rate {arm.rate:g}, seed {seed}"
    yield name, lambda arm=arm: studies.train(bed, warm(), seed, arm, **settings)


def _drift(plan: Plan, seed: int, depth: int) -> Rows:
  """Runs E5 on a model of one depth, once per learning rate."""
  bed = beds.make_bed(plan.sizes._replace(num_layers=depth, warm_steps=plan.drift_warm_steps))
  params = beds.warm_params(bed, seed)
  for rate in plan.drift_rates:
    yield from (("updates", row) for row in studies.drift(bed, params, seed, learning_rate=rate, updates=plan.drift_updates))


def measure(plan: Plan, path: pathlib.Path, *, resume: bool = False) -> None:
  """Executes the runs that are not done yet, and writes the file after every run.

  Args:
    plan: Plan of the measurement.
    path: File of the results.
    resume: Whether to keep the results that the file holds.
  """
  fresh = {"sizes": plan.sizes._asdict(), "seeds": list(plan.seeds), "jax": jax.__version__, "processor_seconds": 0.0, "done": []}
  fresh |= {"provenance": provenance.record(rules)}
  results = from_json(path.read_text()) if resume and path.exists() else fresh | {"verdicts": {}} | {name: [] for name in TABLES}
  for seed in plan.seeds:
    for name, run in pieces(plan, seed):
      if name in results["done"]:
        continue
      started = time.process_time()
      rows = list(run())
      for table in TABLES:
        results[table] += [row for key, row in rows if key == table]
      results["done"].append(name)
      results["processor_seconds"] += time.process_time() - started
      print(f"{name}: {time.process_time() - started:.0f} s of processor time", flush=True)
      path.write_text(to_json(rounded(results)))
  results["verdicts"] = rules.judge(results)
  path.write_text(to_json(rounded(results)))


def main(argv: Sequence[str] | None = None) -> None:
  """Parses the command line, measures, writes and draws."""
  parser = argparse.ArgumentParser(prog="python -m experiments.ablations.routing_replay", description=__doc__.splitlines()[0])
  parser.add_argument("--folder", type=pathlib.Path, default=HERE, help="folder of results.json and figures/")
  parser.add_argument("--format", nargs="+", choices=("png", "pdf", "svg"), default=["png"])
  parser.add_argument("--resume", action="store_true", help="keep the runs in results.json and execute the rest")
  parser.add_argument("--plot_only", action="store_true", help="draw results.json without measuring")
  parser.add_argument("--smoke", action="store_true", help="use tiny sizes to show that the study runs; the measurements are meaningless")
  args = parser.parse_args(argv)
  path = args.folder / "results.json"
  if not args.plot_only:
    args.folder.mkdir(parents=True, exist_ok=True)
    measure(SMOKE if args.smoke else Plan(), path, resume=args.resume)
  results = from_json(path.read_text())
  print(judging.lines(results["verdicts"]))
  figures.draw(results, args.folder / "figures", args.format)


if __name__ == "__main__":
  main()
