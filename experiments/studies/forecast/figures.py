"""Figure of the study, drawn from `results.json` alone.

It shows the gain of each objective over GRPO in every condition.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.ablations.plots import BLACK, BLUE, GREY, ORANGE, letter, new_figure, save


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws a panel per condition, or nothing if no condition has been run."""
  cells: dict[str, dict[str, Mapping]] = {}
  for name, row in results.get("verdicts", {}).items():
    if "interval" in row:
      cell, _, rest = name.partition(": ")
      cells.setdefault(cell, {})[rest.split(" above ")[0]] = row
  if not cells:
    return
  columns = min(3, len(cells))
  rows = -(-len(cells) // columns)
  with new_figure(height=0.5 + 2.3 * rows) as figure:
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
    for place, (axes, (cell, comparison)) in enumerate(zip(panels, cells.items(), strict=False)):
      names = sorted(comparison, key=lambda name: -comparison[name]["interval"]["mean"])
      for height, name in enumerate(names):
        interval, decided = comparison[name]["interval"], comparison[name]["verdict"] in ("reproduced", "contradicted")
        color = GREY if name.endswith("again") else BLUE if decided else ORANGE
        axes.plot([100 * interval["low"], 100 * interval["high"]], [height] * 2, color=color, linewidth=1.2)
        axes.plot(100 * interval["mean"], height, "o", color=color, markersize=4)
      axes.axvline(0, color=BLACK, linewidth=0.7)
      axes.set_yticks(range(len(names)), names)
      axes.invert_yaxis()
      letter(axes, chr(ord("a") + place), cell)
    for axes in panels:
      axes.set_visible(False)
    figure.supxlabel("area under the accuracy curve minus GRPO's, points", fontsize=8)
    save(figure, folder, "forecast", formats)
