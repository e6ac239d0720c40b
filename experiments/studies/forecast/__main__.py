"""Tunes and trains every objective in every condition, as far as time allows.

Prints how good the forecasts are, once all trials that they need are done.

  python -m experiments.studies.forecast --stage=tune
  python -m experiments.studies.forecast --stage=main --seconds=3600
  python -m experiments.studies.forecast --status
  python -m experiments.studies.forecast --check
  python -m experiments.studies.forecast --power
  python -m experiments.studies.forecast --enter=my_objective.py
  python -m experiments.studies.forecast --enter='my_module:mine:width=0.3' --scaled width

Each trial is appended to `trials.jsonl` as soon as it ends. The same command resumes a stopped
study. `results.json` holds the verdicts of the conditions that are complete, and is rewritten at
the end of every command. `--check` measures, on the tuning seeds and before any trial, whether the
beds meet their requirements. `--enter` tunes and trains an objective of yours on the same draws,
seeds and conditions and adds a row to `LEADERBOARD.md` (see `entry.py`).
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
from experiments.claims.bed import StartFailed, make_bed, warm_params
from experiments.results import rounded, to_json
from experiments.studies.forecast import board, checks, complete, entry, figures, power, protocol, rules
from jaxrl_llm.devices import compilation_cache

HERE = pathlib.Path(__file__).parent
NAMES = ("stage", "objective", "seed", "draw", *protocol.Cell._fields)


def run(names: Mapping, entered: entry.Entry | None = None) -> dict:
  """Runs one trial and returns it as a row.

  Args:
    names: Columns that identify the trial (`NAMES`).
    entered: Entry to the leaderboard; None means an objective of the study.
  """
  started = time.process_time()
  cell = protocol.Cell(*(names[field] for field in protocol.Cell._fields))
  rate, factor = protocol.draws()[names["draw"]]
  arm, sizes = protocol.arm(names["objective"], cell, rate, factor), protocol.sizes(cell.length)
  if entered:
    arm = arm._replace(advantages=entered.advantages, correction=entered.correction)
  outcome = trial.train(sizes, names["seed"], arm, samples=int(names["objective"] == protocol.AGAIN))
  kept = study.summary(outcome, per_rollout=arm.per_rollout)
  solved = np.array([int(x) for x in kept["right"]])
  row = dict(names) | {"rate": rate, "factor": factor, "area": float(np.mean(kept["curve"][1:])), "end": kept["curve"][-1]}
  row |= {"best": max(kept["curve"]), "pass_8": float(np.mean(solved > 0)), "collapsed": judging.collapsed(kept["curve"])}
  row |= {name: kept[name] for name in ("curve", "kl_late", "gap", "clipped_late", "tokens", "sign")}
  own = {"outside": entered.outside, "code": entered.code} if entered else {}
  return rounded(row | {"processor_seconds": time.process_time() - started} | own)


def planned(stage: str, names: Sequence[str], done: Sequence[Mapping]) -> list[dict]:
  """Lists the trials of a stage that are not done yet, in order.

  The trials of "main" use the constants that the tuning chose.

  Raises:
    ValueError: If the tuning is incomplete.
  """
  key = lambda row: tuple(row[name] for name in NAMES if name != "draw" or stage == "tune")
  known = {key(row) for row in done if row["stage"] == stage}
  if stage == "tune":
    return [row for row in protocol.tuning(names) if key(row) not in known]
  draw_of = protocol.chosen(done, names)
  again = [protocol.AGAIN] if protocol.BASELINE in names else []
  trials = protocol.main_trials([*names, *again])
  return [row | {"draw": draw_of[row["objective"].removesuffix(" again")]} for row in trials if key(row) not in known]


def measure(stage: str, path: pathlib.Path, until: float, entered: entry.Entry | None = None) -> None:
  """Runs the remaining trials of a stage until a deadline.

  A trial that is running at the deadline is finished.

  Args:
    stage: "tune" or "main".
    path: File of the trials.
    until: Deadline on the clock of `time.monotonic`, in s.
    entered: Entry to the leaderboard; None means the study's own objectives.
  """
  names = protocol.OBJECTIVES if entered is None else (entered.name,)
  failed = set()
  for row in planned(stage, names, study.read_trials(path)):
    if time.monotonic() > until:
      return
    if (row["length"], row["seed"]) in failed:
      continue
    try:
      row = run(row, entered)
    except StartFailed as error:
      print(f"{error}; its trials at length {row['length']} are left out", flush=True)
      failed.add((row["length"], row["seed"]))
      continue
    with path.open("a") as file:
      print(json.dumps(row), file=file)
    where = ", ".join(f"{name} {row[name]}" for name in ("objective", "seed", *protocol.Cell._fields))
    print(f"{where}: area {row['area']:.3f}, {row['processor_seconds']:.0f} s", flush=True)


def write(folder: pathlib.Path, rows: Sequence[Mapping]) -> dict:
  """Judges the conditions whose trials are all done, and writes `results.json`."""
  seconds = sum(row["processor_seconds"] for row in rows)
  verdicts, withheld = complete.judge(rows)
  results = rounded({"jax": jax.__version__, "processor_seconds": seconds, "verdicts": verdicts, "withheld": withheld})
  (folder / "results.json").write_text(to_json(results))
  return results


def status(rows: Sequence[Mapping]) -> str:
  """Reports how many trials of each stage are done."""
  lines, names = [], protocol.OBJECTIVES
  for stage, trials in (("tune", protocol.tuning(names)), ("main", protocol.main_trials([*names, protocol.AGAIN]))):
    done = sum(row["stage"] == stage for row in rows)
    lines.append(f"{stage}: {done} of {len(trials)} trials")
  return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
  """Parses the command line, runs the trials and judges them."""
  parser = argparse.ArgumentParser(prog="python -m experiments.studies.forecast", description=__doc__.splitlines()[0])
  parser.add_argument(
    "--folder", type=pathlib.Path, default=HERE, help="folder of trials.jsonl, results.json and figures/"
  )
  parser.add_argument("--format", nargs="+", choices=("png", "pdf", "svg"), default=["png"])
  actions = parser.add_mutually_exclusive_group()
  actions.add_argument("--stage", choices=("tune", "main"), help="stage to run")
  actions.add_argument("--status", action="store_true", help="report the progress without running a trial")
  actions.add_argument("--enter", metavar="OBJECTIVE", help="tune and train a FILE.py, MODULE:FUNCTION:SETTING=VALUE or one of the study")
  actions.add_argument("--check", action="store_true", help="measure the manipulation checks of the beds")
  actions.add_argument("--power", action="store_true", help="say how good a forecaster the score would notice; reads no trial")
  parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which no trial starts")
  of_entry = parser.add_argument_group("entries to the leaderboard, with --enter")
  of_entry.add_argument("--estimator", metavar="NAME:SETTING=VALUE", help="estimator of the package, or MODULE:FUNCTION")
  of_entry.add_argument("--correction", metavar="NAME:SETTING=VALUE", help="correction of the package, or MODULE:FUNCTION")
  of_entry.add_argument("--scaled", nargs="+", default=(), metavar="SETTING", help="widths of a MODULE:FUNCTION, which the tuning scales")
  of_entry.add_argument("--name", help="name of the row; default: that of the file or the function")
  args = parser.parse_args(argv)
  choices = {name: getattr(args, name) for name in ("estimator", "correction", "scaled", "name")}
  if args.enter is None and (given := [f"--{name}" for name, value in choices.items() if value]):
    parser.error(f"{given[0]}: expected --enter beside it")
  if args.power:
    print("\n".join(power.lines()))
    return
  try:
    entered = entry.enter(args.enter, **choices) if args.enter else None
    if entered:
      of_entries = args.folder / "entries" / f"{entered.name}.jsonl"
      entry.check_stored(entered, study.read_trials(of_entries))
  except ValueError as error:
    raise SystemExit(f"error: {error}") from None
  compilation_cache.cache_compilations()
  if args.check:
    measured = checks.measure(lambda length, seed: (make_bed(protocol.sizes(length)), warm_params(protocol.sizes(length), seed)))
    (args.folder / "checks.json").write_text(to_json(rounded(measured)))
    print(checks.text(measured))
    return
  until = time.monotonic() + args.seconds
  try:
    if args.stage:
      provenance.begin(args.folder / study.STARTED, rules, HERE / "protocol.py", rules.PUBLISHED)
      measure(args.stage, args.folder / "trials.jsonl", until)
    if entered:
      provenance.begin(of_entries.with_suffix(".started.json"), rules, HERE / "protocol.py")
      for stage in ("tune", "main"):
        if time.monotonic() <= until:  # Else the tuning may be incomplete.
          measure(stage, of_entries, until, entered)
  except ValueError as error:
    raise SystemExit(f"error: {error}") from None
  rows = study.read_trials(args.folder / "trials.jsonl")
  results = write(args.folder, rows)
  board.write(args.folder, rows)
  print(status(rows))
  print("\n".join([judging.lines(results["verdicts"]), *(f"{name}: {why}" for name, why in results["withheld"].items())]))
  figures.draw(results, args.folder / "figures", args.format)


if __name__ == "__main__":
  main()
