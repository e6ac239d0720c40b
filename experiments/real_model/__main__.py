"""Collects the runs of `README.md` and draws its figure.

  python -m experiments.laptop_job --configs sapo:smollm2 sapo:smollm2-steps --seeds 1 2 3
  python -m experiments.real_model

Reads the runs that `experiments.laptop_job` wrote to `--runs` and stores them in `results.json`
beside this file. Prints a row per run and the paired difference of each method from SAPO, and draws
`figures/real_model.png`. Stored runs that are no longer in `--runs` are kept.
"""

import argparse
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.laptop_job import difference, first_and_last
from experiments.real_model import figures
from experiments.results import from_json, rounded, to_json

HERE = pathlib.Path(__file__).parent
VERIFIER = "reward/final_number/mean"
METHODS = ("raft", "grpo", "gspo", "dapo")
"""Names of the config files whose runs are compared with SAPO's, problem by problem."""


def collect(runs: pathlib.Path) -> dict[str, list[dict]]:
  """Reads all finished runs.

  Returns:
    Three tables. `runs` has a row per run. `steps` has the share of right responses of each RL
    step, whatever the reward is. `evals` has the held-out accuracies with their intervals.

  Raises:
    FileNotFoundError: If the folder holds no finished run of SmolLM2.
  """
  tables: dict[str, list[dict]] = {"runs": [], "steps": [], "evals": []}
  for folder in sorted(path.parent for path in runs.glob("*-smollm2*-*/summary.json")):
    name, _, seed = folder.name.rpartition("-")
    where = {"config": name.replace("-", ":", 1), "seed": int(seed)}
    summary = json.loads((folder / "summary.json").read_text())
    if summary["status"] != "finished":
      continue
    seconds = float(folder.with_suffix(".seconds").read_text())
    tables["runs"].append(where | paired(folder) | {"seconds": seconds, "memory_gb": summary["peak_memory_gb"]})
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
      if row["phase"] == "rl":
        tables["steps"].append(where | {"step": row["step"], "right": row[VERIFIER]})
      elif row["phase"] == "eval":
        values = {key: row[f"eval/accuracy{end}"] for key, end in (("accuracy", ""), ("low", "_low"), ("high", "_high"))}
        tables["evals"].append(where | {"step": row["step"]} | values)
  if not tables["runs"]:
    raise FileNotFoundError(f"--runs: found no finished run of SmolLM2 in {runs}; `python -m experiments.laptop_job` makes them")
  return tables


def paired(folder: pathlib.Path) -> dict[str, float]:
  """Computes the gain of a run in points, paired by problem, with its 95 % interval."""
  gain = difference(*first_and_last(folder))
  return {"gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high}


def differences(runs: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the difference between a method's last evaluation and SAPO's, by method and seed.

  The difference is paired by problem and in points.
  """
  for method in METHODS:
    for folder in sorted(runs.glob(f"{method}-smollm2-[0-9]*/")):
      reference = folder.with_name(folder.name.replace(method, "sapo", 1))
      if not (folder / "report.html").exists() or not (reference / "report.html").exists():
        continue
      gap = difference(first_and_last(reference)[1], first_and_last(folder)[1])
      yield {"method": method, "seed": int(folder.name.rpartition("-")[2]), "points": gap.mean, "low": gap.low, "high": gap.high}


def merged(old: Mapping[str, list[dict]], new: Mapping[str, list[dict]]) -> dict[str, list[dict]]:
  """Merges old and new results. The new rows of a run or a difference replace its old ones.

  Example:
    >>> merged({"runs": [{"config": "a", "seed": 1, "gain": 1}]}, {"runs": [{"config": "a", "seed": 2, "gain": 3}]})["runs"]
    [{'config': 'a', 'seed': 1, 'gain': 1}, {'config': 'a', 'seed': 2, 'gain': 3}]
  """
  name = lambda row: (row.get("config") or row["method"], row["seed"])
  result = {}
  for key, rows in new.items():
    fresh = {name(row) for row in rows}
    result[key] = sorted([*(row for row in old.get(key, ()) if name(row) not in fresh), *rows], key=name)
  return result


def table(results: Mapping[str, Any]) -> Iterator[str]:
  """Formats the runs as a Markdown table and the differences as one line each."""
  yield "| config | seed | untouched | at the end | gain, points | whole process | peak memory |"
  yield "| --- | --- | --- | --- | --- | --- | --- |"
  percent = lambda row: f"{row['accuracy']:.1%} [{100 * row['low']:.1f}, {100 * row['high']:.1f}]"
  for run in results["runs"]:
    evals = [row for row in results["evals"] if (row["config"], row["seed"]) == (run["config"], run["seed"])]
    gain = f"{run['gain']:+.1f} [{run['gain_low']:+.1f}, {run['gain_high']:+.1f}]"
    cells = (f"`{run['config']}`", str(run["seed"]), percent(evals[0]), percent(evals[-1]), gain)
    yield f"| {' | '.join(cells)} | {run['seconds']:.0f} s | {run['memory_gb']:.2f} GB |"
  for row in results["differences"]:
    yield f"{row['method']} minus sapo, seed {row['seed']}: {row['points']:+.1f} [{row['low']:+.1f}, {row['high']:+.1f}] points"


def main(argv: Sequence[str] | None = None) -> None:
  """Parses the command line, collects the runs and draws the figure."""
  parser = argparse.ArgumentParser(prog="python -m experiments.real_model", description=__doc__.splitlines()[0])
  parser.add_argument("--folder", type=pathlib.Path, default=HERE, help="folder of results.json and figures/")
  parser.add_argument(
    "--runs", type=pathlib.Path, default=pathlib.Path("runs/laptop_job"), help="folder of the runs of experiments.laptop_job"
  )
  parser.add_argument("--format", nargs="+", choices=("png", "pdf", "svg"), default=["png"])
  parser.add_argument("--plot_only", action="store_true", help="draw results.json without reading any run")
  args = parser.parse_args(argv)
  path = args.folder / "results.json"
  if not args.plot_only:
    old = from_json(path.read_text()) if path.exists() else {}
    results = merged(old, collect(args.runs) | {"differences": list(differences(args.runs))})
    path.write_text(to_json(rounded(results)))
  results = from_json(path.read_text())
  print("\n".join(table(results)))
  figures.draw(results, args.folder / "figures", args.format)


if __name__ == "__main__":
  main()
