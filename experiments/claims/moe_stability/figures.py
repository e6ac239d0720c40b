"""Figure of E6, drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.ablations.plots import BLUE, GREEN, GREY, ORANGE, PINK, SKY, new_figure, save
from experiments.ablations.routing_replay.measures import where
from experiments.claims import drawing
from experiments.claims.moe_stability import rules

_LINES = {
  "GRPO": (ORANGE, "-"), "GRPO with R2": (PINK, "--"), "GSPO": (BLUE, "-"), "GSPO with R2": (SKY, "--"), "SAPO": (GREEN, "-"),
  "GRPO, control": (GREY, ":"),
}  # fmt: skip
"""Colour and line style of each arm."""

_DETAILED = rules.STALE[0]


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the figure: accuracy for every N, and the spread of the ratios for the first one."""
  trials, updates = results["trials"], results["sizes"]["updates"]
  rates = [rate for rate in rules.RATES if where(trials, rate=rate)]
  with new_figure(height=5.6) as figure:
    panels = figure.subplots(4, len(rates), squeeze=False, sharex=True)
    for column, rate in enumerate(rates):
      at_rate, axes = where(trials, rate=rate), panels[:, column]
      for place, count in enumerate(rules.STALE):
        _against_updates(axes[place], where(at_rate, updates=count), "curve", updates)
        drawing.title(axes[place], "abcd"[2 * place + column], f"rate {rate:g}, N = {count}")
        drawing.percent(axes[place])
        axes[place].set_ylim(0, 1)
      for panel, name in zip(axes[2:], ("log_r", "max_r"), strict=True):
        _against_updates(panel, where(at_rate, updates=_DETAILED), name, updates)
      drawing.title(axes[2], "ef"[column], f"rate {rate:g}, N = {_DETAILED}")
      axes[-1].set_xlabel("updates")
      axes[-1].set_xlim(0, updates)
    for panel, label in zip(panels[:, 0], ("held-out accuracy", "held-out accuracy", "std(log r), nats", "max r"), strict=True):
      panel.set_ylabel(label)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6)
    save(figure, folder, "moe_stability", formats)


def _against_updates(axes: Any, trials: Sequence[Mapping], name: str, updates: int) -> None:
  """Draws the mean over the seeds of a quantity against the updates.

  The mean is arithmetic for the held-out accuracy. For the measures taken before the last update of
  each rollout batch it is geometric.
  """
  for way, (color, style) in _LINES.items():
    lines = np.array([row[name] for row in where(trials, way=way)], float)
    mean = np.nanmean(lines, axis=0) if name == "curve" else np.exp(np.nanmean(np.log(np.maximum(lines, 1e-6)), axis=0))
    at = np.linspace(0, updates, len(mean)) if name == "curve" else np.linspace(0, updates, len(mean) + 1)[1:]
    axes.plot(at, mean, color=color, linestyle=style, label=way)
  if name != "curve":
    axes.set_yscale("log")
    axes.set_ylim(*((0.04, 4) if name == "log_r" else (1, 40)))
    axes.yaxis.set_minor_formatter(lambda *_: "")
