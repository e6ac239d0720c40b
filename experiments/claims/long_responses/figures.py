"""Figure of what length does to each objective (E25), drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import judging
from experiments.ablations.plots import BLUE, GREEN, GREY, ORANGE, new_figure, save
from experiments.claims import drawing

_COLORS = {"grpo": ORANGE, "gspo": BLUE, "sapo": GREEN, "reinforce": GREY}
_LABELS = {"grpo": "GRPO", "gspo": "GSPO", "sapo": "SAPO", "reinforce": "no ratio"}


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the accuracy at the end and the share of collapsed seeds against the length."""
  trials = results["trials"]
  with new_figure(height=2.6) as figure:
    panels = figure.subplots(1, 3, sharex=True)
    for place, (name, color) in enumerate(_COLORS.items()):
      for panel, equal in zip(panels, ("samples", "tokens"), strict=False):
        _accuracies(panel, trials, equal, name, color, place)
      rows = {n: [row for row in _rows(trials, "samples", name) if row["tokens"] == n] for n in (16, 64, 256)}
      fallen = [sum(judging.fell(row["curve"]) for row in rows[n]) / max(len(rows[n]), 1) for n in rows]
      panels[2].plot(list(rows), fallen, "o-", color=color, markersize=3)
    for panel, letter, text in zip(panels, "abc", ("equal samples", "equal tokens", "collapsed, equal samples"), strict=True):
      panel.set_xscale("log", base=4)
      panel.set_xticks((16, 64, 256), ("16", "64", "256"))
      panel.set_xlabel("tokens of a response")
      panel.set_ylim(0, 1)
      drawing.percent(panel)
      drawing.title(panel, letter, text)
    panels[0].set_ylabel("held-out accuracy")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    save(figure, folder, "long_responses", formats)


def _rows(trials: Sequence[Mapping], equal: str, objective: str) -> list[Mapping]:
  """Returns the trials of an objective; those of 64 tokens belong to both kinds."""
  return [row for row in trials if row["objective"] == objective and (row["equal"] == equal or row["tokens"] == 64)]


def _accuracies(axes: Any, trials: Sequence[Mapping], equal: str, name: str, color: str, place: int) -> None:
  """Draws means over the seeds with Student's 95 %, a little beside each other."""
  rows = _rows(trials, equal, name)
  lengths = sorted({row["tokens"] for row in rows if row["equal"] == equal} | {row["tokens"] for row in rows if len(rows) > 1})
  if equal == "tokens" and name == "reinforce":
    return
  at = [n * 1.06 ** (place - 1.5) for n in lengths]
  means = [judging.interval(list(judging.solved(rows, tokens=n).values())) for n in lengths]
  sides = [[abs(row["mean"] - row[side]) for row in means] for side in ("low", "high")]
  axes.errorbar(at, [row["mean"] for row in means], yerr=sides, color=color, marker="o", markersize=3, linewidth=1, label=_LABELS[name])
