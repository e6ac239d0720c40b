"""Figure of imprecise old log-probabilities (E16), drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.ablations.plots import BLACK, new_figure, save
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
  if "second_trials" in results:
    _second(results, folder, formats)


def _second(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws what the sampler's log-probabilities cost at published mismatches, and clipped tokens."""
  with new_figure(height=2.3) as figure:
    panels = figure.subplots(1, 3, width_ratios=(3, 3, 4))
    for letter, axes, k3 in zip("ab", panels, rules.MISMATCHES, strict=False):
      names = rules.SECOND_OBJECTIVES if letter == "a" else dict.fromkeys(rules.SECOND_OBJECTIVES)
      drawing.differences(axes, {name: results["verdicts"][f"E16, k3 {k3}: {name} needs no recomputation"] for name in names})
      axes.axvline(-rules.MARGIN, color=BLACK, linewidth=0.7, linestyle=":")
      drawing.title(axes, letter, f"k3 = {k3}")
      axes.set_xlabel("accuracy, minus recomputed")
    limits = [bound for axes in panels[:2] for bound in axes.get_xlim()]
    for axes in panels[:2]:
      axes.set_xlim(min(limits), max(limits))
    panels[1].set_yticklabels([])
    axes = panels[2]
    for index, name in enumerate(rules.SECOND_OBJECTIVES):
      for offset, way in ((-0.1, "recompute"), (0.1, "none")):
        for place, k3 in enumerate(rules.MISMATCHES):
          rows = [row for row in results["second_trials"] if (row["objective"], row["way"], row["k3"]) == (name, way, k3)]
          values = [row["clipped"] for row in rows if row["clipped"] is not None]
          if values:
            label = way if (index, place) == (0, 0) else None
            x, color = place * len(rules.SECOND_OBJECTIVES) + index + offset, line_style(0 if way == "recompute" else 1)["color"]
            axes.plot([x] * len(values), values, ".", color=color, markersize=2, alpha=0.5)
            axes.plot(x, np.mean(values), "o", color=color, markersize=4, label=label)
    names = [name for _ in rules.MISMATCHES for name in rules.SECOND_OBJECTIVES]
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    drawing.percent(axes)
    axes.legend(loc="upper left")
    drawing.title(axes, "c", "tokens clipped, 6e-4 then 1.5e-3")
    save(figure, folder, "mismatches", formats)


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
