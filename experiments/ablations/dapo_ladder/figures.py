"""Figures of the ladder, drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.ablations.dapo_ladder.bed import RUNGS
from experiments.ablations.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, letter, new_figure, save
from experiments.ablations.routing_replay.measures import where
from experiments.judging import interval, paired, solved

_ARMS = {
  "base": (GREY, "o", "base"),
  "filter": (SKY, "s", "+ overlong filter"),
  "clip_higher": (BLUE, "^", "+ clip-higher"),
  "soft": (GREEN, "D", "+ soft penalty"),
  "token": (YELLOW, "v", "+ token-level loss"),
  "dynamic": (ORANGE, "P", "+ dynamic sampling"),
  "clip_wide": (BLACK, "x", "clip-higher at 0.4"),
  "punish": (PINK, "*", "clip-higher, -1 if cut"),
}
"""Colour, marker and name of each arm."""


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the figures."""
  with new_figure(height=2.9) as figure:
    _ladder(figure, results)
    save(figure, folder, "ladder", formats)
  with new_figure(height=4.6) as figure:
    _mechanisms(figure, results)
    save(figure, folder, "mechanisms", formats)


def curve(rows: Sequence[Mapping], y: str) -> tuple[list[int], np.ndarray]:
  """Arranges a quantity as a table with one row per step and one column per seed.

  Args:
    rows: Rows with `step`, `seed` and the quantity.
    y: Name of the quantity.

  Returns:
    The steps, and the values, [steps, seeds]. A value is NaN if a seed has none at a step.
  """
  steps, seeds = (sorted({row[name] for row in rows}) for name in ("step", "seed"))
  at = {(row["step"], row["seed"]): row[y] for row in rows}
  value = lambda place: np.nan if at.get(place) is None else at[place]
  return steps, np.array([[value((step, seed)) for seed in seeds] for step in steps], float)


def _band(axes: Any, rows: Sequence[Mapping], arm: str, y: str, *, alpha: float = 0.13, **style: Any) -> None:
  """Draws the mean over the seeds, and their range unless alpha is 0."""
  rows_of_arm, (color, marker, label) = where(rows, rung=arm), _ARMS[arm]
  if not rows_of_arm:
    return
  steps, values = curve(rows_of_arm, y)
  kept = ~np.isnan(values).all(axis=1)
  steps, values = np.array(steps)[kept], values[kept]
  axes.fill_between(steps, np.nanmin(values, axis=1), np.nanmax(values, axis=1), color=color, alpha=alpha, linewidth=0)
  axes.plot(steps, np.nanmean(values, axis=1), color=color, **(dict(marker=marker, label=label) | style))


def _percent(axes: Any, label: str, *, along: str = "y") -> None:
  axis = getattr(axes, f"{along}axis")
  axis.set_major_formatter(lambda x, _: f"{100 * x:.3g} %")
  axis.set_label_text(label)


def _ladder(figure: Any, results: Mapping[str, Any]) -> None:
  ends, steps, differences = figure.subplots(1, 3, width_ratios=(1, 1.05, 0.95))
  arms = [arm for arm in _ARMS if where(results["ends"], rung=arm)]
  for place, arm in enumerate(arms):
    color, marker, _ = _ARMS[arm]
    at_seeds = list(solved(results["ends"], rung=arm).values())
    at = interval(at_seeds)
    ends.plot(at_seeds, [place + 0.22] * len(at_seeds), ".", color=color, markersize=4, alpha=0.6)
    ends.plot([at["low"], at["high"]], [place] * 2, color=color)
    ends.plot(at["mean"], place, marker, color=color, markersize=5)
  ends.set_yticks(range(len(arms)), [_ARMS[arm][2] for arm in arms])
  ends.invert_yaxis()
  _percent(ends, "held-out accuracy", along="x")
  letter(ends, "a", "at the end")

  for arm in RUNGS:
    # Six overlapping bands are unreadable. The first panel shows the seeds.
    _band(steps, results["evals"], arm, "accuracy", alpha=0)
  steps.set_xlabel("RL step")
  steps.locator_params(axis="x", integer=True)
  steps.set_ylim(*_around([row["accuracy"] for row in results["evals"] if row["rung"] in RUNGS]))
  _percent(steps, "held-out accuracy")
  letter(steps, "b", "against steps, mean")

  pairs = [*zip(RUNGS[1:], RUNGS, strict=False), ("dynamic", "base")]
  for place, (more, less) in enumerate(pairs):
    color, marker, _ = _ARMS[more] if less != "base" or more == "filter" else (BLACK, "o", "")
    at = interval(paired(*(solved(results["ends"], rung=arm) for arm in (more, less))))
    differences.plot([at["low"], at["high"]], [place] * 2, color=color)
    differences.plot(at["mean"], place, marker, color=color, markersize=5, markeredgecolor="white", markeredgewidth=0.5)
  differences.axvline(0, color=BLACK, linewidth=0.8)
  names = [_ARMS[more][2] for more, _ in pairs[:-1]]
  differences.set_yticks(range(len(pairs)), [*names, "all of them"])
  differences.invert_yaxis()
  differences.xaxis.set_major_formatter(lambda x, _: f"{100 * x:+.3g}" if x else "0")
  differences.set_xlabel("points of accuracy")
  letter(differences, "c", "what each adds")


