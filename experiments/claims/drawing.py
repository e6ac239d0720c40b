"""Panels that the figures of the studies share."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.report.figures import BLACK, line_style


def title(axes: Any, letter: str, text: str) -> None:
  """Writes the letter and the title of a panel."""
  axes.set_title(rf"$\bf{{{letter}}}$  {text}")


def percent(axes: Any, which: str = "y") -> None:
  """Formats the fractions on an axis as percentages."""
  getattr(axes, f"{which}axis").set_major_formatter(lambda x, _: f"{100 * x:.3g} %")


def curves(
  axes: Any, trials: Sequence[Mapping], column: str, labels: Mapping[str, str], *, updates: int, legend: bool, name: str = "curve"
) -> None:
  """Draws a quantity against the updates, with one line for each value of a column.

  Thick lines are means over the seeds, and thin lines are single seeds.

  Args:
    axes: Matplotlib axes.
    trials: Rows with that column and the quantity.
    column: Column that tells the lines apart.
    labels: Label of each value of the column, in the order of drawing.
    updates: Number of updates in a trial.
    legend: Whether to draw a legend.
    name: Name of the quantity, a list of evenly spaced values.
  """
  for index, (value, label) in enumerate(labels.items()):
    lines = np.array([[np.nan if x is None else x for x in row[name]] for row in trials if row[column] == value])
    if not len(lines):
      continue
    at, style = np.linspace(0, updates, lines.shape[1]), line_style(index)
    axes.plot(at, lines.T, color=style["color"], linewidth=0.5, alpha=0.35)
    axes.plot(at, np.nanmean(lines, axis=0), label=label, **style)
  axes.set_xlabel("updates")
  if name == "curve":
    axes.set_ylabel("held-out accuracy")
    axes.set_ylim(0, 1)
    percent(axes)
  if legend:
    axes.legend(loc="best")


def differences(axes: Any, rows: Mapping[str, Mapping]) -> None:
  """Draws differences of accuracies with their 95 % intervals over the seeds.

  Args:
    axes: Matplotlib axes.
    rows: Verdicts with an `interval`, by label.
  """
  for place, row in enumerate(rows.values()):
    at = row["interval"]
    axes.plot((at["low"], at["high"]), (place, place), color=BLACK, linewidth=1.5)
    axes.plot(at["mean"], place, "o", color="white", markeredgecolor=BLACK, markersize=4)
  axes.axvline(0, color=BLACK, linewidth=0.7, linestyle=(0, (3, 2)))
  axes.set_yticks(range(len(rows)), rows)
  axes.set_ylim(len(rows) - 0.5, -0.5)
  axes.set_xlabel("difference")
  percent(axes, "x")
