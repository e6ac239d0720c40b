"""Figure of the study: noise of the gradient, and spread of the ratios, against length."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import judging
from experiments.ablations.plots import BLACK, BLUE, GREEN, GREY, ORANGE, letter, new_figure, save
from experiments.studies.long_noise import rules

_LINES = {
  "product": ("product of all ratios", GREY, ":"),
  "token": ("token ratio, no clip", ORANGE, ":"),
  "grpo": ("GRPO", ORANGE, "-"),
  "sequence": ("sequence ratio, no clip", BLUE, ":"),
  "gspo 15 %": ("GSPO, 15 % clipped", BLUE, "-"),
  "sapo": ("SAPO", GREEN, "-"),
}
"""Label, colour and line style of the objectives that are drawn."""

_SPREADS = {"token": (ORANGE, "a token's ratio"), "sequence": (BLUE, "the sequence's, a mean"), "product": (GREY, "the product of all")}


def draw(trials: Sequence[Mapping], means: Sequence[Mapping], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the noise by length, and the standard deviations of three log-ratios.

  Args:
    trials: Trials of all lengths and seeds.
    means: Geometric means of the inflations and their intervals.
    folder: Folder of the figure.
    formats: Formats, as in ("png",).
  """
  with new_figure(height=3.2) as figure:
    left, right = figure.subplots(1, 2)
    for name, (label, color, style) in _LINES.items():
      rows = [row for row in means if row["objective"] == name]
      left.plot(rules.LENGTHS, [row["mean"] for row in rows], color=color, linestyle=style, label=label)
      left.fill_between(rules.LENGTHS, *([row[side] for row in rows] for side in ("low", "high")), color=color, alpha=0.12, linewidth=0)
    left.axhline(1, color=BLACK, linewidth=0.6)
    left.set_ylabel("variance of the gradient, no ratio = 1")
    letter(left, "a", f"noise after {rules.UPDATES} updates")
    for place, (kind, (color, label)) in enumerate(_SPREADS.items()):
      _spread(right, trials, kind, color, label, place)
    right.set_ylabel("std of the log-ratio, nats")
    letter(right, "b", "the ratios themselves")
    right.legend(fontsize=7)
    for axes in (left, right):
      axes.set_xscale("log", base=4)
      axes.set_yscale("log")
      axes.set_xticks(rules.LENGTHS, [str(length) for length in rules.LENGTHS])
      axes.set_xlabel("tokens of a response")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    save(figure, folder, "long_noise", formats)


def _spread(axes: Any, trials: Sequence[Mapping], kind: str, color: str, label: str, place: int) -> None:
  """Draws geometric means over the seeds with Student's 95 %, and the law of independent tokens."""
  column = lambda length: [np.log(x["objectives"]["token"][f"std_{kind}"]) for x in trials if x["length"] == length]
  ends = [judging.interval(column(length)) for length in rules.LENGTHS]
  means = np.exp([end["mean"] for end in ends])
  sides = [np.abs(means - np.exp([end[side] for end in ends])) for side in ("low", "high")]
  axes.errorbar(rules.LENGTHS, means, yerr=sides, color=color, marker="o", markersize=3, linewidth=1, label=label)
  law = means[0] * (np.array(rules.LENGTHS) / rules.LENGTHS[0]) ** (0.0, -0.5, 0.5)[place]
  axes.plot(rules.LENGTHS, law, color=color, linewidth=0.7, linestyle="--")
