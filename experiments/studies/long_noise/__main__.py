"""Measures the noise of gradients of stale data on responses of 16, 64 and 256 tokens.

  python -m experiments.studies.long_noise            calibrates, measures and judges; resumes
  python -m experiments.studies.long_noise --judge    only judges what is stored

Each trial is appended to `trials.jsonl` as soon as it ends. `results.json` holds the widths of the
clips, the trials and the verdicts, which wait for all trials.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Sequence

import numpy as np

from experiments import judging, provenance
from experiments.claims import study
from experiments.claims.bed import StartFailed
from experiments.results import rounded, to_json
from experiments.studies.long_noise import bed, figures, rules

HERE = pathlib.Path(__file__).parent


def measure(folder: pathlib.Path, lengths: Sequence[int]) -> None:
  """Calibrates the clips of each length once, and runs the trials that are not stored yet."""
  folder.mkdir(parents=True, exist_ok=True)
  provenance.begin(folder / study.STARTED, rules)
  path = folder / "trials.jsonl"
  rows = study.read_trials(path)
  with path.open("a") as file:
    for length in lengths:
      clips = next((row["clips"] for row in rows if row["length"] == length and "clips" in row), None)
      if clips is None:
        clips = bed.calibrate(length)
        print(json.dumps({"length": length, "clips": clips}), file=file, flush=True)
      for seed in rules.SEEDS:
        if any((row["length"], row.get("seed")) == (length, seed) for row in rows):
          continue
        started = time.process_time()
        try:
          row = bed.run(length, seed, clips)
        except StartFailed as reason:
          print(f"{reason}; it is left out", flush=True)
          row = {"length": length, "seed": seed, "failed": str(reason)}
        print(json.dumps(rounded(row | {"processor_seconds": time.process_time() - started})), file=file, flush=True)


def judge(folder: pathlib.Path, formats: Sequence[str] = ("png",)) -> None:
  """Judges the stored trials, writes `results.json`, prints the verdicts, and draws the figure."""
  rows = study.read_trials(folder / "trials.jsonl")
  trials, failed = [row for row in rows if "objectives" in row], [(row["length"], row["seed"]) for row in rows if "failed" in row]
  kept = {"verdicts": rules.judge(trials, failed), "failed": failed, "means": means(trials)}
  (folder / "results.json").write_text(to_json(rounded(kept)))
  print(judging.lines(kept["verdicts"]))
  if len(kept["verdicts"]) > 1:
    figures.draw(trials, kept["means"], folder / "figures", formats)


def means(trials: Sequence[dict]) -> list[dict]:
  """Returns the geometric mean of each objective's inflation at each length, and its interval."""
  rows = []
  for length in rules.LENGTHS:
    of_length = [trial["objectives"] for trial in trials if trial["length"] == length]
    for name in of_length[0] if of_length else ():
      at = judging.interval([float(np.log(of[name]["inflation"])) for of in of_length])
      clipped = float(np.mean([of[name]["clipped"] for of in of_length]))
      rows.append({"length": length, "objective": name, "clipped": clipped} | {side: float(np.exp(x)) for side, x in at.items()})
  return rows


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(prog="python -m experiments.studies.long_noise", description=__doc__.splitlines()[0])
  parser.add_argument("--folder", type=pathlib.Path, default=HERE, help="folder of the trials and results")
  parser.add_argument("--lengths", type=int, nargs="+", choices=rules.LENGTHS, default=rules.LENGTHS, help="lengths to measure")
  parser.add_argument("--judge", action="store_true", help="only judge what is stored")
  parser.add_argument("--format", nargs="+", choices=("png", "pdf", "svg"), default=["png"], help="formats of the figure")
  args = parser.parse_args(argv)
  if not args.judge:
    measure(args.folder, args.lengths)
  judge(args.folder, args.format)


if __name__ == "__main__":
  main()
