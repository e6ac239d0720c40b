"""The rules that say what the study found, by the verdicts of `experiments.judging`. Committed before its first trial.

Outcome: area under the held-out accuracy curve, the mean of its six evaluations after the start. In
each condition every objective is compared with GRPO, paired by seed: Student's interval, Holm over all
objectives of the condition, equality within `protocol.MARGIN`. GRPO once more with other samples is
one of them, and has to come out equal or inconclusive.

The forecast of a published pair is the sign of the difference of the two objectives' mean areas in the
nearest condition (`cell_of`). All pairs of `published.json` count, which was committed with these
rules: of 179 comparisons that were found, the first of each paper and pair of objectives that are run
here, 46 from 18 papers and one run of practitioners. The paper's own method wins every one in which it
appears, so those between two methods of others are scored apart.

  FORECAST           The share of pairs that are forecast right is above one half. Its p-value is the
                     share of 10,000 permutations of the objectives' names, the same in all conditions,
                     that do as well: a permuted study has ranked at random, with the same ties between
                     pairs and papers.
  FORECAST, neutral  The same of the pairs in which neither method is the paper's own. Exploratory.
  FORECAST, pure     The same without pairs in which one side has routing replay or dynamic sampling and
                     the other has not. Exploratory.

What would change our mind: a p-value above 0.05 says that these beds do not forecast. A share of right
forecasts that holds up at 8 tokens as well as at 64 says that length is not what matters. A forecast
that is right only where the published gap is above 10 points says that the beds see collapses alone.
"""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from experiments import judging
from experiments.ablations.routing_replay.measures import where
from experiments.studies.forecast import protocol
from experiments.studies.forecast.protocol import AGAIN, BASELINE, Cell

PUBLISHED = pathlib.Path(__file__).parent / "published.json"
PERMUTATIONS = 10_000
REPLACED_UPDATES = 8
"""Updates of a rollout batch for a source that names neither them nor a lag."""


def judge(results: Mapping) -> dict[str, dict]:
  """The verdicts of `results.json`, each with its rule in words and the numbers that decided."""
  rows, verdicts = where(results["trials"], stage="main"), {}
  for cell in dict.fromkeys(Cell(row["length"], row["updates"], row["mismatch"]) for row in rows):
    mine = where(rows, **cell._asdict())
    names = dict.fromkeys(row["objective"] for row in mine)
    areas = {name: {row["seed"]: row["area"] for row in where(mine, objective=name)} for name in names}
    if BASELINE in areas:
      verdicts |= _compared(cell, areas)
  areas, pairs = mean_areas(rows), json.loads(PUBLISHED.read_text())
  verdicts["FORECAST"] = forecast(areas, pairs)
  verdicts["FORECAST, neutral"] = forecast(areas, [pair for pair in pairs if not pair["own_method"]])
  verdicts["FORECAST, pure"] = forecast(areas, [pair for pair in pairs if not pair["impure"]])
  return verdicts


def _compared(cell: Cell, areas: Mapping[str, Mapping[int, float]]) -> dict[str, dict]:
  """Every objective of a condition against GRPO."""
  at = f"T {cell.length}, N {cell.updates}" + (f", {cell.mismatch}" if cell.mismatch != "none" else "")
  gaps = {name: judging.paired(values, areas[BASELINE]) for name, values in areas.items() if name != BASELINE}
  gaps = {name: gap for name, gap in gaps.items() if len(gap) > 1}
  rule = "area under the held-out accuracy curve, minus GRPO's, above 0"
  found = {name: judging.above(rule, gap) for name, gap in gaps.items()}
  adjusted = judging.holm({name: row["p"] for name, row in found.items()})
  for name, row in found.items():
    row["p_holm"] = adjusted[name]
    if row["verdict"] != judging.INCONCLUSIVE and adjusted[name] >= judging.ALPHA:
      row["verdict"] = judging.INCONCLUSIVE
    row["equal"] = row["interval"]["low"] > -protocol.MARGIN and row["interval"]["high"] < protocol.MARGIN
  return {f"{at}: {name} above {BASELINE}": row for name, row in found.items()}


