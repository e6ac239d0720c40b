"""Figure of the tolerance of mismatches (E23), drawn from `results.json` and that of E16."""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.ablations.plots import BLACK, new_figure, save
from experiments.claims import drawing, precision
from experiments.claims.precision import rules as before
from experiments.claims.tolerance import rules
from experiments.results import from_json
from jaxrl_llm.report.figures import line_style

TITLES = {"short": "4 to 8 tokens", "mixture": "4 to 8 tokens, experts"}
EXACT = 3e-6
"""Place of the samplers that differ by rounding alone, on the logarithmic axis."""


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the accuracy that is lost without recomputation against the divergence of the sampler."""
  measured = {bed: points for bed in TITLES if (points := _points(results, bed))}
  if not measured:
    return
  with new_figure(height=2.4) as figure:
    panels = figure.subplots(1, len(measured), sharey=True, squeeze=False)[0]
    for letter, axes, (bed, points) in zip("ab", panels, measured.items(), strict=False):
      for index, name in enumerate(rules.OBJECTIVES):
        style, own = line_style(index), sorted(point for of, *point in points if of == name)
        gaps, means = [gap * 1.06 ** (index - 1) for gap, _ in own], [row["mean"] for _, row in own]
        errors = [[row["mean"] - row["low"] for _, row in own], [row["high"] - row["mean"] for _, row in own]]
        axes.errorbar(gaps, means, yerr=errors, color=style["color"], marker=style["marker"], markersize=3, linewidth=0.8, label=name)
      axes.set_xscale("log")
      axes.set_xticks([EXACT, 1e-5, 1e-4, 1e-3], ["0", "1e-5", "1e-4", "1e-3"])
      axes.minorticks_off()
      axes.axhline(0, color=BLACK, linewidth=0.5)
      axes.axhline(-rules.MARGIN, color=BLACK, linewidth=0.7, linestyle=":")
      axes.set_xlabel("k3 of sampler and learner, nats a token")
      drawing.title(axes, letter, TITLES[bed])
    panels[0].set_ylabel("accuracy, minus recomputed")
    panels[0].legend(loc="lower left")
    save(figure, folder, "tolerance", formats)


def _points(results: Mapping[str, Any], bed: str) -> list[tuple[str, float, Mapping[str, float]]]:
  """Returns objective, divergence and interval of each measured point of a bed."""
  verdicts = results["verdicts"]
  names = {f"E23, {bed}, {sampler}: {name} needs no recomputation": name for sampler in rules.SAMPLERS[bed] for name in rules.OBJECTIVES}
  rows = [(name, verdicts[rule]) for rule, name in names.items() if verdicts.get(rule, {}).get("interval")]
  rows += _of_e16() if rows and bed == "short" else []
  return [(name, max(row["gap"], EXACT), row["interval"]) for name, row in rows]


def _of_e16() -> Iterator[tuple[str, Mapping[str, Any]]]:
  """Yields the points of E16's second run, on the same bed with the same bands and other seeds."""
  path = pathlib.Path(precision.__file__).parent / "results.json"
  verdicts = from_json(path.read_text())["verdicts"]
  for k3 in before.MISMATCHES:
    for name, of_e16 in (("grpo", "grpo"), ("gspo", "gspo 15 %"), ("sapo", "sapo")):
      yield name, verdicts[f"E16, k3 {k3}: {of_e16} needs no recomputation"]
