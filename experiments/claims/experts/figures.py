"""Figure of E6, drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import judging
from experiments.ablations.plots import BLUE, GREEN, GREY, ORANGE, PINK, SKY, new_figure, save
from experiments.ablations.routing_replay.measures import where
from experiments.claims import drawing

_LINES = {
  "GRPO": (ORANGE, "-"), "GRPO with R2": (PINK, "--"), "GSPO": (BLUE, "-"), "SAPO": (GREEN, "-"), "GRPO, router frozen": (SKY, ":"),
  "GRPO, nothing to route": (GREY, ":"),
}  # fmt: skip
"""Colour and line style of each arm."""


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws accuracy, the share of collapsed seeds, changed experts and the spread of the ratios."""
  trials, updates = results["trials"], results["sizes"]["updates"]
  with new_figure(height=4.4) as figure:
    panels = figure.subplots(2, 2)
    for way, (color, style) in _LINES.items():
      rows = where(trials, way=way)
      curve = np.mean([row["curve"] for row in rows], axis=0)
      panels[0][0].plot(np.linspace(0, updates, len(curve)), curve, color=color, linestyle=style, label=way)
      for panel, name in ((panels[1][0], "change"), (panels[1][1], "log_r")):
        lines = np.array([row[name] for row in rows], float)
        panel.plot(np.linspace(0, updates, lines.shape[1] + 1)[1:], np.nanmedian(lines, axis=0), color=color, linestyle=style)
    _fallen(panels[0][1], trials)
    drawing.title(panels[0][0], "a", "held-out accuracy, mean of the seeds")
    drawing.title(panels[0][1], "b", "seeds that have collapsed at the end")
    drawing.title(panels[1][0], "c", "experts that changed, median")
    drawing.title(panels[1][1], "d", "std(log r) in nats, median")
    for panel in (panels[0][0], panels[0][1], panels[1][0]):
      drawing.percent(panel)
    panels[0][0].set_ylim(0, 1)
    panels[1][1].set_yscale("log")
    for panel in (panels[0][0], *panels[1]):
      panel.set_xlim(0, updates)
      panel.set_xlabel("updates")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    save(figure, folder, "experts", formats)


def _fallen(axes: Any, trials: Sequence[Mapping]) -> None:
  """Draws a bar for each arm: the share of its seeds that have collapsed."""
  for place, (way, (color, _)) in enumerate(_LINES.items()):
    rows = where(trials, way=way)
    axes.bar(place, np.mean([judging.fell(row["curve"]) for row in rows]), color=color)
  axes.set_xticks(range(len(_LINES)), ["GRPO", "R2", "GSPO", "SAPO", "frozen", "control"])
  axes.set_ylim(0, 1)
