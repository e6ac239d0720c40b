"""Runs the laptop job for some configs and seeds, each in its own process, and prints table rows.

  python -m experiments.laptop_job --configs gspo --seeds 0 1 2 3 4
  python -m experiments.laptop_job --configs grpo dr_grpo dapo gspo gspo_token sapo
  python -m experiments.laptop_job --seeds 0 1 2
    --configs sapo:smollm2 sapo:smollm2-random sapo:smollm2-form

Runs go to `runs/laptop_job/CONFIG-SEED`. Finished runs are read and not repeated. The rows are in
the requested order, good or bad. The gain is the mean difference between the last and the first
evaluation of the same problems, with its 95 % bootstrap interval over problems. Only runs that keep
the samples of their evaluations (`eval.save_samples`) have a gain.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

from jaxrl_llm.evaluation import Interval, bootstrap_interval, read_samples

HEADER = """\
| config | seed | accuracy before RL | accuracy at the end | gain, points | training | whole process | peak memory |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def run(config: str, seed: int, folder: pathlib.Path) -> str:
  """Runs one trial unless it has finished, and returns its row."""
  name, _, arg = config.partition(":")
  workdir = folder / f"{config.replace(':', '-')}-{seed}"
  timing = workdir.with_suffix(".seconds")
  if not (workdir / "report.html").exists():
    workdir.parent.mkdir(parents=True, exist_ok=True)
    command = [
      sys.executable, "-m", "jaxrl_llm.main",
      f"--config=configs/{name}.py:{arg}", f"--config.seed={seed}", f"--workdir={workdir}",
    ]  # fmt: skip
    started = time.perf_counter()
    with open(workdir.with_suffix(".log"), "w") as log:
      # The time is that of a whole job, whose warm start no earlier one has computed.
      env = os.environ | {"JAXRL_LLM_WARM_STARTS": "off"}
      subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env=env)
    timing.write_text(f"{time.perf_counter() - started:.1f}")
  summary = json.loads((workdir / "summary.json").read_text())
  return (
    f"| `{config}` | {seed} | {summary['accuracy_start']:.1%} | {summary['accuracy_final']:.1%} | {gain(workdir)} "
    f"| {summary['wall_seconds']:.0f} s "
    f"| {float(timing.read_text()):.0f} s | {summary['peak_memory_gb']:.2f} GB |"
  )


def gain(workdir: pathlib.Path) -> str:
  """Formats the paired gain of a run in percentage points, with its interval.

  It is "" if the run's evaluations kept no samples.

  Raises:
    ValueError: If the first and the last evaluation have different problems.
  """
  files = first_and_last(workdir)
  if files is None:
    return ""
  interval = difference(*files)
  return f"{interval.mean:+.1f} [{interval.low:+.1f}, {interval.high:+.1f}]"


def difference(first: pathlib.Path, last: pathlib.Path) -> Interval:
  """Computes by how many points the last evaluation's scores exceed the first's, paired by problem.

  Raises:
    ValueError: If the evaluations have different problems.
  """
  before, after = scores(first), scores(last)
  if set(before) != set(after):
    raise ValueError(f"{last}: found other problems than in {first.name}, expected the same problems")
  return bootstrap_interval(100 * np.array([after[name] - before[name] for name in sorted(before)]))


def first_and_last(workdir: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path] | None:
  """Returns the samples of a run's first and last evaluation, or None if it kept fewer than two."""
  files = sorted(
    (workdir / "evaluations").glob("step-*.jsonl"), key=lambda path: int(path.stem.removeprefix("step-"))
  )
  return (files[0], files[-1]) if len(files) >= 2 else None


def scores(path: pathlib.Path) -> dict[str, float]:
  """Computes the mean reward of each problem's samples; samples without a reward are left out."""
  rewards: dict[str, list[float]] = {}
  for row in read_samples(path):
    rewards.setdefault(row.id, []).append(np.nan if row.score is None else row.score)
  return {name: float(np.nanmean(values)) for name, values in rewards.items()}


def main() -> None:
  """Parses the command line and prints the table."""
  parser = argparse.ArgumentParser(prog="python -m experiments.laptop_job", description=__doc__.splitlines()[0])
  parser.add_argument("--configs", nargs="+", default=["gspo"])
  parser.add_argument("--seeds", nargs="+", type=int, default=[0])
  parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/laptop_job"))
  args = parser.parse_args()
  print(HEADER, flush=True)
  for config in args.configs:
    for seed in args.seeds:
      print(run(config, seed, args.folder), flush=True)


if __name__ == "__main__":
  main()
