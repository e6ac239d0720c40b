"""Figure of E18 and E21, drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.ablations.dapo_ladder.figures import curve
from experiments.ablations.plots import BLACK, BLUE, GREEN, ORANGE, PINK, SKY, letter, new_figure, save
from experiments.ablations.routing_replay.measures import where
from experiments.claims.lengths import rules
from experiments.judging import interval

_WEIGHTS = dict(zip(rules.DR_GRPO, (
  (ORANGE, "-", "1/|o|, std\n(GRPO)"), (PINK, "--", "1/|o|, no std"),
  (SKY, "--", "constant, std"), (BLUE, "-", "constant, no std\n(Dr. GRPO)"),
), strict=True))  # fmt: skip
_SEQUENCES = dict(zip(rules.LUSPO, ((ORANGE, "-", "GSPO"), (BLUE, "-", "LUSPO"), (GREEN, "--", "GRPO")), strict=True))
"""Colour, line style and name of each arm."""


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the figure."""
  with new_figure(height=4.6) as figure:
    above, below = figure.subplots(2, 3)
    for axes, name, title in zip(above[:2], ("tokens_wrong", "tokens_right"), ("E18: wrong responses", "right responses"), strict=True):
      _lines(axes, results["rows"], _WEIGHTS, name)
      axes.set_ylabel("tokens a response")
      letter(axes, "ab"[name == "tokens_right"], title)
    _slopes(above[2], results["rows"], _WEIGHTS, "tokens_wrong")
    letter(above[2], "c", "slopes of a")
    _lines(below[0], results["rows"], _SEQUENCES, "tokens")
    below[0].set_ylabel("tokens a response")
    letter(below[0], "d", "E21: all responses")
    _lines(below[1], results["rows"], _SEQUENCES, "right")
    below[1].yaxis.set_major_formatter(lambda x, _: f"{100 * x:.3g} %")
    letter(below[1], "e", "responses that are right")
    _slopes(below[2], results["rows"], _SEQUENCES, "tokens")
    letter(below[2], "f", "slopes of d")
    for panels in (above, below):
      panels[2].set_xlabel("tokens a response and step")
      for axes in panels[:2]:
        axes.set_xlabel("RL step")
        axes.locator_params(axis="x", integer=True)
    save(figure, folder, "lengths", formats)


def _lines(axes: Any, rows: Sequence[Mapping], arms: Mapping[rules.Arm, tuple[str, str, str]], name: str) -> None:
  """Draws each arm's mean over the seeds, as a running mean of three steps."""
  for arm, (color, style, _) in arms.items():
    steps, values = curve(where(rows, **arm._asdict()), name)
    mean = np.nanmean(values, axis=1)
    smooth = [float(np.mean(mean[max(0, i - 1) : i + 2])) for i in range(len(mean))]
    axes.plot(steps, smooth, color=color, linestyle=style)


def _slopes(axes: Any, rows: Sequence[Mapping], arms: Mapping[rules.Arm, tuple[str, str, str]], name: str) -> None:
  """Draws the slopes of each arm: their mean, Student's 95 % interval, and a dot per seed."""
  for place, (arm, (color, style, _)) in enumerate(arms.items()):
    values = rules.slopes(rows, arm, name)
    at = interval(values)
    axes.plot(values, [place + 0.2] * len(values), ".", color=color, markersize=4, alpha=0.6)
    axes.plot([at["low"], at["high"]], [place] * 2, color=color, linestyle=style)
    axes.plot(at["mean"], place, "o", color=color, markersize=5)
  axes.axvline(0, color=BLACK, linewidth=0.8)
  axes.set_yticks(range(len(arms)), [label for _, _, label in arms.values()])
  axes.set_ylim(len(arms) - 0.5, -0.5)
