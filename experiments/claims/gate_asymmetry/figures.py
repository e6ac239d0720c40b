"""Figure of the asymmetric gates (E15), drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import judging
from experiments.ablations.plots import GREY, new_figure, save
from experiments.claims import drawing
from experiments.claims.gate_asymmetry import rules
from jaxrl_llm.report.figures import line_style


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws both rates and the differences between the pairs of gates, and then the second run."""
  labels = {name: rf"$\tau_+$ = {pos:g}, $\tau_-$ = {neg:g}" for name, (pos, neg) in rules.PAIRS.items()}
  with new_figure(height=2.3) as figure:
    panels = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    for letter, axes, (rate, value) in zip("ab", panels[:2], rules.RATES.items(), strict=True):
      trials = [row for row in results["trials"] if row["rate"] == rate]
      drawing.curves(axes, trials, "gates", labels, updates=results["sizes"]["updates"], legend=letter == "a")
      drawing.title(axes, letter, f"learning rate {value:g}")
    rows = {f"{rate},\n{less}": f"E15, accuracy above {less}, {rate} rate" for rate in rules.RATES for less in ("pos sharper", "equal")}
    drawing.differences(panels[2], {label: results["verdicts"][name] for label, name in rows.items()})
    drawing.title(panels[2], "c", "(1, 2) minus others")
    save(figure, folder, "gate_asymmetry", formats)
  if trials := results.get("second_trials"):
    _second(trials, results, folder, formats)


def _second(trials: Sequence[Mapping], results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the mean accuracies, the accuracy at the end by seed, and who fell."""
  pairs = {name: rf"$\tau_+$ = {pos:g}, $\tau_-$ = {neg:g}" for name, (pos, neg) in rules.PAIRS.items() if name != "equal"}
  of = {name: {row["seed"]: row for row in trials if row["gates"] == name} for name in pairs}
  with new_figure(height=2.6) as figure:
    left, middle, right = figure.subplots(1, 3)
    for index, (name, label) in enumerate(pairs.items()):
      lines, style = np.array([row["curve"] for row in of[name].values()]), line_style(index)
      at = np.linspace(0, results["sizes"]["updates"], lines.shape[1])
      left.fill_between(at, *np.quantile(lines, (0.25, 0.75), axis=0), color=style["color"], alpha=0.2, linewidth=0)
      left.plot(at, np.median(lines, axis=0), label=label, **style)
      values = np.sort([row["curve"][-1] for row in of[name].values()])
      middle.plot(values, np.arange(1, len(values) + 1) / len(values), drawstyle="steps-post", color=style["color"])
    left.set(xlabel="updates", ylabel="held-out accuracy", ylim=(0, 1))
    left.legend(loc="upper left")
    middle.set(xlabel="held-out accuracy at the end", ylabel="seeds at or below", xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1))
    fell = {name: {seed: judging.fell(row["curve"]) for seed, row in rows.items()} for name, rows in of.items()}
    sharper, other = fell["neg sharper"], fell["pos sharper"]
    groups = {"both": (True, True), "(2, 1) alone": (False, True), "(1, 2) alone": (True, False), "neither": (False, False)}
    counts = [sum((sharper[seed], other[seed]) == group for seed in sharper) for group in groups.values()]
    right.barh(range(len(groups)), counts, color=GREY)
    for place, count in enumerate(counts):
      right.text(count, place, f" {count}", va="center", fontsize=8)
    right.set_yticks(range(len(groups)), groups)
    right.set(xlabel="seeds", ylim=(len(groups) - 0.5, -0.5), xlim=(0, 1.2 * max(counts)))
    for axes in (left, middle):
      drawing.percent(axes)
    drawing.percent(middle, "x")
    drawing.title(left, "a", "median and quartiles")
    drawing.title(middle, "b", "all seeds")
    drawing.title(right, "c", "pairs of trials that fell")
    save(figure, folder, "second", formats)
