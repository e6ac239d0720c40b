"""Figure of the asymmetric gates (E15), drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.ablations.plots import new_figure, save
from experiments.claims import drawing
from experiments.claims.gate_asymmetry import rules


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the accuracies at both rates, and the differences between the pairs of gates."""
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
