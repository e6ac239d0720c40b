"""`python -m experiments.studies.asynchrony [--smoke] [--folder=DIR] [--judge]`

Trains the arms of `rules.ARMS` with paired seeds, each run with its learner on one core and its
sampler on another, then those of `rules.ACCURACY_ARMS`, each run on one core and two at a time, and
those of `rules.LAGGING` on a smaller bed; writes `results.json`. A part that `results.json` has is
not run again, and one that was stopped is resumed. It needs two cores that nothing else uses, and
some 50 minutes.

  --smoke    short runs of one seed in a folder that is thrown away, to see that everything works
  --folder   folder of the results; default: the study's own
  --judge    judge the stored rows again
"""

import json
import platform
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue

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
  if "--smoke" in argv:
    with tempfile.TemporaryDirectory() as text:
      results = measure(Path(text), {}, rules.SMOKE)
      print(judging.lines(rules.judge(results)))
    return 0
  stored = folder / "results.json"
  results = json.loads(stored.read_text()) if stored.exists() else {}
  if "--judge" not in argv:
    results = measure(folder, results, rules.PARTS)
  results["verdicts"] = rules.judge(results)
  stored.write_text(json.dumps(results, indent=1) + "\n")
  for path in (*(folder / f"{part}.jsonl" for part in rules.PARTS), folder / "started.json"):
    path.unlink(missing_ok=True)
  print(judging.lines(results["verdicts"]))
  return 0


def measure(folder: Path, results: dict, parts: Mapping[str, rules.Part]) -> dict:
  """Returns the results with the parts that they lacked, each of which is a list of rows."""
  missing = {name: part for name, part in parts.items() if name not in results}
  if not missing:
    return results
  folder.mkdir(parents=True, exist_ok=True)
  began = provenance.begin(folder / "started.json", rules)
  for name, part in missing.items():
    rows = Rows(folder / f"{name}.jsonl")
    (_on_small_bed if part.plan is None else _in_processes)(part, rows)
    results = results | {name: rows.in_order(part)}
  ended = datetime.now(UTC).isoformat(timespec="seconds")
  machine = {"processor": platform.processor() or platform.machine(), "jax": jax.__version__, "ended": ended}
  plans = {name: part.plan._asdict() for name, part in missing.items() if part.plan}
  run = {"parts": list(missing), "plans": plans, "provenance": began} | machine
  return results | {"runs": [*results.get("runs", ()), run]}


def _in_processes(part: rules.Part, rows: "Rows") -> None:
  """Trains arms with a learner and a sampler each, one run at a time or one on each core."""
  cores: SimpleQueue[tuple[int, int]] = SimpleQueue()
  for pair in part.cores:
    cores.put(pair)
  with tempfile.TemporaryDirectory() as text:
    home = Path(text)
    problems = bed.write_problems(home)
    policy = bed.warm_policy(problems, home, part.plan)

    def run(name: str, seed: int) -> None:
      own = cores.get()
      try:
        options = dict(problems=problems, policy=policy, folder=home / f"{name} {seed}", plan=part.plan, cores=own)
        rows.add(name, seed, lambda: bed.trial(part.arms[name], seed, **options))
      finally:
        cores.put(own)

    with ThreadPoolExecutor(len(part.cores)) as pool:
      for done in [pool.submit(run, name, seed) for seed in part.seeds for name in part.arms]:
        done.result()


def _on_small_bed(part: rules.Part, rows: "Rows") -> None:
  """Trains arms on the bed of the claims, whose lag is exact."""
  for seed in part.seeds:
    for name, (arm, lag) in part.arms.items():
      rows.add(name, seed, lambda arm=arm, lag=lag, seed=seed: train(part.sizes or claims.Sizes(), seed, arm, lag))


class Rows:
  """Results of trials, each of which is made once and kept in a file.

  Args:
    path: File, one JSON line for each trial.
  """

  def __init__(self, path: Path):
    self._path = path
    self.rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    self._one = threading.Lock()

  def in_order(self, part: rules.Part) -> list[dict]:
    """Returns the rows by seed and arm, whichever ended first."""
    arms = list(part.arms)
    return sorted(self.rows, key=lambda row: (row["seed"], arms.index(row["arm"])))

  def add(self, arm: str, seed: int, run: Callable[[], dict]) -> None:
    """Runs a trial unless it is known."""
    if any((row["arm"], row["seed"]) == (arm, seed) for row in self.rows):
      return
    row = {"arm": arm, "seed": seed} | run()
    with self._one, self._path.open("a") as file:
      file.write(json.dumps(row) + "\n")
      self.rows.append(row)
    print({name: x for name, x in row.items() if isinstance(x, str | int | float)}, flush=True)


if __name__ == "__main__":
  sys.exit(main(sys.argv))
