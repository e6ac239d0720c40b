"""Runs the ratio lab, judges it by `rules.py`, and draws its figures.

  python -m experiments.ablations.ratio_lab
  python -m experiments.ablations.ratio_lab --plot_only --format pdf

Results are written to `results.json` beside this file, and figures to `figures/`. Seeds run one
after the other. The study takes about 7 minutes on one core.
"""

import argparse
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np

from experiments import judging, provenance
from experiments.ablations.ratio_lab import bed as beds
from experiments.ablations.ratio_lab import figures, measures, rules
from experiments.results import from_json, rounded, to_json

HERE = pathlib.Path(__file__).parent


def measure_seed(
  bed: beds.Bed, seed: int, *, lengths: Sequence[int], updates: tuple[int, ...], runs: Sequence[tuple[int, float]]
) -> dict[str, list[dict]]:
  """Makes all measurements of one seed.

  Args:
    bed: Bed with the model.
    seed: Seed of the language, the weights, the samples and the drifts.
    lengths: Lengths of the prefixes, up to the length of the responses of the first run.
    updates: Numbers of updates after which the policy is measured, rising.
    runs: Length of the responses and learning rate of each run. Prefixes are measured in the first
      run.

  Returns:
    Rows of the tables `runs`, `prefixes` and `drifts`, as `rules.judge` expects them.
  """
  language = beds.make_language(bed.sizes.vocab_size, np.random.default_rng([seed, 0]))
  params = beds.warm_params(bed, language, seed)
  tables: dict[str, list[dict]] = {"runs": [], "prefixes": [], "drifts": []}
  for index, (num_tokens, learning_rate) in enumerate(runs):
    key = jax.random.fold_in(jax.random.key(seed), index)
    settings = dict(num_tokens=num_tokens, learning_rate=learning_rate, measure_at=updates, key=key)
    for snapshot in beds.snapshots(bed, language, params, **settings):
      at = {"seed": seed, "updates": snapshot.updates}
      advantages = snapshot.batch.advantages[:, -1]
      statistics = measures.ratio_statistics(snapshot.log_ratio) | measures.clip_fractions(snapshot.log_ratio, advantages)
      gap = {"sampler_gap": snapshot.sampler_gap}
      tables["runs"].append(at | {"tokens": num_tokens, "learning_rate": learning_rate} | statistics | gap)
      if index == 0:
        tables["prefixes"] += [
          at | {"tokens": length} | measures.ratio_statistics(snapshot.log_ratio[:, :length]) for length in lengths
        ]
        if snapshot.updates == rules.PAPER_UPDATES:
          for kind in ("independent", "autoregressive", "shared"):
            drifted = measures.with_drift(snapshot.log_ratio, kind, np.random.default_rng([seed, 2]))
            for length in lengths:
              std_log_s = float(np.std(np.mean(drifted[:, :length], axis=1), ddof=1))
              tables["drifts"].append(at | {"kind": kind, "tokens": length, "std_log_s": std_log_s})
  return tables


def measure(sizes: beds.Sizes, seeds: Sequence[int], *, lengths: Sequence[int], updates: tuple[int, ...], runs: Sequence[tuple]) -> dict:
  """Measures all seeds and judges them."""
  bed = beds.make_bed(sizes)
  rows: dict[str, list[dict]] = {"runs": [], "prefixes": [], "drifts": []}
  started, recorded = time.process_time(), provenance.record(rules)
  for seed in seeds:
    for name, table in measure_seed(bed, seed, lengths=lengths, updates=updates, runs=runs).items():
      rows[name] += table
    print(f"seed {seed}: {time.process_time() - started:.0f} s of processor time so far", flush=True)
  results = {
    "sizes": sizes._asdict(),
    "seeds": list(seeds),
    "jax": jax.__version__,
    "processor_seconds": time.process_time() - started,
    "provenance": recorded,
    "verdicts": {},
    **rows,
  }
  results = rounded(results)
  return results | {"verdicts": rounded(rules.judge(results))}


def main(argv: Sequence[str] | None = None) -> None:
  """Parses the command line, measures, writes and draws."""
  parser = argparse.ArgumentParser(prog="python -m experiments.ablations.ratio_lab", description=__doc__.splitlines()[0])
  parser.add_argument("--folder", type=pathlib.Path, default=HERE, help="folder of results.json and figures/")
  parser.add_argument("--format", nargs="+", choices=("png", "pdf", "svg"), default=["png"])
  parser.add_argument("--plot_only", action="store_true", help="draw results.json without measuring")
  parser.add_argument("--smoke", action="store_true", help="use tiny sizes to show that the study runs; the measurements are meaningless")
  args = parser.parse_args(argv)
  path = args.folder / "results.json"
  if not args.plot_only:
    if args.smoke:
      results = measure(beds.SMOKE, (0, 1), lengths=(4, 8), updates=(1, 4), runs=((8, rules.LEARNING_RATE),))
    else:
      runs = [(length, rules.LEARNING_RATE) for length in sorted(rules.LENGTHS, reverse=True)]
      runs += [(rules.OTHER_AT, learning_rate) for learning_rate in rules.OTHER_LEARNING_RATES]
      results = measure(beds.Sizes(), rules.SEEDS, lengths=rules.LENGTHS, updates=rules.UPDATES, runs=runs)
    args.folder.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(results))
  results = from_json(path.read_text())
  print(judging.lines(results["verdicts"]))
  figures.draw(results, args.folder / "figures", args.format)


if __name__ == "__main__":
  main()