def _around(values: Sequence[float]) -> tuple[float, float]:
  return 0.9 * min(values), max(values)


def _mechanisms(figure: Any, results: Mapping[str, Any]) -> None:
  (entropy, lengths, cut), (mixed, tokens, clipped) = figure.subplots(2, 3)
  for arm in ("filter", "clip_higher", "clip_wide"):
    _band(entropy, results["steps"], arm, "entropy", markevery=4)
    _band(clipped, results["steps"], arm, "clip_up", markevery=4)
  entropy.set_ylabel("nats a token")
  entropy.set_ylim(bottom=0)
  letter(entropy, "a", "E8: entropy")
  clipped.set_ylim(bottom=0)
  _percent(clipped, "of the tokens with A > 0")
  letter(clipped, "f", "E8: clipped from above")

  for arm in ("soft", "token"):
    _band(lengths, results["looks"], arm, "tokens_wrong", markevery=4)
    _band(lengths, results["looks"], arm, "tokens_right", markevery=4, linestyle="--", label=None)
  lengths.set_ylabel("tokens a response")
  letter(lengths, "b", "E9: wrong, right (dashed)")

  for arm in ("base", "filter", "clip_higher", "soft", "punish"):
    _band(cut, results["steps"], arm, "truncated", markevery=4)
  cut.set_ylim(bottom=0)
  _percent(cut, "of the responses")
  letter(cut, "c", "E11: cut at the budget")

  for arm in ("token", "dynamic"):
    _band(mixed, results["looks"], arm, "mixed", markevery=4)
    color, marker, _ = _ARMS[arm]
    trials = [_against_tokens(results, arm, row["seed"]) for row in where(results["ends"], rung=arm)]
    drawn, accuracy = (np.mean([trial[i] for trial in trials], axis=0) for i in (0, 1))
    for trial in trials:
      tokens.plot(*trial, color=color, linewidth=0.6, alpha=0.45)
    tokens.plot(drawn, accuracy, color=color, marker=marker)
  mixed.set_ylim(0, 1.02)
  _percent(mixed, "of the groups of a batch")
  letter(mixed, "d", "E10: with right and wrong")
  tokens.set_xlabel("response tokens drawn (thousands)")
  tokens.set_ylim(bottom=0)
  _percent(tokens, "held-out accuracy")
  letter(tokens, "e", "E10: against tokens")
  for axes in (entropy, lengths, cut, mixed, clipped):
    axes.set_xlabel("RL step")
    axes.locator_params(axis="x", integer=True)
  _legend(figure, (cut, mixed, entropy))


def _against_tokens(results: Mapping[str, Any], arm: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
  steps, evals = (sorted(where(results[name], rung=arm, seed=seed), key=lambda row: row["step"]) for name in ("steps", "evals"))
  drawn = np.cumsum([0.0, *(row["drawn"] for row in steps)]) / 1000
  return drawn[[row["step"] for row in evals]], np.array([row["accuracy"] for row in evals])


def _legend(figure: Any, panels: Sequence[Any]) -> None:
  handles = {}
  for axes in panels:
    handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
  handles = {label: handles[label] for _, _, label in _ARMS.values() if label in handles}
  figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
