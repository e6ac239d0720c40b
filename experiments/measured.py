"""The table of README.md of what is measured, read from the stored results.

`python -m experiments.entries` writes it, so that no number of it can go stale.
"""

import json
import pathlib
import re
from collections.abc import Iterator

from experiments.claims import page
from experiments.results import from_json

HERE = pathlib.Path(__file__).parent
HEAD = ("what", "result", "machine, date")


def rows() -> Iterator[tuple[str, str, str]]:
  """Yields the rows: what was measured, its result, and where and when."""
  yield _laptop_job()
  yield _real_model()
  yield _claims()
  yield _noise()
  yield _kills()
  unmeasured = "kernels, decoding and an update ran on one H200; pods are [compiled for](docs/pod_plans.md)"
  yield "a job on a TPU or a GPU, several GPUs, any cloud", f"**not measured yet**: {unmeasured}", "[log](experiments/log/gpu.md)"


def _laptop_job() -> tuple[str, str, str]:
  logs = [HERE / "notebooks" / "logs" / f"gspo-{seed}" for seed in (0, 1)]
  summaries = [json.loads((log / "summary.json").read_text()) for log in logs]
  before, after = (_percents(run[f"accuracy_{end}"] for run in summaries) for end in ("start", "final"))
  result = f"held-out accuracy {before} after imitation, {after} after RL, seeds 0 and 1"
  return "[laptop job](docs/results.md#the-laptop-job), `configs/gspo.py`", result, "one CPU core of two, 2026-11-22"


def _real_model() -> tuple[str, str, str]:
  table = from_json((HERE / "real_model" / "results.json").read_text())["evals"]
  mine = [row for row in table if row["config"] == "sapo:smollm2"]
  ends = min(row["step"] for row in mine), max(row["step"] for row in mine)
  before, after = (_percents(row["accuracy"] for row in mine if row["step"] == step) for step in ends)
  what = "[real language model](docs/results.md#a-real-language-model), SmolLM2-135M-Instruct"
  result = f"finding the largest of five numbers: from {before} to {after} right in {ends[1]} steps, three seeds"
  return what, result, "two CPU cores, 2026-11-25"


def _claims() -> tuple[str, str, str]:
  number, counts = re.search(r"\*\*Of (\d+) claims: (.*)\.\*\*", page.text()).groups()
  return f"[{number} claims of the papers](experiments/claims/README.md), small models", counts, "CPU, 2026-11-21 to 2026-12-01"


def _noise() -> tuple[str, str, str]:
  verdicts = from_json((HERE / "studies" / "noise" / "results.json").read_text())["verdicts"]
  names = {
    "the product of all token ratios": "slope: product ratio",
    "GRPO's relative to GSPO's": "slope: GRPO's noise over GSPO's grows with length",
  }
  slopes = {name: verdicts[rule]["interval"] for name, rule in names.items()}
  laws = ", ".join(f"as T^{x['mean']:.2f} [{x['low']:.2f}, {x['high']:.2f}] for {name}" for name, x in slopes.items())
  what = "[variance of the gradient](docs/results.md#does-noise-grow-with-the-length-of-a-response) by length T"
  return what, f"it grows {laws} (95 % intervals, 12 seeds)", "CPU, 2026-11-29"


def _kills() -> tuple[str, str, str]:
  storms = [json.loads((HERE / "reliability" / f"{name}.json").read_text()) for name in ("asynchronous", "asynchronous_processes")]
  kills = sum(len(storm["deaths"]["rows"]) for storm in storms)
  wrong = sum(sum(storm["mismatches"].values()) + len(storm["broken"]) for storm in storms)
  result = f"{kills} kills of learner or sampler while it was running: {wrong} differences from an undisturbed run, in any bit"
  return "[kills and restarts](docs/results.md#killed-anywhere-the-same-bits), asynchronous", result, "two CPU cores, 2026-11-27 and -29"


def _percents(shares) -> str:
  return f"{', '.join(f'{100 * share:.1f}' for share in shares)} %"
