"""The rules that say what counts as reproduced, by the verdicts of `experiments.judging`.

Looked at before the run of 2026-11-21: one pilot seed (100, not among the seeds of the run) at
lengths 16, 64 and 256 and learning rates 1e-4, 3e-4 and 1e-3, to find learning rates at which
GRPO's clip binds at all. The rule of E1 is older than the pilot.

Changed on 2026-11-25, when the results were known: the five verdicts; and E1's main rule is that of
the paper's number of updates or fewer. The one without a limit is decided by cells in which GRPO
itself clips 4.8 % and more.
"""

from collections.abc import Mapping, Sequence

from experiments.ablations.ratio_lab.measures import clip_table, slopes
from experiments.judging import above, below, holds, within

SEEDS = (0, 1, 2, 3, 4)
CONFIRMATORY = {"E1": "E1, up to 4 updates", "E4": "E4, std(s)"}
"""The one rule of each claim that a verdict is read from; all others are exploratory."""
LENGTHS = (8, 16, 32, 64, 128, 256)
UPDATES = (1, 2, 4, 8, 16)
LEARNING_RATE = 3e-4
OTHER_LEARNING_RATES = (1e-4, 1e-3)
OTHER_AT = 64  # The length at which the other learning rates are run.

PAPER_UPDATES = 4
"""Updates of a rollout batch in the paper's run: where the slopes are judged."""

E1_FACTOR = 10.0
MATCHED_FACTOR = 3.0
HALF = (-0.6, -0.4)
"""Where the whole interval of a slope must lie to count as -1/2: a wide interval proves nothing."""


def judge(results: Mapping) -> dict[str, dict]:
  """The verdicts of `results.json`, each with its rule in words and the numbers that decided.

  Args:
    results: `runs`, a row for each seed, length, learning rate and number of updates, trained at
      that length; `prefixes`, one for each seed, number of updates and length, of the first tokens
      of the longest responses: one policy, all lengths; `drifts`, the same for log-ratios with a
      drift made by hand, with its `kind`.
  """
  runs, prefixes, drifts = (results[name] for name in ("runs", "prefixes", "drifts"))
  table = clip_table(runs)
  paper = [cell for cell in table if cell["band"] != "gspo_matched"]
  matched = [cell for cell in table if cell["band"] == "gspo_matched"]
  at_paper = [row for row in prefixes if row["updates"] == PAPER_UPDATES]
  line = {name: slopes(at_paper, name) for name in ("std_log_s", "std_s", "var_rho", "ess_tokens", "ess_sequences")}
  line["max_r"] = slopes([row | {"max_r": row["mean_max_r"] - 1} for row in at_paper], "max_r")
  drift = {
    kind: slopes([row for row in drifts if row["kind"] == kind and row["updates"] == PAPER_UPDATES], "std_log_s")
    for kind in ("independent", "autoregressive", "shared")
  }
  return {
    "E1": _factor(
      "GSPO's clipped fraction is at least 10 times GRPO's in every cell (length, learning rate, updates, band x0.3, x1, x3) with both "
      "above 0",
      paper, lambda ratio: ratio >= E1_FACTOR,
    ),
    "E1, up to 4 updates": _factor(
      "the same, in the cells with the paper's number of updates or fewer",
      [cell for cell in paper if cell["updates"] <= PAPER_UPDATES], lambda ratio: ratio >= E1_FACTOR,
    ),
    "E1, bands of equal width": _factor(
      "with GRPO's band over sqrt(T) for GSPO, the two fractions are within a factor of 3 in every cell with both above 0: the gap is the "
      "width of the band, not the level of the ratio",
      matched, lambda ratio: 1 / MATCHED_FACTOR <= ratio <= MATCHED_FACTOR,
    ),
    "E4, std(log s)": _half(line["std_log_s"]),
    "E4, std(s)": _half(line["std_s"]),
    "E4, Var(rho), at least linear": above("slope against the length in logarithms, above 0.8", line["var_rho"], 0.8),
    "E4, mean over responses of max r, minus 1": above("slope against the length in logarithms, above 0", line["max_r"]),
    "E4, ESS of sequences": below("slope against the length in logarithms, below 0", line["ess_sequences"]),
    "E4, ESS of tokens": within("slope against the length in logarithms, between -0.02 and 0.02", line["ess_tokens"], -0.02, 0.02),
    "E4, control: independent drift": _half(drift["independent"]),
    "E4, -1/2 fails for autoregressive drift": above(f"slope against the length, above {HALF[1]}", drift["autoregressive"], HALF[1]),
    "E4, -1/2 fails for a shared drift": above(f"slope against the length, above {HALF[1]}", drift["shared"], HALF[1]),
  }  # fmt: skip


def _factor(rule: str, cells: Sequence[Mapping], passes) -> dict:
  ratios = [cell["ratio"] for cell in cells if cell["ratio"] is not None]
  passed = sum(map(passes, ratios))
  numbers = dict(cells=len(cells), decided=len(ratios), passed=passed) | (dict(smallest=min(ratios), largest=max(ratios)) if ratios else {})
  return holds(rule, passed == len(ratios), engaged=bool(ratios), **numbers)


def _half(slopes: Sequence[float]) -> dict:
  return within(f"slope against the length in logarithms, between {HALF[0]} and {HALF[1]}", slopes, *HALF)
