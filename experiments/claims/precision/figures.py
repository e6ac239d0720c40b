"""Figure of imprecise old log-probabilities (E16), drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.ablations.plots import new_figure, save
from experiments.claims import drawing
from experiments.claims.precision import rules
from jaxrl_llm.report.figures import line_style


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the errors of weights and clips, and the differences of accuracy."""
  with new_figure(height=2.5) as figure:
    panels = figure.subplots(1, 3, width_ratios=(2, 2, 3))
    names = (("weight", "mean error of a token's weight"), ("flips", "tokens whose clip changes"))
    for letter, axes, (name, label) in zip("ab", panels, names, strict=False):
      _bars(axes, results["distortion"], name, legend=letter == "a")
      drawing.title(axes, letter, label)
      axes.set_xlabel("type, or error in nats")
    drawing.percent(panels[1])
    rows = {
      f"{objective}: {way}": results["verdicts"][f"E16, training: {objective} {words}"]
      for objective in rules.OBJECTIVES
      for way, words in (("none", "needs no recomputation"), ("tis", "gains by tis"), ("mis", "gains by mis"))
      if f"E16, training: {objective} {words}" in results["verdicts"]
    }
    drawing.differences(panels[2], rows)
    drawing.title(panels[2], "c", "minus recompute, sampler in float8")
    save(figure, folder, "precision", formats)


def _bars(axes: Any, rows: Sequence[Mapping], name: str, *, legend: bool) -> None:
  """Draws the mean over the seeds, and each seed, for every objective and error."""
  for index, objective in enumerate(rules.OBJECTIVES):
    values = np.array([[row[name] for row in rows if row["objective"] == objective and row["error"] == error] for error in rules.ERRORS])
    at, style = np.arange(len(rules.ERRORS)) + 0.15 * (index - 1), line_style(index)
    axes.plot(at, values, ".", color=style["color"], markersize=2, alpha=0.5)
    axes.plot(at, values.mean(axis=1), linestyle="none", marker=style["marker"], color=style["color"], label=objective)
  axes.set_xticks(range(len(rules.ERRORS)), list(rules.ERRORS))
  if legend:
    axes.legend(loc="upper left")
