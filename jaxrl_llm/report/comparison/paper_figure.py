"""The curves of several arms as a figure for a paper, from `metrics.jsonl` alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.report import figures
from jaxrl_llm.report.comparison.arms import Arm
from jaxrl_llm.report.comparison.curves import PANELS, Panel, curve
from jaxrl_llm.report.comparison.runs import X_AXES
from jaxrl_llm.report.data import is_number

WIDTHS = {"column": figures.COLUMN_WIDTH, "full": figures.FULL_WIDTH}
"""Widths of a figure by name, in inches."""

DEFAULT_METRICS = ("eval/accuracy", "critic/rewards/mean", "actor/entropy")

_PANEL_HEIGHT = 1.75  # Inches.
_NUM_MARKERS = 6  # Per line: enough to distinguish it in grey.


def choose_panels(arms: Sequence[Arm], metrics: Sequence[str]) -> list[Panel]:
  """Returns a panel for each metric in the arms' rows.

  Raises:
    ValueError: If no run has one of the metrics. A line for each metric names the likely one.
  """
  known: dict[str, str] = {}
  for row in (row for arm in arms for run in arm.runs for row in run.rows):
    for name, value in row.items():
      # If several phases have a metric, that of RL is drawn, which comes after the others.
      if is_number(value) and name != "step" and known.get(name) != "rl":
        known[name] = row["phase"]
  titled = {panel.metric: panel for panel in PANELS}
  problems = []
  for name in metrics:
    if name not in known:
      hint = did_you_mean(name, known) or did_you_mean(name, [x for x in known if x.endswith(name)], cutoff=0)
      examples = (
        f"; expected one of {len(known)}, such as {', '.join(sorted(known)[:3])}"
        if known
        else ", nor any other metric"
      )
      problems.append(f"metric {name!r}: no run has it{hint or examples}")
  if problems:
    raise ValueError("\n".join(problems))
  return [titled.get(name, Panel("", name, name))._replace(group="Chosen", phase=known[name]) for name in metrics]


def draw(arms: Sequence[Arm], metrics: Sequence[str], path: Path, *, axis: str = "step", width: str = "full") -> Path:
  """Draws mean and 95 % band over seeds of each metric, and returns `path`.

  Each arm has a line with its own colour, dashes and marker. An arm of one seed has no band.

  Args:
    arms: Arms, as returned by `page.load_arms`.
    metrics: Names of the metrics, one panel each.
    path: File of the figure, in the format of its ending (`figures.FORMATS`).
    axis: Key of `runs.X_AXES`.
    width: Key of `WIDTHS`.

  Raises:
    ValueError: If a metric or the format is unknown, or if no run has data for the x axis.
    MissingPackageError: If matplotlib is not installed.
  """
  panels = choose_panels(arms, metrics)
  columns = min(len(panels), 3 if width == "full" else 1)
  rows = -(-len(panels) // columns)
  legend_columns = _legend_columns(arms, width)
  legend_rows = -(-len(arms) // legend_columns) if len(arms) > 1 else 0
  with figures.new_figure(rows * _PANEL_HEIGHT + 0.16 * legend_rows, WIDTHS[width]) as figure:
    grid = figure.subplots(rows, columns, squeeze=False)
    lines: dict[int, Any] = {}
    for axes, panel in zip(grid.flat, panels, strict=False):
      lines |= _draw_panel(axes, panel, arms, axis)
    for axes in grid.flat[len(panels) :]:
      axes.set_visible(False)
    if not lines:
      raise ValueError(f"--x={axis}: no run has {X_AXES[axis]} with {' or '.join(metrics)}; use --x=step")
    if len(arms) > 1:
      chosen = sorted(lines)
      handles, names = [lines[i] for i in chosen], [arms[i].name for i in chosen]
      figure.legend(handles, names, loc="outside lower center", ncols=legend_columns, handlelength=3)
    return figures.save_as(figure, path)


def _legend_columns(arms: Sequence[Arm], width: str) -> int:
  """Returns the number of legend entries per row.

  A character of 7 points is about 0.06 inches wide, and a line with its gaps 0.6 inches.
  """
  entry = 0.6 + 0.06 * max(len(arm.name) for arm in arms)
  return max(1, min(len(arms), int(WIDTHS[width] / entry)))


def _draw_panel(axes: Any, panel: Panel, arms: Sequence[Arm], axis: str) -> dict[int, Any]:
  axes.set_title(panel.title + (f" ({panel.unit})" if panel.unit not in ("", "%") else ""))
  axes.set_xlabel("training step" if panel.phase == "reward_model" else X_AXES[axis])
  lines, means, bounds = {}, [], []
  for i, arm in enumerate(arms):
    drawn = curve(arm.runs, panel.metric, panel.phase, axis)
    if drawn is None:
      continue
    style = figures.line_style(i)
    every = max(1, len(drawn.x) // _NUM_MARKERS)
    # The markers of each arm are shifted, so that they do not overlap.
    (lines[i],) = axes.plot(
      drawn.x, drawn.mean, **style, markevery=(i * every // max(len(arms), 1) % every, every), zorder=3
    )
    known = np.isfinite(drawn.low)
    axes.fill_between(
      drawn.x[known], drawn.low[known], drawn.high[known], color=style["color"], alpha=0.16, linewidth=0
    )
    means += drawn.mean.tolist()
    bounds += [*drawn.low[known].tolist(), *drawn.high[known].tolist()]
  if not lines:
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=figures.GREY)
    return lines
  if panel.unit == "%":
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
  axes.set_ylim(*_limits(means, bounds, panel))
  if axis == "step":
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
  if axis != "step" and max(line.get_xdata()[-1] for line in lines.values()) >= 1e4:
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:.3g}M" if abs(value) >= 1e6 else f"{value / 1e3:.3g}k" if value else "0")
  return lines


def _limits(means: Sequence[float], bounds: Sequence[float], panel: Panel) -> tuple[float, float]:
  """Returns the limits of the y axis.

  Bands of two or three seeds can be very wide. The limits cut them off before they flatten the
  curves.
  """
  low, high = min(means), max(means)
  air = 0.75 * (high - low) or 0.25 * abs(high) or 1.0
  bottom = min([low, *(max(bound, low - air) for bound in bounds)])
  top = max([high, *(min(bound, high + air) for bound in bounds)])
  margin = 0.05 * (top - bottom)
  floor = 0.0 if low >= 0 and (panel.zero or bottom - margin < 0) else bottom - margin
  return floor, top + margin