def mean_areas(rows: Sequence[Mapping]) -> dict[Cell, dict[str, float]]:
  """Mean area of every objective in every condition that has been run."""
  found: dict[Cell, dict[str, list[float]]] = {}
  for row in rows:
    if row["objective"] != AGAIN:
      cell = Cell(row["length"], row["updates"], row["mismatch"])
      found.setdefault(cell, {}).setdefault(row["objective"], []).append(row["area"])
  return {cell: {name: float(np.mean(areas)) for name, areas in names.items()} for cell, names in found.items()}


def cell_of(pair: Mapping) -> Cell:
  """The condition in which a published pair is forecast.

  It has 64 tokens, the updates that are nearest in logarithms to those of the source or to its fixed
  lag, and a float8 sampler where the source names the mismatch of two engines: k3 is about 1e-3 there,
  as it is between the engines of large models.

  Example:
    >>> cell_of({"updates_per_rollout": None, "staleness_updates": 256, "mismatch_noted": None})
    Cell(length=64, updates=64, mismatch='none')
    >>> cell_of({"updates_per_rollout": 4, "staleness_updates": None, "mismatch_noted": "vLLM sampler"})
    Cell(length=64, updates=8, mismatch='float8')
  """
  updates = pair["updates_per_rollout"] or pair["staleness_updates"] or REPLACED_UPDATES
  nearest = min(protocol.UPDATES, key=lambda count: abs(math.log2(count / updates)))
  return Cell(64, nearest, "float8" if pair["mismatch_noted"] else "none")


def forecast(areas: Mapping[Cell, Mapping[str, float]], pairs: Sequence[Mapping]) -> dict:
  """How many published pairs are forecast right, and how many would be by chance.

  Args:
    areas: Mean area of every objective in every condition.
    pairs: Rows of `published.json`.

  Returns:
    A row of "verdicts": `right` and `of` count pairs, `share` is their quotient, `by_paper` the mean share over papers, `p` the share of
    permutations that do as well, and `waiting` the pairs whose condition has not been run.
  """
  rule = "share of published pairs that are forecast right, above one half, against permuted names"
  decided = [pair for pair in pairs if pair["winner"]]
  known = [pair for pair in decided if {pair["winner"], pair["loser"]} <= set(areas.get(cell_of(pair), ()))]
  row = {"rule": rule, "of": len(known), "waiting": len(decided) - len(known), "published_ties": len(pairs) - len(decided)}
  if not known:
    return {"verdict": judging.NOT_ENGAGED} | row | {"right": 0}
  names = sorted({name for pair in known for name in (pair["winner"], pair["loser"])})
  index = {name: place for place, name in enumerate(names)}
  cells = [np.array([areas[cell_of(pair)].get(name, np.nan) for name in names]) for pair in known]
  winners, losers = ([index[pair[key]] for pair in known] for key in ("winner", "loser"))

  def rights(order: np.ndarray) -> np.ndarray:
    return np.array([cell[order[w]] > cell[order[x]] for cell, w, x in zip(cells, winners, losers, strict=True)])

  right, rng = rights(np.arange(len(names))), np.random.default_rng(0)
  p = float(np.mean([rights(rng.permutation(len(names))).sum() >= right.sum() for _ in range(PERMUTATIONS)]))
  papers = {}
  for pair, hit in zip(known, right, strict=True):
    papers.setdefault(pair["source"].split(",")[0], []).append(hit)
  share = float(right.mean())
  verdict = judging.REPRODUCED if share > 0.5 and p < judging.ALPHA else judging.INCONCLUSIVE
  by_paper = float(np.mean([np.mean(hits) for hits in papers.values()]))
  return {"rule": rule, "verdict": verdict, "right": int(right.sum()), "share": share, "by_paper": by_paper, "p": p} | row
