"""Figures of the staleness ladder (E20), drawn from `results.json` alone."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import judging
from experiments.ablations.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, letter, new_figure, save
from experiments.ablations.routing_replay.measures import where
from experiments.claims import drawing
from experiments.claims.staleness import rules
from experiments.judging import interval

NAMES = {
  "ppo": "token clip", "grpo": "GRPO", "dr_grpo": "Dr. GRPO", "dapo": "DAPO", "gspo": "GSPO, band guessed", "sapo": "SAPO",
  "reinforce": "REINFORCE", "cispo": "CISPO", "gmpo": "GMPO", "luspo": "LUSPO", "vespo": "VESPO", "dppo_tv": "DPPO, TV",
  "rloo": "RLOO, clipped", "reinforce_plus_plus": "REINFORCE++, base", "minirl": "MiniRL",
  "dppo_kl": "DPPO, KL", "cppo": "CPPO", "minpro": "MinPRO", "maspo": "MASPO",
  "maxrl": "MaxRL, clipped", "dro": "DRO, token", "clip_cov": "Clip-Cov", "kl_cov": "KL-Cov", "fipo": "FIPO", "topr": "TOPR",
  "top_entropy": "top entropies, DAPO", "gtpo": "GTPO", "rae": "RAE, clipped",
}  # fmt: skip

FAMILIES = {
  "hard clip of the token": (
    BLUE, ("ppo", "grpo", "dr_grpo", "dapo", "reinforce_plus_plus", "minirl", "maxrl", "clip_cov", "top_entropy", "gtpo", "rae", "fipo"),
  ),
  "hard clip of the sequence": (ORANGE, ("gspo", "luspo", "rloo", "gmpo")),
  "soft gate": (GREEN, ("sapo", "maspo")),
  "weight without gradient": (PINK, ("cispo", "minpro", "vespo", "topr")),
  "ball around the old policy": (YELLOW, ("dppo_tv", "dppo_kl", "cppo")),
  "no ratio": (BLACK, ("reinforce",)),
  "pull to the old policy": (SKY, ("dro", "kl_cov")),
}
"""Colour and objectives of each way to treat stale data."""

_COLORS = {name: color for color, names in FAMILIES.values() for name in names}

_CURVES = {
  "vespo": (PINK, "v"), "cispo": (SKY, "o"), "grpo": (BLUE, "^"), "gspo": (ORANGE, "x"), "sapo": (GREEN, "s"), "reinforce": (BLACK, ""),
}  # fmt: skip
"""Colour and marker of each objective that has a training curve."""


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the ladder, the training curves, and the contrasts at one rate and tuned equally."""
  trials = results["trials"]
  names = list(dict.fromkeys(row["objective"] for row in trials))
  _ladder(trials, names, folder, formats)
  _curves(trials, [name for name in _CURVES if name in names], results["sizes"]["updates"], folder, formats)
  if "second_trials" in results:
    _tuned(results, folder, formats)


