"""The figure, drawn from `results.json` alone: what each remedy saved."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.ablations.plots import BLACK, BLUE, GREEN, GREY, ORANGE, YELLOW, letter, new_figure, save
from experiments.claims.drawing import percent
from experiments.studies.alarms.rules import outcome
from experiments.studies.forensics.rules import REMEDIES

COLORS = {"healthy": GREEN, "neither": YELLOW, "collapsed": ORANGE}


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the gain of each remedy in the share saved, and the outcome of each continuation."""
  rows = [row for row in results["runs"] if row["remedy"] != "original"]
  collapses = sorted({(row["arm"], row["seed"]) for row in rows})
  with new_figure(height=5) as figure:
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    places = {remedy: place for place, remedy in enumerate(REMEDIES[1:])}
    parts = (("all", BLACK, -0.2), ("data", BLUE, 0), ("optimisation", GREY, 0.2))
    for part, color, shift in parts:
      for remedy, place in places.items():
        row = results[part][remedy]
        left.plot([row["low"], row["high"]], [place + shift] * 2, color=color)
        label = part if place == 0 else None
        left.plot(row["gain"], place + shift, "o", color=color, markersize=3.5, label=label)
    left.axvline(0, color=GREY, linewidth=0.7, linestyle=":")
    left.set_yticks(list(places.values()), list(places))
    left.set_ylim(len(places) - 0.5, -0.5)
    left.set_xlabel("saved, minus those saved by none")
    left.legend()
    percent(left, "x")
    letter(left, "a", "gain over no remedy")
    for row in rows:
      x = REMEDIES.index(row["remedy"]) + (row["draw"] - 2) / 4
      color = COLORS[outcome(row["accuracy"]).kind]
      right.plot(x, collapses.index((row["arm"], row["seed"])), "s", color=color, markersize=5)
    for kind, color in COLORS.items():
      right.plot([], [], "s", color=color, label=kind)
    right.set_xticks(range(len(REMEDIES)), REMEDIES)
    right.set_yticks(range(len(collapses)), [f"{arm} {seed}" for arm, seed in collapses])
    right.set_ylim(len(collapses) - 0.5, -0.5)
    letter(right, "b", "each continuation")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save(figure, folder, "forensics", formats)
