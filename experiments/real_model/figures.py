"""Figure of the real model, drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.ablations.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, letter, new_figure, save
from experiments.ablations.routing_replay.measures import where

_ARMS = {
  "sapo:smollm2": (BLUE, "o", "SAPO"),
  "raft:smollm2": (GREEN, "^", "right samples imitated"),
  "sapo:smollm2-form": (ORANGE, "s", "reward for the form"),
  "sapo:smollm2-random": (GREY, "x", "reward at random"),
}
"""Colour, marker and label of each arm in the first panel, by config."""

_WORKED_OUT = {
  "sapo:smollm2-steps": (BLUE, "o", "SAPO"),
  "sapo:smollm2-steps without running_sum": (PINK, "v", "only the answer rewarded"),
}
"""Colour, marker and label of each arm in the second panel, by config."""


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws two panels: the short answer with its controls, and the worked-out answer."""
  with new_figure(height=2.9) as figure:
    short, worked_out = figure.subplots(1, 2, sharey=True)
    for place, (config, (color, marker, label)) in enumerate(_ARMS.items()):
      _arm(short, results, config, color, marker, label, shift=0.12 * (place - 1.5))
    letter(short, "a", "the largest of five numbers")
    for place, (config, (color, marker, label)) in enumerate(_WORKED_OUT.items()):
      _arm(worked_out, results, config, color, marker, label, shift=0.4 * place)
    letter(worked_out, "b", "47 + 8 + 5 + 6, step by step")
    for axes in (short, worked_out):
      axes.set_xlabel("RL step")
      axes.locator_params(axis="x", integer=True)
      axes.set_ylim(0, 1)
    short.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.0f} %")
    short.set_ylabel("right answers")
    entries = {name: line for axes in (worked_out, short) for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend([*entries.values(), *_points()], [*entries, "held out, 95 %"], loc="outside lower center", ncols=3)
    save(figure, folder, "real_model", formats)


def _arm(axes: Any, results: Mapping[str, Any], config: str, color: str, marker: str, label: str, *, shift: float = 0.0) -> None:
  """Draws the training curve and the held-out accuracies of every seed of an arm.

  The training curve is the share of right responses, and the accuracies have their intervals.
  """
  steps, evals = (where(results[name], config=config) for name in ("steps", "evals"))
  for place, seed in enumerate(sorted({row["seed"] for row in steps})):
    rows = where(steps, seed=seed)
    x, y = ([row[key] for row in rows] for key in ("step", "right"))
    axes.plot(x, y, color=color, linewidth=0.9, marker="", label=None if place else label)
    rows = where(evals, seed=seed)
    x = np.array([row["step"] for row in rows]) + shift + 0.2 * place
    y, low, high = (np.array([row[key] for row in rows]) for key in ("accuracy", "low", "high"))
    axes.errorbar(x, y, yerr=(y - low, high - y), fmt=marker, color=color, markersize=4, linewidth=0.9, linestyle="none")


def _points() -> list[Any]:
  """Makes the legend entry of a held-out accuracy."""
  from matplotlib.lines import Line2D

  return [Line2D([], [], color=BLACK, marker="o", linestyle="none", markersize=4)]
