"""Measures the noise of gradients of stale data by length, staleness and objective.

  python -m experiments.studies.noise --calibrate          widths of the clips; before any trial
  python -m experiments.studies.noise --lengths 8 16 32    trials; resumes where it stopped
  python -m experiments.studies.noise --judge              verdicts of what is stored

Each trial is appended to `trials.jsonl` as soon as it ends. `results.json` holds the verdicts and
the laws, and is rewritten at the end of every command. Verdicts wait for all trials of all seeds;
with them comes the figure.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import judging, provenance
from experiments.claims import study
from experiments.claims.bed import StartFailed
from experiments.results import rounded, to_json
from experiments.studies.noise import bed, figures, protocol, rules
from jaxrl_llm.devices import compilation_cache

HERE = pathlib.Path(__file__).parent
FORECAST = HERE.parent / "forecast" / "trials.jsonl"


def measure(folder: pathlib.Path, lengths: Sequence[int], seeds: Sequence[int], until: float) -> None:
  """Runs the trials that are not stored yet, until a deadline on the clock of `time.monotonic`."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / "trials.jsonl"
  provenance.begin(folder / study.STARTED, rules, protocol.CALIBRATION, pathlib.Path(protocol.__file__), pathlib.Path(bed.__file__))
  known = {(row["length"], row["seed"]) for row in study.read_trials(path)}
  with path.open("a") as file:
    for length in lengths:
      for seed in seeds:
        if (length, seed) in known or time.monotonic() > until:
          continue
        started = time.process_time()
        try:
          row = bed.run(length, seed)
        except StartFailed as reason:
          print(f"{reason}; it is left out", flush=True)
          row = {"length": length, "seed": seed, "failed": str(reason)}
        row = rounded(packed(row) | {"processor_seconds": time.process_time() - started})
        print(json.dumps(row), file=file, flush=True)
        print(f"length {length}, seed {seed}: {row['processor_seconds']:.0f} s of a core", flush=True)


def packed(trial: Mapping[str, Any]) -> dict[str, Any]:
  """Stores the rows of a trial as a table, with the names of its columns once.

  Example:
    >>> packed({"seed": 1, "rows": [{"k": 1, "x": 2.0}, {"k": 3}]})
    {'seed': 1, 'columns': ['k', 'x'], 'rows': [[1, 2.0], [3, None]]}
    >>> unpacked(_)["rows"]
    [{'k': 1, 'x': 2.0}, {'k': 3}]
  """
  if "rows" not in trial:
    return dict(trial)
  columns = list(dict.fromkeys(name for row in trial["rows"] for name in row))
  known = {name: value for name, value in trial.items() if name != "rows"}
  return known | {"columns": columns, "rows": [[row.get(name) for name in columns] for row in trial["rows"]]}


def unpacked(trial: Mapping[str, Any]) -> dict[str, Any]:
  """Inverts `packed`."""
  of_row = lambda row: {name: value for name, value in zip(trial["columns"], row, strict=True) if value is not None}
  known = {name: value for name, value in trial.items() if name not in ("columns", "rows")}
  return known | {"rows": [of_row(row) for row in trial["rows"]]} if "rows" in trial else dict(trial)


def judge(folder: pathlib.Path, formats: Sequence[str] = ("png",)) -> None:
  """Judges the stored trials, writes `results.json`, prints the verdicts and draws the figure."""
  rows = [unpacked(row) for row in study.read_trials(folder / "trials.jsonl")]
  trials = [row for row in rows if "failed" not in row]
  results = {"trials": trials, "failed": [(row["length"], row["seed"]) for row in rows if "failed" in row]}
  verdicts = rules.judge(results)
  kept = {"verdicts": verdicts, "failed": results["failed"]}
  if "waits" not in verdicts:
    verdicts["from noise to outcome"] = rules.outcome(trials, study.read_trials(FORECAST))
    kept["laws"], kept["equal_drift"] = rules.laws(trials), rules.equal_drift(trials)
    figures.draw(trials, kept["laws"], folder / "figures", formats)
  (folder / "results.json").write_text(to_json(rounded(kept)))
  print(judging.lines(verdicts))


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(prog="python -m experiments.studies.noise", description=__doc__.splitlines()[0])
  parser.add_argument("--folder", type=pathlib.Path, default=HERE, help="folder of the trials and results")
  parser.add_argument("--calibrate", action="store_true", help="compute the widths of clips and write them to calibration.json")
  parser.add_argument("--lengths", type=int, nargs="+", choices=protocol.LENGTHS + protocol.LONGER, default=[], help="lengths to measure")
  parser.add_argument("--seeds", type=int, nargs="+", choices=protocol.SEEDS, default=protocol.SEEDS, help="seeds to measure")
  parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which no trial is begun")
  parser.add_argument("--judge", action="store_true", help="only judge what is stored")
  parser.add_argument("--format", nargs="+", choices=("png", "pdf", "svg"), default=["png"], help="formats of the figure")
  args = parser.parse_args(argv)
  compilation_cache.cache_compilations()
  if args.calibrate:
    known = json.loads(protocol.CALIBRATION.read_text()) if protocol.CALIBRATION.exists() else {}
    for length in args.lengths or protocol.LENGTHS:
      known[str(length)] = dict(bed.calibrate(length))
      protocol.CALIBRATION.write_text(json.dumps(known) + "\n")
      print(f"length {length}: {known[str(length)]}", flush=True)
    return
  if not args.judge:
    measure(args.folder, args.lengths or protocol.LENGTHS, args.seeds, time.monotonic() + args.seconds)
  judge(args.folder, args.format)


if __name__ == "__main__":
  main()
