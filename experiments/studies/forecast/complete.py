"""Verdicts that may be read: those of conditions whose trials are all done.

`rules.py` judges whatever trials it is given, and is kept as it was committed before the first one.
A score that is read from a part of the seeds, and read again after each resumed command, would be
looked at until it pleases. A seed whose imitation fails keeps its conditions incomplete: which
seeds count then is a decision that has to be written down before the score is read.
"""

import json
from collections.abc import Mapping, Sequence

from experiments.ablations.routing_replay.measures import where
from experiments.studies.forecast import protocol, rules

SCORES = ("FORECAST", "FORECAST, neutral", "FORECAST, pure")
"""Verdicts that use several conditions at once, the main one first."""


def needed() -> set[tuple[str, int]]:
  """Returns the objective and seed of every trial that each condition needs."""
  return {(name, seed) for name in (*protocol.OBJECTIVES, protocol.AGAIN) for seed in protocol.SEEDS}


def done(rows: Sequence[Mapping], cell: protocol.Cell) -> int:
  """Counts the trials of a condition that it needs and that are done."""
  run = {(row["objective"], row["seed"]) for row in where(rows, stage="main", **cell._asdict())}
  return len(run & needed())


def complete(rows: Sequence[Mapping]) -> list[protocol.Cell]:
  """Lists the conditions whose trials are all done, in the order of the protocol."""
  return [cell for block in protocol.BLOCKS for cell in block if done(rows, cell) == len(needed())]


def judge(rows: Sequence[Mapping]) -> tuple[dict[str, dict], dict[str, str]]:
  """Judges what is complete, by the study's rules.

  Args:
    rows: Trials so far, of all stages.

  Returns:
    The verdicts, and {} or {"FORECAST": what the withheld scores still need, in one line}.
  """
  cells = complete(rows)
  whole = [row for cell in cells for row in where(rows, stage="main", **cell._asdict())]
  verdicts = rules.judge({"trials": whole})
  used = {rules.cell_of(pair) for pair in json.loads(rules.PUBLISHED.read_text()) if pair["winner"]}
  if used <= set(cells):
    return verdicts, {}
  count, of = sum(done(rows, cell) for cell in used), len(used) * len(needed())
  missing = f"withheld until all trials of the {len(used)} conditions that it uses are done: {count} of {of:,} are"
  return {name: row for name, row in verdicts.items() if name not in SCORES}, {SCORES[0]: missing}