def _tuned(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the same contrasts at one learning rate and with constants that were tuned equally."""
  minus = {
    "VESPO minus GRPO": ("vespo", "grpo"), "VESPO minus GSPO": ("vespo", "gspo"), "VESPO minus SAPO": ("vespo", "sapo"),
    "GSPO minus GRPO": ("gspo", "grpo"), "SAPO minus GRPO": ("sapo", "grpo"), "SAPO minus GSPO": ("sapo", "gspo"),
    "DPPO, TV minus GRPO": ("dppo_tv", "grpo"), "GRPO minus REINFORCE": ("grpo", "reinforce"),
  }  # fmt: skip
  with new_figure(height=2.4) as figure:
    runs = (("trials", "a", "one rate, band guessed"), ("second_trials", "b", "tuned equally"))
    for axes, (table, place, text) in zip(figure.subplots(1, 2, sharex=True, sharey=True), runs, strict=True):
      drawing.differences(axes, {label: rules.above(results[table], *pair, rules.LADDER[-1]) for label, pair in minus.items()})
      letter(axes, place, text)
    save(figure, folder, "tuned", formats)


def accuracies(trials: Sequence[Mapping], name: str) -> np.ndarray:
  """Collects an objective's held-out accuracy at the end, [steps of the ladder, seeds]."""
  return np.array([[row["curve"][-1] for row in where(trials, objective=name, per_rollout=count)] for count in rules.LADDER])


def _ladder(trials: Sequence[Mapping], names: Sequence[str], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws one panel for each objective.

  A panel shows the accuracy at the end against the updates per rollout batch, with all other
  objectives in grey behind it.
  """
  rows = math.ceil(len(names) / 4)
  start = float(np.mean([row["curve"][0] for row in trials]))
  means = {name: accuracies(trials, name).mean(axis=1) for name in names}
  with new_figure(height=0.7 + 1.45 * rows) as figure:
    panels = list(figure.subplots(rows, 4, sharex=True, sharey=True, squeeze=False).flat)
    for place, (name, axes) in enumerate(zip(names, panels, strict=False)):
      for other in means.values():
        axes.plot(rules.LADDER, other, color=GREY, linewidth=0.6, alpha=0.45, zorder=1)
      axes.axhline(start, color=BLACK, linestyle=":", linewidth=0.8, zorder=1)
      _panel(axes, trials, name)
      letter(axes, str(place + 1), NAMES[name])
    for axes in panels[len(names) :]:
      axes.set_visible(False)
    for axes in panels[-4:]:
      axes.set_xlabel("updates a rollout batch")
    handles = [_line(color) for color, _ in FAMILIES.values()]
    figure.legend(handles, list(FAMILIES), loc="outside lower center", ncols=3)
    figure.supylabel("held-out accuracy at the end", fontsize=8)
    save(figure, folder, "ladder", formats)


def _line(color: str) -> Any:
  """Makes a handle of the legend."""
  from matplotlib.lines import Line2D

  return Line2D([], [], color=color, marker="o")


def _panel(axes: Any, trials: Sequence[Mapping], name: str) -> None:
  """Draws the mean and Student's interval over the seeds of one objective.

  Dots are seeds, and crosses are seeds that collapsed.
  """
  color, ends = _COLORS[name], accuracies(trials, name)
  spread = [interval(values) for values in ends]
  half = [x["high"] - x["mean"] for x in spread]
  axes.errorbar(rules.LADDER, ends.mean(axis=1), yerr=half, color=color, marker="o", capsize=2, elinewidth=0.9, zorder=3)
  for count, values in zip(rules.LADDER, ends, strict=True):
    fallen = [judging.collapsed(row["curve"]) for row in where(trials, objective=name, per_rollout=count)]
    for value, fell in zip(values, fallen, strict=True):
      axes.plot(count * 1.18, value, "x" if fell else ".", color=color, markersize=3, alpha=0.7, zorder=2)
  axes.set_xscale("log", base=2)
  axes.set_xticks(rules.LADDER, [str(count) for count in rules.LADDER])
  axes.set_ylim(0, 1)


def _curves(trials: Sequence[Mapping], names: Sequence[str], updates: int, folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the held-out accuracy during training, one panel for each number of updates.

  Lines are means over the seeds, and bands their range.
  """
  with new_figure(height=2.3) as figure:
    for place, (axes, count) in enumerate(zip(figure.subplots(1, 4, sharey=True), rules.LADDER, strict=True)):
      for name in names:
        color, marker = _CURVES[name]
        values = np.array([row["curve"] for row in where(trials, objective=name, per_rollout=count)])
        at = np.linspace(0, updates, values.shape[1])
        axes.fill_between(at, values.min(axis=0), values.max(axis=0), color=color, alpha=0.06, linewidth=0)
        axes.plot(at, values.mean(axis=0), color=color, marker=marker, markersize=3, label=NAMES[name])
      axes.set_ylim(0, 1)
      axes.set_xlabel("update")
      letter(axes, chr(ord("a") + place), f"{count} a batch")
    figure.axes[0].set_ylabel("held-out accuracy")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    save(figure, folder, "curves", formats)
