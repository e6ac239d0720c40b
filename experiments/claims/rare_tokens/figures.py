"""Figure of E19, drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.ablations.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, letter, new_figure, save
from experiments.ablations.routing_replay.measures import where
from experiments.claims.rare_tokens import rules
from experiments.claims.rare_tokens.bandit import RARE_PROBABILITY

_LINES = {
  "unclipped": (GREY, "", "unclipped"),
  "cispo": (ORANGE, "o", "CISPO, cap 5"),
  "dppo_tv": (GREEN, "D", "DPPO, total variation"),
  "sapo": (BLUE, "s", "SAPO"),
  "vespo": (PINK, "v", "VESPO"),
  "clip_higher": (BLACK, "^", "PPO, 0.2 / 0.28"),
  "ppo": (YELLOW, "<", "PPO, 0.2"),
  "gspo": (SKY, "x", "GSPO, 4e-4"),
}
"""Colour, marker and name of each method that has a line in panels a to c."""

_NAMES = {
  "ppo": "PPO, 0.2", "clip_higher": "PPO, 0.2 / 0.28", "gspo": "GSPO, 4e-4", "gmpo": "GMPO", "minirl": "MiniRL", "cispo": "CISPO, cap 5",
  "cispo_tight": "CISPO, cap 1.2", "sapo": "SAPO", "dppo_tv": "DPPO, TV", "dppo_kl": "DPPO, KL", "cppo": "CPPO", "vespo": "VESPO",
  "maspo": "MASPO", "minpro": "MinPRO", "unclipped": "unclipped",
}  # fmt: skip

_PANELS = ((rules.MAIN, "a", "drawn once in 16, plain steps"), (rules.MOMENTUM, "b", "the same, Adam"),
           (rules.EXPECTED, "c", "drawn as often as expected"))  # fmt: skip


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws p(rare) under three conditions, and the final ratios of every method."""
  with new_figure(height=4.8) as figure:
    panels = figure.subplots(2, 2)
    for axes, (condition, name, title) in zip(panels.flat, _PANELS, strict=False):
      _probability(axes, where(results["curves"], **condition._asdict()))
      letter(axes, name, title)
    _all_methods(panels.flat[3], results["ends"])
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    save(figure, folder, "rare_tokens", formats)


def _probability(axes: Any, rows: Sequence[Mapping]) -> None:
  """Draws p(rare) against the update.

  Values are geometric means over the bandits. Lines are means over the seeds, bands their range.
  """
  for method, (color, marker, label) in _LINES.items():
    values = RARE_PROBABILITY * np.exp([row["log_ratio"] for row in where(rows, method=method)])
    updates, style = np.arange(values.shape[1]), {"marker": marker} if marker else {"linestyle": "--"}
    axes.fill_between(updates, values.min(axis=0), values.max(axis=0), color=color, alpha=0.15, linewidth=0)
    axes.plot(updates, values.mean(axis=0), color=color, label=label, markevery=4, **style)
  for bound in rules.BANDS.values():
    axes.axhline(RARE_PROBABILITY * (1 + bound), color=BLACK, linestyle=":", linewidth=0.8)
  axes.set_yscale("log")
  axes.set_xlabel("updates of one rollout batch")
  axes.set_ylabel("p(rare)")


def _all_methods(axes: Any, ends: Sequence[Mapping]) -> None:
  """Draws the ratio of every method after all updates, in the condition that decides the claim.

  Dots are seeds, bars their geometric means.
  """
  means = {method: [float(np.mean(x)) for x in rules.log_ratios(ends, rules.MAIN, method).values()] for method in _NAMES}
  for place, method in enumerate(sorted(means, key=lambda name: np.mean(means[name]))):
    color = _LINES[method][0] if method in _LINES else GREY
    axes.plot(np.exp(means[method]), [place] * len(means[method]), ".", color=color, alpha=0.6)
    axes.plot(np.exp(np.mean(means[method])), place, "|", color=color, markersize=9, markeredgewidth=1.6)
  axes.set_yticks(range(len(means)), [_NAMES[method] for method in sorted(means, key=lambda name: np.mean(means[name]))], fontsize=6)
  for bound in rules.BANDS.values():
    axes.axvline(1 + bound, color=BLACK, linestyle=":", linewidth=0.8)
  axes.set_xscale("log")
  axes.set_xlabel("p(rare) / p_old(rare) at the end")
  letter(axes, "d", "every method, as in a")
