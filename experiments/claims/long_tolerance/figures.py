"""Figure of what a mismatch costs on responses of 64 tokens (E24), from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.ablations.plots import BLACK, new_figure, save
from experiments.claims import drawing
from experiments.claims.long_tolerance import rules


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the accuracy that is lost without recomputation."""
  with new_figure(height=1.6) as figure:
    axes = figure.subplots()
    drawing.differences(axes, {name: results["verdicts"][f"E24, {name} needs no recomputation"] for name in rules.OBJECTIVES})
    axes.axvline(-rules.MARGIN, color=BLACK, linewidth=0.7, linestyle=":")
    axes.set_xlabel("accuracy, minus recomputed; 64 tokens")
    save(figure, folder, "long_tolerance", formats)
