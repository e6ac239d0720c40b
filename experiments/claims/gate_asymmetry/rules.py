"""The rules that say what counts as reproduced. Written before the measured run, and not changed after it.

Looked at beforehand: GRPO alone on a pilot seed (100, not among the seeds of the run) at the learning rates 1e-3, where it learnt, and
2e-3 and more, where it fell apart. Of SAPO nothing. The paper's temperatures differ by 0.05, which these trials could not tell from
nothing: only the exaggerated pairs (tau_pos, tau_neg) = (1, 2), (1, 1) and (2, 1) are judged, at 16 updates a rollout batch, at a rate at
which GRPO learnt and at a hot one. A pair whose numbers differ is sharp on one side; (1, 2) is the paper's direction.

Differences are paired: a seed has one warm start, one order of problems and one set of keys. Accuracy passes if both intervals lie where
the rule says: the hierarchical bootstrap's over seeds and problems, and Student's over the seeds. Nothing is corrected for the number of
rules. A verdict is "mechanism not engaged" where the policy stays so near to the one that drew the batch that no gate has anything to do:
the mean over the trials of the largest k3 KL of an update is below `MOVED`; and for collapses, also where no trial collapses.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.claims.bed import Arm
from experiments.claims.intervals import difference, interval, solved, verdict

SEEDS = (0, 1, 2, 3, 4)
PAIRS = {"neg sharper": (1.0, 2.0), "equal": (1.0, 1.0), "pos sharper": (2.0, 1.0)}
PER_ROLLOUT = 16
RATES = {"hot": 2e-3, "mild": 1e-3}
MOVED = 0.01
"""Nats a token: at r = 1.15 a gate of temperature 2 is at 0.98."""

TINY = 1e-12  # A smoke run may have no gradient at all.

Rows = Sequence[Mapping]


def arms() -> list[tuple[dict, Arm]]:
  """Every pair at every rate."""
  return [
    (
      {"gates": name, "rate": rate},
      Arm("sapo", (("tau_pos", pos), ("tau_neg", neg)), per_rollout=PER_ROLLOUT, learning_rate=RATES[rate]),
    )
    for name, (pos, neg) in PAIRS.items()
    for rate in RATES
  ]


def judge(trials: Rows) -> dict[str, dict]:
  """All verdicts, each with its rule in words and the numbers that decided."""
  found = {}
  for rate in RATES:
    mine = [row for row in trials if row["rate"] == rate]
    engaged = float(np.mean([row["kl"] for row in mine if row["kl"] is not None])) >= MOVED
    at = lambda gates, mine=mine: solved(mine, gates=gates)
    for less in ("pos sharper", "equal"):
      gap = difference(at("neg sharper"), at(less))
      found[f"E15, accuracy above {less}, {rate} rate"] = verdict(
        f"held-out accuracy at the end, gates 'neg sharper' minus '{less}', above 0: both intervals", gap.low > 0, engaged=engaged,
        **gap._asdict(),
      )  # fmt: skip
    found[f"E15, gradients, {rate} rate"] = _gradients(mine, engaged)
    found[f"E15, collapses, {rate} rate"] = _collapses(mine, engaged)
  return found


def _gradients(trials: Rows, engaged: bool) -> dict:
  over = lambda norms: float(np.log((norms[1] + TINY) / (norms[0] + TINY)))
  peak = lambda gates: {row["seed"]: over(row["grad_norm"]) for row in trials if row["gates"] == gates}
  ours, theirs = peak("neg sharper"), peak("pos sharper")
  found = interval([ours[seed] - theirs[seed] for seed in sorted(ours)])
  rule = "log of the largest gradient norm over the median one, gates 'neg sharper' minus 'pos sharper', below 0: the whole interval"
  return verdict(rule, found["high"] < 0, engaged=engaged, interval=found)


def _collapses(trials: Rows, engaged: bool) -> dict:
  count = {gates: sum(row["collapse"] != "" for row in trials if row["gates"] == gates) for gates in PAIRS}
  rule = "at least two seeds fewer show a sign of collapse with the gates 'neg sharper' than with 'pos sharper'"
  return verdict(rule, count["pos sharper"] - count["neg sharper"] >= 2, engaged=engaged and any(count.values()), **{
    name.replace(" ", "_"): value for name, value in count.items()
  }, of=len({row["seed"] for row in trials}))  # fmt: skip
