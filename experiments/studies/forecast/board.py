"""Leaderboard of every objective in every condition, including those of `entry.py`."""

import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from experiments import judging
from experiments.ablations.routing_replay.measures import where
from experiments.claims.study import read_trials
from experiments.studies.forecast import complete, protocol

PAGE = "LEADERBOARD.md"

HEAD = """\
# Objectives in every condition

Made by `python -m experiments.studies.forecast --status`. Area under the held-out accuracy curve
minus GRPO's in points, with Student's 95 % interval over the paired seeds; T are tokens of a
response, N updates of each rollout batch. A condition is shown once all its trials are done, and
only with several updates: with one, no gate can act, and what differs are weights and learning
rates. `grpo again` is GRPO with other samples, that is, noise. The order is that of the mean rank.
[How to enter](README.md#enter-an-objective), [protocol](README.md).

**No difference is marked as decided.** Each objective has the pair of learning rate and width, of
eight, that was best on two seeds. Two seeds hardly tell these pairs apart, and the last row is the
share of the variance between the objectives' means that goes with their pairs. A row that would
show this noise, GRPO with the pair that other tuning seeds choose, has not been run.

"""

PAIRS = "explained by the pairs"
"""Name of the last row."""


def write(folder: pathlib.Path, trials: Sequence[Mapping]) -> pathlib.Path:
  """Writes the page of the study's trials and of all entries. Returns its path."""
  entries = [row for path in sorted((folder / "entries").glob("*.jsonl")) for row in read_trials(path)]
  path = folder / PAGE
  path.write_text(text([*trials, *entries]))
  return path


def text(trials: Sequence[Mapping]) -> str:
  """Formats the page."""
  rows = where(trials, stage="main")
  cells = [cell for cell in complete.complete(rows) if cell.updates > 1]
  if not cells:
    return HEAD + "No condition is complete yet.\n"
  table: dict[str, dict[protocol.Cell, str]] = {}
  ranks: dict[str, list[int]] = {}
  for cell in cells:
    areas: dict[str, dict[int, float]] = {}
    for row in where(rows, **cell._asdict()):
      areas.setdefault(row["objective"], {})[row["seed"]] = row["area"]
    # An entry may have fewer seeds so far.
    areas = {name: values for name, values in areas.items() if set(protocol.SEEDS) <= values.keys()}
    gaps = {name: judging.paired(values, areas[protocol.BASELINE]) for name, values in areas.items()}
    for name, gap in gaps.items():
      bounds = {bound: 100 * value for bound, value in judging.interval(gap).items()}
      shown = f"{bounds['mean']:+.1f} [{bounds['low']:+.1f}, {bounds['high']:+.1f}]"
      table.setdefault(name, {})[cell] = shown if name != protocol.BASELINE else f"{100 * np.mean(list(areas[name].values())):.1f} %"
    for rank, name in enumerate(sorted(gaps, key=lambda name: -float(np.mean(gaps[name])))):
      ranks.setdefault(name, []).append(rank + 1)
  label = lambda cell: f"T {cell.length}, N {cell.updates}" + (", float8" if cell.mismatch != "none" else "")
  heads = [f"{label(cell)} ({len(protocol.SEEDS)} seeds)" for cell in cells]
  lines = [f"| objective | rate | width, times the paper's | mean rank | {' | '.join(heads)} |", "|" + " --- |" * (4 + len(cells))]
  for name in sorted(table, key=lambda name: float(np.mean(ranks[name]))):
    (first, *_) = where(rows, objective=name)
    shown = " | ".join(table[name].get(cell, "") for cell in cells)
    title = f"{name} (from outside)" if "outside" in first else name
    lines.append(f"| {title} | {first['rate']:.3g} | {first['factor']:.3g} | {np.mean(ranks[name]):.1f} | {shown} |")
  lines.append(f"| {PAIRS} | | | | " + " | ".join(f"{100 * explained(where(rows, **cell._asdict())):.0f} %" for cell in cells) + " |")
  return HEAD + "\n".join([*lines, *_from_outside(rows)]) + "\n"


def _from_outside(rows: Sequence[Mapping]) -> list[str]:
  """Says what each entry is, and how many of its trials are done."""
  entries: dict[str, list[Mapping]] = {}
  for row in rows:
    if "outside" in row:
      entries.setdefault(row["objective"], []).append(row)
  count = lambda name: f"{len(entries[name])} of {len(protocol.main_trials([name]))} trials"
  return ["", "From outside:", "", *(f"- {name}: {own[0]['outside']}; {count(name)}" for name, own in entries.items())] if entries else []


def explained(rows: Sequence[Mapping]) -> float:
  """Computes how much of the variance between objectives goes with their pair of rate and width.

  Args:
    rows: Trials of one condition; those of entries and of GRPO with other samples are left out.

  Returns:
    The share of the sum of squares of the objectives' mean areas that lies between the pairs; NaN
    if all means are equal.
  """
  pairs: dict[tuple[float, float], list[float]] = {}
  for name in protocol.OBJECTIVES:
    mine = where(rows, objective=name)
    pairs.setdefault((mine[0]["rate"], mine[0]["factor"]), []).append(float(np.mean([row["area"] for row in mine])))
  means = np.concatenate([np.array(areas) for areas in pairs.values()])
  total = float(np.sum((means - means.mean()) ** 2))
  return 1 - sum(float(np.sum((np.array(areas) - np.mean(areas)) ** 2)) for areas in pairs.values()) / total if total else math.nan
