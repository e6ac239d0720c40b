"""Computes the shapes of all objectives, judges them by `rules.py`, and draws the figures.

  python -m experiments.ablations.objective_shapes
  python -m experiments.ablations.objective_shapes --format pdf

Results are written to `results.json` beside this file, and figures to `figures/`. The study takes
about two minutes on one core.
"""

import argparse
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from experiments import judging, provenance
from experiments.ablations.objective_shapes import figures, rules, studies
from experiments.ablations.ratio_lab import bed as beds
from experiments.results import rounded, to_json
from jaxrl_llm import objectives

HERE = pathlib.Path(__file__).parent


def measure(
  sizes: beds.Sizes, names: Sequence[str], *, points: int, sequences: int, made_up: int, num_tokens: int, seeds: Sequence[int]
) -> tuple[dict, dict]:
  """Runs all studies.

  Args:
    sizes: Sizes of the bed.
    names: Objectives whose shapes and zeros are computed.
    points: Number of points of each curve C(r).
    sequences: Number of sequences in the study of zeros.
    made_up: Number of made-up sequences in the study of the smooth limit.
    num_tokens: Length of the bed's responses, in tokens.
    seeds: Seeds of the bed.

  Returns:
    The contents of `results.json`, and the arrays that only the figures need.
  """
  started = time.process_time()
  by_seed, cosines = [], []
  for seed in seeds:
    bed, snapshots = studies.bed_snapshots(sizes, seed, num_tokens=num_tokens)
    by_seed.append(snapshots)
    cosines += studies.cosines(bed, snapshots, seed)
  snapshots = by_seed[0]
  shown = next(snapshot for snapshot in snapshots if snapshot.updates == studies.SHOWN_UPDATES)
  variant = {"float32": studies.token_variant()}
  fractions = studies.zero_mass(names, sequences)  # In float32, as in training.
  with jax.enable_x64(True):
    variant["float64"] = studies.token_variant()
    curves = studies.shapes(points, names)
    variation = studies.variation(shown.log_ratio, shown.batch.advantages[:, -1])
    made = studies.smooth_limit(studies.made_up_sequences(made_up))
    # A group has the snapshots of all seeds after the same number of updates.
    real = {
      group[0].updates: studies.smooth_limit(np.concatenate([snapshot.log_ratio for snapshot in group]))
      for group in zip(*by_seed, strict=True)
    }
    retained = studies.outliers()
    example = studies.hand_example()

  limits = [made, *real.values()]
  # The bound is tight in the limit of small spreads, where both sides are of the order of rounding
  # errors.
  above = lambda limit, value, bound: int(np.sum(limit[value] > limit[bound] * (1 + 1e-9) + 1e-14))
  results: dict[str, Any] = {
    "jax": jax.__version__,
    "provenance": provenance.record(rules),
    "E2": variant,
    "E3": {
      "updates": studies.SHOWN_UPDATES,
      "std_z": float(np.std(shown.log_ratio)),
      "grpo_median": float(np.median(variation["grpo_variation"])),
      "grpo_largest": float(np.max(variation["grpo_variation"])),
      "gspo_largest": float(np.max(variation["gspo_variation"], initial=0.0)),
      "grpo_clipped_tokens": float(np.mean(variation["grpo"] == 0)),
      "gspo_clipped_tokens": float(np.mean(variation["gspo"] == 0)),
    },
    "E12": {"spreads": list(studies.SPREADS), "fractions": fractions},
    "E13": {
      "sequences": int(sum(len(limit["variance"]) for limit in limits)),
      "violations": sum(above(limit, "difference", "bound") for limit in limits),
      "largest_over_bound": max(float(np.max(limit["difference"] / limit["bound"])) for limit in limits),
      "swap_violations": sum(above(limit, "swap", "swap_bound") for limit in limits),
      "share_below_0.02": {str(updates): float(np.mean(limit["variance"] < 0.02)) for updates, limit in real.items()},
      "largest_difference": {str(updates): float(np.max(limit["difference"])) for updates, limit in real.items()},
      "cosines": cosines,
      "hand_example": example,
    },
    "E14": retained | {"counts": list(studies.OUTLIER_COUNTS)},
    "maxima": {name: [float(np.max(curve["positive"])), float(np.max(curve["negative"]))] for name, curve in curves.items()},
  }
  results["processor_seconds"] = time.process_time() - started
  results = rounded(results)
  return results | {"verdicts": rounded(rules.judge(results))}, {"curves": curves, "variation": variation, "made": made, "real": real}


def main(argv: Sequence[str] | None = None) -> None:
  """Parses the command line, computes, writes and draws."""
  parser = argparse.ArgumentParser(prog="python -m experiments.ablations.objective_shapes", description=__doc__.splitlines()[0])
  parser.add_argument("--folder", type=pathlib.Path, default=HERE, help="folder of results.json and figures/")
  parser.add_argument("--format", nargs="+", choices=("png", "pdf", "svg"), default=["png"])
  parser.add_argument("--smoke", action="store_true", help="use tiny sizes to show that the study runs; the measurements are meaningless")
  args = parser.parse_args(argv)
  if args.smoke:
    names, sizes = ("grpo", "gspo", "sapo", "dppo_tv", "sft"), dict(points=30, sequences=8, made_up=6, num_tokens=8, seeds=(0,))
    results, arrays = measure(beds.SMOKE, names, **sizes)
  else:
    sizes = dict(points=1193, sequences=512, made_up=3000, num_tokens=studies.NUM_TOKENS, seeds=studies.BED_SEEDS)
    results, arrays = measure(beds.Sizes(), tuple(objectives.OBJECTIVES), **sizes)
  args.folder.mkdir(parents=True, exist_ok=True)
  (args.folder / "results.json").write_text(to_json(results))
  print(judging.lines(results["verdicts"]))
  figures.draw(results, arrays, args.folder / "figures", args.format)


if __name__ == "__main__":
  main()
