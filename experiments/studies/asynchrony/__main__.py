"""`python -m experiments.studies.asynchrony [--smoke] [--folder=DIR] [--judge]`

Trains the arms of `rules.ARMS` with paired seeds, each run with its learner on one core and its
sampler on another, and writes `results.json`. Resumes a study that was stopped. It needs two cores
that nothing else uses, and some 20 minutes.

  --smoke    two short runs of one seed, to see that everything works
  --folder   folder of the results; default: the study's own
  --judge    judge the stored rows again
"""

import json
import platform
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import jax

from experiments import judging, provenance
from experiments.studies.asynchrony import bed, rules

HERE = Path(__file__).parent


def main(argv: list[str]) -> int:
  """Runs a command line and returns its exit status: 0, or 2 for a wrong argument."""
  if {"-h", "--help"} & set(argv[1:]):
    print(__doc__)
    return 0
  wrong = [arg for arg in argv[1:] if arg not in ("--smoke", "--judge") and not arg.startswith("--folder=")]
  if wrong:
    print(f"error: found {wrong[0]!r}, expected --smoke, --judge or --folder=DIR", file=sys.stderr)
    return 2
  folder = next((Path(arg.split("=", 1)[1]) for arg in argv[1:] if arg.startswith("--folder=")), HERE)
  results = json.loads((folder / "results.json").read_text()) if "--judge" in argv else measure(folder, smoke="--smoke" in argv)
  results["verdicts"] = rules.judge(results)
  (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
  (folder / "trials.jsonl").unlink(missing_ok=True)
  print(judging.lines(results["verdicts"]))
  return 0


def measure(folder: Path, *, smoke: bool) -> dict:
  """Runs the trials that are not done yet."""
  folder.mkdir(parents=True, exist_ok=True)
  path, began = folder / "trials.jsonl", provenance.begin(folder / "started.json", rules)
  rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
  arms = dict(list(rules.ARMS.items())[:2]) if smoke else rules.ARMS
  seeds, steps, warm, skipped = ((0,), 8, 20, 5) if smoke else (rules.SEEDS, rules.STEPS, rules.WARM_STEPS, rules.SKIPPED)
  with tempfile.TemporaryDirectory() as text:
    home = Path(text)
    problems = bed.write_problems(home)
    policy = bed.warm_policy(problems, home, warm)
    for seed in seeds:
      for name, arm in arms.items():
        if any((row["arm"], row["seed"]) == (name, seed) for row in rows):
          continue
        row = bed.trial(
          arm, seed, problems=problems, policy=policy, folder=home / f"{len(rows)}", steps=steps, skipped=skipped
        )
        rows.append({"arm": name, "seed": seed} | row)
        with path.open("a") as file:
          file.write(json.dumps(rows[-1]) + "\n")
        print({key: rows[-1][key] for key in ("arm", "seed", "seconds", "first", "accuracy", "lag_mean")}, flush=True)
  ended = datetime.now(UTC).isoformat(timespec="seconds")
  machine = {"processor": platform.processor() or platform.machine(), "jax": jax.__version__, "ended": ended}
  return {"steps": steps, "skipped": skipped, "warm_steps": warm, **machine, "provenance": began, "trials": rows}


if __name__ == "__main__":
  sys.exit(main(sys.argv))
