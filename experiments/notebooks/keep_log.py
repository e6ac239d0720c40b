"""Reduces the log of a run to what the lectures read.

  python -m experiments.notebooks.keep_log WORKDIR [NAME] [--texts]

Keeps the metrics of `METRICS` from `metrics.jsonl` with four digits, and one row in 50 of the warm
start. `--texts` also keeps some responses of some steps from `samples.jsonl`. `config.json` and
`summary.json` lose the entries that tell where the run was made.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.notebooks.sources import HERE
from jaxrl_llm.workdir.metrics import read_rows

LOGS = HERE / "logs"

METRICS = (
  "actor/entropy", "actor/grad_norm", "actor/loss", "actor/lr", "actor/pg_clipfrac", "actor/ppo_kl_k3", "actor/kl_loss",
  "sapo/gate_pos", "sapo/gate_neg", "ratio/min", "ratio/max", "ratio/p99", "ratio/sequence/p99", "critic/rewards/mean",
  "response_length/mean", "response_length/max", "response_length/clip_ratio", "group/frac_reward_zero_std", "train/skipped",
  "train/skipped_steps", "timing_s/rollout", "timing_s/reward", "timing_s/old_logprobs", "timing_s/ref_logprobs", "timing_s/update",
  "timing_s/step", "perf/throughput", "actor/nll_loss", "teacher/kl", "teacher/agreement",
)  # fmt: skip
"""Metrics of a step that a lecture draws or names. All metrics of evaluations are kept as well."""

SAMPLED_STEPS = 5
SAMPLES = 6  # Number of responses per step.
# Metrics kept with six digits, since they are close to 1 or must equal the summary.
_PRECISE = ("eval/", "ratio/", "sapo/")
_TEXTS = ("step", "phase", "prompt", "response", "answer", "level", "reward", "correct", "advantage", "num_tokens", "stopped")
_PRIVATE = ("command", "data", "started", "finished", "workdir")


def kept_metrics(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Reduces rows to the metrics that the lectures read.

  Example:
    >>> kept_metrics([{"step": 1, "phase": "rl", "actor/loss": 0.123456789, "ratio/ess": 1.0}])
    [{'step': 1, 'phase': 'rl', 'actor/loss': 0.1235}]
  """
  rows = [row for row in rows if row["phase"] != "warm_start" or row["step"] % 50 == 0 or row["step"] == 1]
  is_kept = lambda name: name in METRICS or name.startswith("eval/") or name in ("step", "phase", "nonfinite")
  return [{name: _rounded(value, 6 if name.startswith(_PRECISE) else 4) for name, value in row.items() if is_kept(name)} for row in rows]


def _rounded(value: Any, digits: int = 4) -> Any:
  """Rounds a float to significant digits."""
  return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def kept_samples(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Selects responses of steps that are evenly spaced from the first to the last."""
  steps = sorted({row["step"] for row in rows if row["phase"] == "rl"})
  chosen = {steps[round(i * (len(steps) - 1) / (SAMPLED_STEPS - 1))] for i in range(SAMPLED_STEPS)} if steps else set()
  samples_kept = []
  for step in sorted(chosen):
    chosen_rows = [row for row in rows if row["step"] == step and row["phase"] == "rl"][:SAMPLES]
    samples_kept += [{name: _rounded(row[name]) for name in _TEXTS if name in row} for row in chosen_rows]
  return samples_kept


def keep(workdir: pathlib.Path, folder: pathlib.Path, *, texts: bool) -> int:
  """Writes the reduced log of a run, optionally with responses. Returns its size in bytes."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, rows in (("metrics", kept_metrics), *([("samples", kept_samples)] if texts else [])):
    lines = (json.dumps(row, separators=(",", ":")) + "\n" for row in rows(read_rows(workdir / f"{name}.jsonl")))
    (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
  for name in ("config", "summary"):
    content = json.loads((workdir / f"{name}.json").read_text("utf-8"))
    public = {key: value for key, value in content.items() if key not in _PRIVATE}
    (folder / f"{name}.json").write_text(json.dumps(public, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")
  return sum(path.stat().st_size for path in folder.iterdir())


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line and returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m experiments.notebooks.keep_log", description="Reduces the log of a run to what the lectures read."
  )
  parser.add_argument("workdir", type=pathlib.Path, metavar="WORKDIR", help="folder of a finished run")
  parser.add_argument("name", nargs="?", metavar="NAME", help="name of the log; default: the name of WORKDIR")
  parser.add_argument("--texts", action="store_true", help="also keep some responses")
  args = parser.parse_args(argv)
  name = args.workdir.resolve().name if args.name is None else args.name
  problem = ""
  if not (args.workdir / "summary.json").is_file():
    problem = f"WORKDIR: found {args.workdir}, expected the folder of a finished run, with a summary.json"
  elif pathlib.PurePath(name).name != name:
    problem = f"NAME: found {name!r}, expected a plain name such as gspo-0"
  if problem:
    print(f"error: {problem}", file=sys.stderr)
    return 2
  size = keep(args.workdir, LOGS / name, texts=args.texts)
  print(f"experiments/notebooks/logs/{name}: {size / 1e3:.0f} kB")
  return 0


if __name__ == "__main__":
  sys.exit(main())
