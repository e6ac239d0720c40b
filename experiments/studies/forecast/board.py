"""Leaderboard of every objective in every condition, including objectives entered by other people.

An entry is a Python file that defines an objective with one width and names its advantages:

  from jaxrl_llm import objectives

  ADVANTAGES = "group"  # Key of experiments.claims.bed.ADVANTAGES.

  def objective(*, factor, length):
    slots = dict(ratio="sequence", gate="soft", weights="sequence_mean")
    return objectives.make("custom", **slots, tau_pos=factor, tau_neg=factor)

It is tuned with the same draws as all other objectives (the protocol sets the learning rate,
`factor` scales the width) and trained on the same seeds. It gets as many updates, responses and
tuning trials as every other row.
"""

import importlib.util
import inspect
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments import judging
from experiments.ablations.routing_replay.measures import where
from experiments.claims.bed import ADVANTAGES
from experiments.claims.study import read_trials
from experiments.studies.forecast import complete, protocol
from jaxrl_llm import objectives
from jaxrl_llm.messages import did_you_mean

PAGE = "LEADERBOARD.md"

HEAD = """\
# Objectives in every condition

Made by `python -m experiments.studies.forecast --status`. Area under the held-out accuracy curve
minus GRPO's in points, with Student's 95 % interval over the paired seeds; T are tokens of a
response, N updates of each rollout batch. A condition is shown once all its trials are done, and
only with several updates: with one, no gate can act, and what differs are weights and learning
rates. `grpo again` is GRPO with other samples, that is, noise. The order is that of the mean rank.
[How to enter](board.py), [protocol](README.md).

**No difference is marked as decided.** Each objective has the pair of learning rate and width, of
eight, that was best on two seeds. Two seeds hardly tell these pairs apart, and the last row is the
share of the variance between the objectives' means that goes with their pairs. A row that would
show this noise, GRPO with the pair that other tuning seeds choose, has not been run.

"""

PAIRS = "explained by the pairs"
"""Name of the last row."""


class Entry(NamedTuple):
  """An objective that a file defines.

  Attributes:
    name: Name of the file, without its suffix.
    advantages: Key of `experiments.claims.bed.ADVANTAGES`.
  """

  name: str
  advantages: str


def enter(path: pathlib.Path) -> Entry:
  """Loads the file of an entry and registers its objective under the file's name.

  Raises:
    ValueError: If the file, its name, its objective or its advantages cannot be used.
  """
  name = path.stem
  if not path.is_file():
    raise ValueError(f"--enter: found no file {path}, expected a Python file with `objective(*, factor, length)`")
  if name in objectives.OBJECTIVES:
    raise ValueError(f"--enter: found {path.name}, the name of an objective of the package, expected another")
  spec = importlib.util.spec_from_file_location(f"entry_{name}", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  make = getattr(module, "objective", None)
  if not callable(make) or set(inspect.signature(make).parameters) != {"factor", "length"}:
    raise ValueError(f"{path}: found no `objective(*, factor, length)`, expected a function that returns an objective")
  advantages = getattr(module, "ADVANTAGES", "group")
  if advantages not in ADVANTAGES:
    hint = did_you_mean(advantages, ADVANTAGES, " (did you mean '{}'?)")
    raise ValueError(f"{path}: ADVANTAGES: found {advantages!r}{hint}, expected one of {', '.join(ADVANTAGES)}")
  if missing := make(factor=1.0, length=8).needs - {"old_logprobs", "sampler_logprobs"}:
    raise ValueError(f"{path}: the objective needs {', '.join(sorted(missing))}, expected no more than old_logprobs and sampler_logprobs")
  objectives.OBJECTIVES[name] = make
  return Entry(name, advantages)


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
    lines.append(f"| {name} | {first['rate']:.3g} | {first['factor']:.3g} | {np.mean(ranks[name]):.1f} | {shown} |")
  lines.append(f"| {PAIRS} | | | | " + " | ".join(f"{100 * explained(where(rows, **cell._asdict())):.0f} %" for cell in cells) + " |")
  return HEAD + "\n".join(lines) + "\n"


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
