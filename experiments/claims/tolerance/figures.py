"""Figure of the tolerance of mismatches (E23), drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.ablations.plots import BLACK, new_figure, save
from experiments.claims import drawing
from experiments.claims.tolerance import rules
from jaxrl_llm.report.figures import line_style

TITLES = {"short": "4 to 8 tokens", "mixture": "4 to 8 tokens, experts"}


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the accuracy that is lost without recomputation, by sampler, one panel for each bed."""
  measured = [bed for bed in TITLES if _row(results, bed, "float8", "gspo", "needs no recomputation").get("interval")]
  if not measured:
    return
  with new_figure(height=2.6) as figure:
    panels = figure.subplots(1, len(measured), sharey=True, squeeze=False)[0]
    for letter, axes, bed in zip("ab", panels, measured, strict=False):
      for index, name in enumerate(rules.OBJECTIVES):
        style = line_style(index)
        for words, offset, filled in (("needs no recomputation", 0.0, True), ("gains by tis", 0.25, False)):
          rows = {place: _row(results, bed, sampler, name, words) for place, sampler in enumerate(rules.SAMPLERS[bed])}
          rows = {place: row for place, row in rows.items() if row.get("interval")}
          intervals = [row["interval"] for row in rows.values()]
          at, means = [place + offset + 0.08 * (index - 1) for place in rows], [x["mean"] for x in intervals]
          errors = [(x["mean"] - x["low"], x["high"] - x["mean"]) for x in intervals]
          label = (name if filled else f"{name}, tis") if letter == "a" else None
          axes.errorbar(
            at, means, yerr=list(zip(*errors, strict=True)) or None, color=style["color"], marker=style["marker"], markersize=3,
            linestyle="-" if filled else "none", linewidth=0.8, fillstyle="full" if filled else "none", label=label,
          )  # fmt: skip
      ticks = []
      for sampler in rules.SAMPLERS[bed]:
        gap = _row(results, bed, sampler, "gspo", "needs no recomputation").get("gap", float("nan"))
        ticks.append(f"{sampler}\n{gap:.0e}")
      axes.set_xticks(range(len(ticks)), ticks, fontsize=6)
      axes.axhline(0, color=BLACK, linewidth=0.5)
      axes.axhline(-rules.MARGIN, color=BLACK, linewidth=0.7, linestyle=":")
      axes.set_xlabel("sampler, k3 in nats a token")
      drawing.title(axes, letter, TITLES[bed])
    panels[0].set_ylabel("accuracy, minus recomputed")
    panels[0].legend(loc="lower left")
    save(figure, folder, "tolerance", formats)


def _row(results: Mapping[str, Any], bed: str, sampler: str, name: str, words: str) -> Mapping[str, Any]:
  return results["verdicts"].get(f"E23, {bed}, {sampler}: {name} {words}", {})
