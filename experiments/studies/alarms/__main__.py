"""`python -m experiments.studies.alarms [--measure] [--smoke] [--folder=DIR]`

Judges every rule of the alarms on the recorded runs, prints what it says of them, and draws the
curves. The runs are in `runs.json.gz`; nothing is trained.

  --measure  train the runs anew; resumes where it stopped, some 35 minutes of a core
  --smoke    with --measure: four short runs, to see that everything works
  --folder   folder of the results; default: the study's own
"""

import gzip
import json
import sys
import time
from pathlib import Path

from experiments import provenance
from experiments.claims import bed as claims
from experiments.studies.alarms import bed, rules
from jaxrl_llm.devices import compilation_cache

HERE = Path(__file__).parent
RUNS = "runs.json.gz"


def options(argv: list[str], about: str, here: Path) -> tuple[Path, bool, bool] | int:
  """Reads a command line. Returns its folder, `--measure` and `--smoke`, or the exit status."""
  if {"-h", "--help"} & set(argv[1:]):
    print(about)
    return 0
  wrong = [arg for arg in argv[1:] if arg not in ("--measure", "--smoke") and not arg.startswith("--folder=")]
  if wrong:
    print(f"error: found {wrong[0]!r}, expected --measure, --smoke or --folder=DIR", file=sys.stderr)
    return 2
  folder = next((Path(arg.split("=", 1)[1]) for arg in argv[1:] if arg.startswith("--folder=")), here)
  if "--smoke" in argv and folder == here:
    print("error: --smoke: found the folder of the measured runs, expected another --folder=DIR, so that they stay", file=sys.stderr)
    return 2
  return folder, "--measure" in argv, "--smoke" in argv


def main(argv: list[str]) -> int:
  """Runs a command line and returns its exit status: 0, or 2 for a wrong argument."""
  chosen = options(argv, __doc__, HERE)
  if isinstance(chosen, int):
    return chosen
  folder, measures, smoke = chosen
  if measures:
    measure(folder, smoke=smoke)
  if not (folder / RUNS).exists():
    print(f"error: {folder / RUNS}: found no such file, expected the recorded runs; run it once with --measure", file=sys.stderr)
    return 2
  from experiments.studies.alarms import curves, figures

  recorded = read(folder / RUNS)
  results = curves.judge(recorded["runs"])
  print(curves.lines(results))
  (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
  figures.draw(results, folder / "figures", ["png"])
  return 0


def measure(folder: Path, *, smoke: bool) -> None:
  """Trains the runs that are not recorded yet, seed by seed, and records those of whole seeds.

  A seed whose imitation does not reach the accuracy at which RL begins has no runs.
  """
  folder.mkdir(parents=True, exist_ok=True)
  compilation_cache.cache_compilations()
  began, until = provenance.begin(folder / "started.json", rules, Path(bed.__file__)), time.monotonic() + 60 * rules.MINUTES
  sizes, seeds, steps = (claims.SMOKE, rules.SEEDS[:2], 20) if smoke else (claims.Sizes(), rules.SEEDS, rules.STEPS)
  arms = dict(list(rules.ARMS.items())[:2]) if smoke else rules.ARMS
  trials = folder / "trials.jsonl"
  runs = read(folder / RUNS)["runs"] if (folder / RUNS).exists() else []
  runs += [json.loads(line) for line in trials.read_text().splitlines()] if trials.exists() else []

  def add(row: dict) -> None:
    runs.append(row)
    with trials.open("a") as file:
      file.write(json.dumps(row) + "\n")

  whole, failed = [], "imitation failed"
  for seed in seeds:
    if time.monotonic() > until:
      break
    for name, arm in arms.items():
      if any(run["seed"] == seed and run["arm"] in (name, failed) for run in runs):
        continue
      try:
        add({"arm": name, "seed": seed} | bed.train(sizes, seed, arm, steps))
      # Before any arm is trained, so that no result influences the choice.
      except claims.StartFailed as reason:
        print(f"{reason}; it is left out", flush=True)
        add({"arm": failed, "seed": seed})
        continue
      print(seed, name, [round(100 * x) for x in runs[-1]["accuracy"]], flush=True)
    if not any(run["seed"] == seed and run["arm"] == failed for run in runs):
      whole.append(seed)
  record = {"provenance": began, "seeds": whole, "steps": steps, "runs": [run for run in runs if run["seed"] in whole]}
  # Without a time in its header, so that equal runs make equal files.
  (folder / RUNS).write_bytes(gzip.compress(json.dumps(record, separators=(",", ":")).encode(), mtime=0))
  trials.unlink()
  (folder / "started.json").unlink()


def read(path: Path) -> dict:
  """Reads the recorded runs."""
  return json.loads(gzip.decompress(path.read_bytes()))


if __name__ == "__main__":
  sys.exit(main(sys.argv))
