"""The learning curves of one run as a figure: two rows of three panels."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.report import figures
from jaxrl_llm.report.data import series
from jaxrl_llm.workdir import metrics


def write_figure(workdir: str | os.PathLike, path: str | os.PathLike) -> Path:
  """Draws a run's learning curves in two rows of three panels, and returns `path`.

  The figure is as wide as both columns of a paper.

  Args:
    workdir: Folder of the run.
    path: Image to write, in the format of its ending (.png, .pdf or .svg).

  Raises:
    FileNotFoundError: If `workdir` has no metrics.
    MissingPackageError: If matplotlib is not installed.
    ValueError: If the format is another one.
  """
  path, rows = Path(path), metrics.read_rows(Path(workdir) / "metrics.jsonl")
  if not rows:
    raise FileNotFoundError(f"{Path(workdir) / 'metrics.jsonl'}: no metrics to draw")
  with figures.new_figure(3.9) as figure:
    for axes, panel in zip(figure.subplots(2, 3).flat, _panels(rows), strict=True):
      _draw_panel(axes, *panel)
    return figures.save_as(figure, path)


def _panels(rows: Sequence[Mapping[str, Any]]) -> list[tuple]:
  """Returns title, rows, lines as (label, metric name) and band of each panel."""
  rl, evals = ([row for row in rows if row["phase"] == phase] for phase in ("rl", "eval"))
  gate = ("Soft gate", rl, (("positive advantage", "sapo/gate_pos"), ("negative advantage", "sapo/gate_neg")), None)
  clip = ("Clip fraction", rl, (("", "actor/pg_clipfrac"),), None)
  return [
    ("Held-out accuracy", evals, (("", "eval/accuracy"),), ("eval/accuracy_low", "eval/accuracy_high")),
    ("Reward", rl, (("", "critic/rewards/mean"),), None),
    ("Entropy (nats)", rl, (("", "actor/entropy"),), None),
    gate if any("sapo/gate_pos" in row for row in rl) else clip,
    ("Response length (tokens)", rl, (("mean", "response_length/mean"), ("max", "response_length/max")), None),
    ("Importance ratio", rl, (("99th percentile", "ratio/p99"), ("mean", "ratio/mean")), None),
  ]


def _draw_panel(axes: Any, title: str, rows: Sequence[Mapping], lines: Sequence[tuple[str, str]], band: tuple[str, str] | None) -> None:
  axes.set_title(title)
  axes.set_xlabel("RL step")
  for i, (label, name) in enumerate(lines):
    style = figures.line_style(i)
    steps, values = series(rows, name)
    if not steps:
      continue
    axes.plot(steps, values, label=label or None, **style | ({} if len(steps) < 25 else {"marker": None}))
    bounded = [row for row in rows if all(isinstance(row.get(bound), int | float) for bound in band)] if band else []
    if bounded:
      low, high = ([row[bound] for row in bounded] for bound in band)
      axes.fill_between([row["step"] for row in bounded], low, high, color=style["color"], alpha=0.16, linewidth=0, label="interval")
  if title == "Held-out accuracy":
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
  if not axes.lines:
    axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color=figures.GREY)
  elif axes.get_legend_handles_labels()[1]:
    axes.legend()
