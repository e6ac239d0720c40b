"""Tunes and trains every objective in every condition, as far as there is time, and says what the forecasts are worth so far.

  python -m experiments.studies.forecast --stage=tune
  python -m experiments.studies.forecast --stage=main --seconds=3600
  python -m experiments.studies.forecast --status
  python -m experiments.studies.forecast --check

Every trial is a line of `trials.jsonl` as soon as it ends, and a stopped study goes on with the same
command; `results.json` is made of them whenever a command ends. `--check` measures, on the tuning
seeds and before any trial, whether the beds do what they are for.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from experiments import judging, provenance
from experiments.claims import study, trial
from experiments.claims.bed import make_bed, warm_params
from experiments.results import from_json, rounded, to_json
from experiments.studies.forecast import checks, figures, protocol, rules
from jaxrl_llm.devices import compilation_cache

HERE = pathlib.Path(__file__).parent
NAMES = ("stage", "objective", "seed", "draw", *protocol.Cell._fields)


def run(names: Mapping) -> dict:
  """One trial, as a row."""
  started = time.process_time()
  cell = protocol.Cell(*(names[field] for field in protocol.Cell._fields))
  rate, factor = protocol.draws()[names["draw"]]
  arm, sizes = protocol.arm(names["objective"], cell, rate, factor), protocol.sizes(cell.length)
  found = trial.train(sizes, names["seed"], arm, samples=int(names["objective"] == protocol.AGAIN))
  kept = study.summary(found, per_rollout=arm.per_rollout)
  solved = np.array([int(x) for x in kept["right"]])
  row = dict(names) | {"rate": rate, "factor": factor, "area": float(np.mean(kept["curve"][1:])), "end": kept["curve"][-1]}
  row |= {"best": max(kept["curve"]), "pass_8": float(np.mean(solved > 0)), "collapsed": judging.collapsed(kept["curve"])}
  row |= {name: kept[name] for name in ("curve", "kl_late", "gap", "clipped_late", "tokens", "sign")}
  return rounded(row | {"processor_seconds": time.process_time() - started})


def planned(stage: str, done: Sequence[Mapping]) -> list[dict]:
  """The trials of a stage that are not done yet, in order; those that count with the constants that the tuning chose.

  Raises:
    ValueError: the tuning has not been run to its end.
  """
  known = {tuple(row[name] for name in NAMES if name != "draw" or row["stage"] == "tune") for row in done}
  wanted = protocol.tuning() if stage == "tune" else protocol.main_trials()
  left = [row for row in wanted if tuple(row[name] for name in NAMES if name != "draw" or stage == "tune") not in known]
  if stage == "tune":
    return left
  draw_of = protocol.chosen(done)
  return [row | {"draw": draw_of[row["objective"].removesuffix(" again")]} for row in left]


def measure(stage: str, folder: pathlib.Path, seconds: float) -> None:
  """Runs what is left of a stage until the time is over; the trial that is under way then is finished."""
  until, path = time.monotonic() + seconds, folder / "trials.jsonl"
  begin(folder)
  for names in planned(stage, study.read_trials(path)):
    if time.monotonic() > until:
      return
    row = run(names)
    with path.open("a") as file:
      print(json.dumps(row), file=file)
    where = ", ".join(f"{name} {names[name]}" for name in ("objective", "seed", *protocol.Cell._fields))
    print(f"{where}: area {row['area']:.3f}, {row['processor_seconds']:.0f} s", flush=True)


def begin(folder: pathlib.Path) -> dict:
  """What was recorded when the study was first started.

  Raises:
    SystemExit: rules, protocol or forecasts have changed since.
  """
  path, files = folder / study.STARTED, (HERE / "protocol.py", rules.PUBLISHED)
  now = provenance.record(rules, *files)
  if not path.exists():
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(now))
  recorded = json.loads(path.read_text())
  if (recorded["rules"], recorded["also"]) != (now["rules"], now["also"]):
    raise SystemExit(f"error: rules, protocol or forecasts have changed since the study began at {recorded['started']}: take it back")
  return recorded


def write(folder: pathlib.Path) -> dict:
  """Judges what has been run, and writes `results.json`."""
  path = folder / "results.json"
  results = from_json(path.read_text()) if path.exists() else {}
  rows = study.read_trials(folder / "trials.jsonl") or results.get("trials", [])
  seconds = sum(row["processor_seconds"] for row in rows)
  results = results | {"jax": jax.__version__, "processor_seconds": seconds, "verdicts": {}, "trials": rows}
  if (folder / study.STARTED).exists():
    results["provenance"] = json.loads((folder / study.STARTED).read_text())
  if rows:
    results = rounded(results)
    results["verdicts"] = rounded(rules.judge(results))
  path.write_text(to_json(results))
  return results


def status(results: Mapping) -> str:
  """How far the study is."""
  rows = results.get("trials", [])
  lines = []
  for stage, wanted in (("tune", protocol.tuning()), ("main", protocol.main_trials())):
    done = sum(row["stage"] == stage for row in rows)
    lines.append(f"{stage}: {done} of {len(wanted)} trials")
  return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
  """Parses the command line, runs and judges."""
  parser = argparse.ArgumentParser(prog="python -m experiments.studies.forecast", description=__doc__.splitlines()[0])
  parser.add_argument("--folder", type=pathlib.Path, default=HERE, help="where trials.jsonl, results.json and figures/ go")
  parser.add_argument("--format", nargs="+", choices=("png", "pdf", "svg"), default=["png"])
  what = parser.add_mutually_exclusive_group()
  what.add_argument("--stage", choices=("tune", "main"), help="what to run")
  what.add_argument("--status", action="store_true", help="how far the study is; runs nothing")
  what.add_argument("--check", action="store_true", help="the beds' manipulation checks")
  parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further trial after this time")
  args = parser.parse_args(argv)
  compilation_cache.cache_compilations()
  if args.check:
    found = checks.measure(lambda length, seed: (make_bed(protocol.sizes(length)), warm_params(protocol.sizes(length), seed)))
    (args.folder / "checks.json").write_text(to_json(rounded(found)))
    print(checks.text(found))
    return
  if args.stage:
    try:
      measure(args.stage, args.folder, args.seconds)
    except ValueError as refused:
      raise SystemExit(f"error: {refused}") from None
  results = write(args.folder)
  print(status(results))
  print(judging.lines(results["verdicts"]))
  figures.draw(results, args.folder / "figures", args.format)


if __name__ == "__main__":
  main()
