"""`python -m experiments.studies.asynchrony [--smoke] [--folder=DIR] [--judge]`

Trains the arms of `rules.ARMS` with paired seeds, each run with its learner on one core and its
sampler on another, and then those of `rules.LAGGING` on a smaller bed; writes `results.json`.
Resumes a study that was stopped. It needs two cores that nothing else uses, and some 20 minutes.

  --smoke    two short runs of one seed, to see that everything works
  --folder   folder of the results; default: the study's own
  --judge    judge the stored rows again
"""

import json
import platform
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import jax

from experiments import judging, provenance
from experiments.claims import bed as claims
from experiments.studies.asynchrony import bed, rules
from experiments.studies.asynchrony.lagging import train

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
  for name in ("trials.jsonl", "lagging.jsonl", "started.json"):
    (folder / name).unlink(missing_ok=True)
  print(judging.lines(results["verdicts"]))
  return 0


def measure(folder: Path, *, smoke: bool) -> dict:
  """Runs the trials that are not done yet."""
  folder.mkdir(parents=True, exist_ok=True)
  began = provenance.begin(folder / "started.json", rules)
  arms = rules.ARMS
  seeds, steps, warm, skipped = ((0,), 8, 20, 5) if smoke else (rules.SEEDS, rules.STEPS, rules.WARM_STEPS, rules.SKIPPED)
  trials = Rows(folder / "trials.jsonl")
  with tempfile.TemporaryDirectory() as text:
    home = Path(text)
    problems = bed.write_problems(home)
    policy = bed.warm_policy(problems, home, warm)
    for seed in seeds:
      for name, arm in arms.items():
        of_trial = dict(problems=problems, policy=policy, folder=home / f"{name} {seed}", steps=steps, skipped=skipped)
        trials.add(name, seed, lambda arm=arm, seed=seed, options=of_trial: bed.trial(arm, seed, **options))
  lagging, sizes = Rows(folder / "lagging.jsonl"), claims.SMOKE if smoke else claims.Sizes()
  for seed in rules.LAGGING_SEEDS[: 1 if smoke else None]:
    for name, (arm, lag) in rules.LAGGING.items():
      lagging.add(name, seed, lambda arm=arm, lag=lag, seed=seed: train(sizes, seed, arm, lag))
  ended = datetime.now(UTC).isoformat(timespec="seconds")
  machine = {"processor": platform.processor() or platform.machine(), "jax": jax.__version__, "ended": ended}
  earlier = {}
  if (folder / "results.json").exists():  # Of an earlier plan.
    earlier = {name: rows for name, rows in json.loads((folder / "results.json").read_text()).items() if name == "earlier_trials"}
  plan = {"steps": steps, "skipped": skipped, "warm_steps": warm, "provenance": began}
  return plan | machine | earlier | {"trials": trials.rows, "lagging": lagging.rows}


class Rows:
  """Results of trials, each of which is made once and kept in a file.

  Args:
    path: File, one JSON line for each trial.
  """

  def __init__(self, path: Path):
    self._path = path
    self.rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

  def add(self, arm: str, seed: int, run: Callable[[], dict]) -> None:
    """Runs a trial unless it is known."""
    if any((row["arm"], row["seed"]) == (arm, seed) for row in self.rows):
      return
    self.rows.append({"arm": arm, "seed": seed} | run())
    with self._path.open("a") as file:
      file.write(json.dumps(self.rows[-1]) + "\n")
    print({name: x for name, x in self.rows[-1].items() if isinstance(x, str | int | float)}, flush=True)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
