"""The figure of E6, drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.ablations.plots import BLUE, GREEN, GREY, ORANGE, PINK, SKY, letter, new_figure, save
from experiments.ablations.routing_replay.measures import where
from experiments.claims.moe_stability import rules
from experiments.claims.moe_stability.survival import kaplan_meier

_LINES = {
  ("experts", "grpo", "none"): (ORANGE, "-", "GRPO"),
  ("experts", "grpo", "R2"): (PINK, "--", "GRPO with R2"),
  ("experts", "gspo", "none"): (BLUE, "-", "GSPO"),
  ("experts", "gspo", "R2"): (SKY, "--", "GSPO with R2"),
  ("experts", "sapo", "none"): (GREEN, "-", "SAPO"),
  ("dense", "grpo", "none"): (GREY, ":", "GRPO, dense control"),
}
"""Of each way to train the colour, the style and the name."""

_QUANTITIES = {"reward": "right responses", "std_z": "std(log r), nats", "max_r": "max r"}


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the figure: survival curves, and under them what happens on the way."""
  rows = results["rows"]
  rates = sorted({row["rate"] for row in rows}, reverse=True)
  with new_figure(height=5.6 if len(rates) > 1 else 4.0) as figure:
    panels = figure.subplots(4, max(len(rates), 2), squeeze=False, height_ratios=(1.25, 1, 1, 1))
    for column, rate in enumerate(rates):
      mine = where(rows, rate=rate)
      _survival(panels[0][column], mine, rate)
      letter(panels[0][column], "abc"[column], f"rate {rate:g}: runs that stand")
      for axes, (name, label) in zip(panels[1:, column], _QUANTITIES.items(), strict=True):
        _against_rollouts(axes, mine, name)
        if column == 0:
          axes.set_ylabel(label)
      panels[-1][column].set_xlabel("rollout batch")
    panels[0][0].set_ylabel("fraction of the runs")
    for unused in panels[:, len(rates) :].flat:
      unused.set_visible(False)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6)
    save(figure, folder, "moe_stability", formats)


def _survival(axes: Any, rows: Sequence[Mapping], rate: float) -> None:
  """Kaplan and Meier's curves, each drawn a little beside the others so that none hides."""
  for place, (line, (color, style, label)) in enumerate(_LINES.items()):
    lives = rules.lives(rows, rules.Arm(*line, rules.UPDATES, rate))
    times, alive = kaplan_meier(list(lives.values()))
    axes.step(np.array(times) / rules.UPDATES, np.array(alive) - 0.008 * place, where="post", color=color, linestyle=style, label=label)
  axes.set_ylim(-0.08, 1.05)
  axes.set_xlim(0, rules.ROLLOUTS)


def _against_rollouts(axes: Any, rows: Sequence[Mapping], name: str) -> None:
  """Means over the seeds that are still trained; a collapsed one is not."""
  for (model, objective, replay), (color, style, _) in _LINES.items():
    mine = where(rows, model=model, objective=objective, replay=replay)
    places = sorted({row["rollout"] for row in mine})
    means = [float(np.mean([row[name] for row in where(mine, rollout=place)])) for place in places]
    axes.plot(places, means, color=color, linestyle=style)
  axes.set_xlim(0, rules.ROLLOUTS)
  if name == "reward":
    axes.yaxis.set_major_formatter(lambda x, _: f"{100 * x:.3g} %")
    axes.set_ylim(bottom=0)
  else:
    axes.set_yscale("log")
    axes.set_ylim(*((0.1, 10) if name == "std_z" else (1, 1000)))
    axes.yaxis.set_minor_formatter(lambda *_: "")
