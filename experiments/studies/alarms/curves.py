"""What each rule says of the recorded runs: false alarms, warnings and their lead."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.results import rounded
from experiments.studies.alarms import rules

DRAWS = 2000
"""Draws of the seeds behind an interval."""


class Counted(NamedTuple):
  """What a rule says of a run at one limit.

  Attributes:
    seed: Seed of the run.
    begins: RL step at which the run's collapse begins; None if it is healthy.
    steps: RL steps at which the rule holds.
    length: Number of RL steps.
  """

  seed: int
  begins: int | None
  steps: np.ndarray
  length: int


def judge(runs: Sequence[Mapping]) -> dict[str, Any]:
  """Judges every rule.

  Returns:
    `runs`, how many there are of each outcome, and of each arm; `rules`, for each of them its
    `curve` on all, the tuning and the confirming seeds, its `decision` and its `limit`.
  """
  outcomes = [rules.outcome(run["accuracy"]) for run in runs]
  kinds = {kind: sum(outcome.kind == kind for outcome in outcomes) for kind in ("collapsed", "healthy", "neither")}
  late = [outcome for outcome in outcomes if outcome.kind == "collapsed" and outcome.begins > rules.LATE]
  arms = {}
  for run, outcome in zip(runs, outcomes, strict=True):
    arms.setdefault(run["arm"], dict.fromkeys(kinds, 0))[outcome.kind] += 1
  judged = {}
  for name, rule in rules.RULES.items():
    parts = {"all": lambda seed: True, "tuning": lambda seed: seed in rules.TUNING, "confirming": lambda seed: seed not in rules.TUNING}
    pairs = list(zip(runs, outcomes, strict=True))
    curve = {part: curve_of(name, [pair for pair in pairs if chosen(pair[0]["seed"])]) for part, chosen in parts.items()}
    decision, limit = rules.decide(curve, rule.default)
    judged[name] = {"field": rule.field, "default": rule.default, "decision": decision, "limit": limit, "curve": curve}
  seeds = sorted({run["seed"] for run in runs})
  return {"runs": kinds | {"late": len(late), "seeds": seeds, "steps": len(runs[0]["actor/loss"])}, "arms": arms, "rules": judged}


def curve_of(name: str, runs: Sequence[tuple[Mapping, rules.Outcome]]) -> list[dict[str, float]]:
  """Returns the numbers of a rule at each of its limits, with intervals over the seeds."""
  is_late = lambda outcome: outcome.kind == "collapsed" and outcome.begins > rules.LATE
  kept = [(run, outcome) for run, outcome in runs if outcome.kind == "healthy" or is_late(outcome)]
  if len({outcome.kind for _, outcome in kept}) < 2:
    return []
  scores = [rules.scores(name, run[rules.RULES[name].metric]) for run, _ in kept]
  rows = []
  for limit in rules.RULES[name].limits:
    counted = [
      Counted(run["seed"], outcome.begins, rules.firing(name, score, limit), len(score))
      for (run, outcome), score in zip(kept, scores, strict=True)
    ]
    rows.append(rounded({"limit": limit} | numbers(counted)))
  return rows


def numbers(counted: Sequence[Counted]) -> dict[str, Any]:
  """Returns a rule's numbers at one limit.

  Returns:
    `false_alarms` per 1,000 healthy steps; `warned`, the share of the collapses before which it
    warns; `by_chance`, the share of healthy runs in which it holds in the same steps, averaged over
    the collapses; `gain`, the difference; each with the ends of its 95 % interval; and `lead`, the
    median number of steps by which a warning comes before its collapse.

  Example:
    >>> runs = [Counted(0, 40, np.array([30]), 80), Counted(0, None, np.array([30, 70]), 80)]
    >>> {name: x for name, x in numbers(runs).items() if name in ("false_alarms", "warned", "by_chance", "lead")}
    {'false_alarms': 25.0, 'warned': 1.0, 'by_chance': 1.0, 'lead': 10.0}
  """
  collapsed, healthy = [x for x in counted if x.begins], [x for x in counted if not x.begins]
  alarms = np.array([rules.begins(x.steps) for x in healthy], float)
  lengths = np.array([x.length for x in healthy], float)
  leads = [rules.leads(x.steps, x.begins) for x in collapsed]
  warned = np.array([lead is not None for lead in leads], float)
  # Whether the rule holds in each healthy run in the steps before each collapse.
  same = np.array([[rules.leads(x.steps, at.begins) is not None for x in healthy] for at in collapsed], float)
  seeds = sorted({x.seed for x in counted})
  rng, of_seed = np.random.default_rng(0), {seed: i for i, seed in enumerate(seeds)}
  place = lambda runs: np.array([of_seed[x.seed] for x in runs])
  in_collapsed, in_healthy = place(collapsed), place(healthy)
  drawn = rng.multinomial(len(seeds), np.full(len(seeds), 1 / len(seeds)), size=DRAWS)
  weights = np.concatenate([np.ones((1, len(seeds))), drawn])  # The first row is the data itself.
  of_collapsed, of_healthy = weights[:, in_collapsed], weights[:, in_healthy]
  usable = (of_collapsed.sum(axis=1) > 0) & (of_healthy.sum(axis=1) > 0)
  of_collapsed, of_healthy = of_collapsed[usable], of_healthy[usable]
  out = {
    "false_alarms": 1000 * (of_healthy @ alarms) / (of_healthy @ lengths),
    "warned": (of_collapsed @ warned) / of_collapsed.sum(axis=1),
    "by_chance": ((of_collapsed @ same) * of_healthy).sum(axis=1) / of_collapsed.sum(axis=1) / of_healthy.sum(axis=1),
  }
  out["gain"] = out["warned"] - out["by_chance"]
  row = {}
  for name, values in out.items():
    low, high = np.quantile(values[1:], (0.025, 0.975))
    row |= {name: float(values[0]), f"{name}_low": float(low), f"{name}_high": float(high)}
  known = [lead for lead in leads if lead is not None]
  early = np.mean([lead is not None and lead >= 10 for lead in leads])
  row |= {"warned_by_10": float(early), "lead": float(np.median(known)) if known else None}
  return row | {"collapses": len(collapsed), "healthy": len(healthy)}


def at(rule: Mapping, limit: float, part: str = "all") -> dict[str, Any]:
  """Returns the numbers of a judged rule at one limit."""
  return next(row for row in rule["curve"][part] if row["limit"] == limit)


def lines(results: Mapping[str, Any]) -> str:
  """Formats the results as the command prints them, a line for each rule and limit that matters."""
  kinds = results["runs"]
  out = [
    f"{kinds['collapsed']} collapses ({kinds['late']} later than step {rules.LATE}), {kinds['healthy']} healthy runs, "
    f"{kinds['neither']} neither; {kinds['steps']} RL steps each, seeds {kinds['seeds'][0]} to {kinds['seeds'][-1]}"
  ]
  for name, rule in results["rules"].items():
    for limit in dict.fromkeys(x for x in (rule["default"], rule["limit"]) if x is not None):
      row = at(rule, limit)
      lead = "no warning" if row["lead"] is None else f"lead {row['lead']:g} steps"
      out.append(
        f"{name} at {limit:g}: {row['false_alarms']:.2f} false alarms per 1,000 steps "
        f"[{row['false_alarms_low']:.2f}, {row['false_alarms_high']:.2f}], "
        f"warns of {row['warned']:.0%} [{row['warned_low']:.0%}, {row['warned_high']:.0%}], by chance {row['by_chance']:.0%}, {lead}"
      )
    out.append(f"{name}: {rule['decision']}" + ("" if rule["limit"] is None else f" ({rule['limit']:g})"))
  return "\n".join(out)
