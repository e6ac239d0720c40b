"""Figure of the study, drawn from the trials alone: noise of the gradient against length."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import judging
from experiments.ablations.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, SKY, letter, new_figure, save
from experiments.studies.noise import protocol, rules

_LINES = {
  "product": ("product ratio, no clip", GREY, ":"),
  "token": ("token ratio, no clip", ORANGE, ":"),
  "grpo": ("GRPO", ORANGE, "-"),
  "sequence": ("sequence ratio, no clip", BLUE, ":"),
  "gspo 15 %": ("GSPO, 15 % clipped", BLUE, "-"),
  "sapo": ("SAPO", GREEN, "-"),
  "cispo": ("CISPO", PINK, "--"),
  "dppo_tv": ("DPPO, total variation", SKY, "--"),
}
"""Label, colour and line style of the objectives that are drawn."""


def draw(trials: Sequence[Mapping], laws: Sequence[Mapping], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the noise by length after `rules.K` updates, and the exponent of every objective.

  Args:
    trials: Trials of all lengths and seeds.
    laws: Exponents of `rules.laws`.
    folder: Folder of the figure.
    formats: Formats, as in ("png",).
  """
  rows, seeds = rules.table(trials), rules.complete(trials)
  lengths = protocol.LENGTHS
  with new_figure(height=3.6) as figure:
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, (label, color, style) in _LINES.items():
      logs = [[np.log(rows[length, rules.K, name, seed]["inflation"]) for seed in seeds] for length in lengths]
      ends = [judging.interval(values) for values in logs]
      left.plot(lengths, np.exp([end["mean"] for end in ends]), color=color, linestyle=style, label=label)
      left.fill_between(lengths, *(np.exp([end[side] for end in ends]) for side in ("low", "high")), color=color, alpha=0.12, linewidth=0)
    left.axhline(1, color=BLACK, linewidth=0.6)
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_xticks(lengths, [str(length) for length in lengths])
    left.set_xlabel("tokens of a response")
    left.set_ylabel("variance of the gradient, no ratio = 1")
    letter(left, "a", f"noise after {rules.K} updates")
    _exponents(right, [law for law in laws if law["k"] == rules.K])
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(figure, folder, "noise_by_length", formats)


def _exponents(axes: Any, laws: Sequence[Mapping]) -> None:
  """Draws the exponent of each objective's noise in length, with its interval."""
  for place, law in enumerate(sorted(laws, key=lambda law: law["exponent"]["mean"])):
    at = law["exponent"]
    color = _LINES.get(law["objective"], ("", BLACK, ""))[1]
    axes.plot([at["low"], at["high"]], [place, place], color=color)
    axes.plot(at["mean"], place, "o", markersize=3, color=color)
  names = [law["objective"] for law in sorted(laws, key=lambda law: law["exponent"]["mean"])]
  axes.set_yticks(range(len(names)), names, fontsize=7)
  axes.axvline(0, color=BLACK, linewidth=0.6)
  axes.set_xlabel("exponent b of noise ∝ Tᵇ")
  letter(axes, "b", "law of each objective")
