"""Figures of the ratio lab, drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.ablations.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, letter, new_figure, save
from experiments.ablations.ratio_lab import measures, rules

_FLOOR = 1e-5  # Lower end of the logarithmic axis of clipped fractions, which cannot show 0.
_SHADES = ("#9ecae1", "#4292c6", "#08306b")


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws both figures."""
  with new_figure(height=4.5) as figure:
    _spread(figure, results)
    save(figure, folder, "ratio_spread", formats)
  with new_figure(height=2.75) as figure:
    _clip(figure, results)
    save(figure, folder, "clip_fraction", formats)


def curve(rows: Sequence[Mapping], x: str, y: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Summarizes y over the seeds at each place of the x axis.

  Returns:
    The places on the x axis, and the mean, smallest and largest y at each of them.
  """
  places = sorted({row[x] for row in rows})
  values = [[row[y] for row in rows if row[x] == place] for place in places]
  return np.array(places), *(np.array([f(v) for v in values]) for f in (np.mean, np.min, np.max))


def _band(axes: Any, rows: Sequence[Mapping], x: str, y: str, color: str, label: str | None = None, **style: Any) -> None:
  places, mean, low, high = curve(rows, x, y)
  axes.fill_between(places, low, high, color=color, alpha=0.18, linewidth=0)
  axes.plot(places, mean, color=color, label=label, **({"marker": "o"} | style))


def _lengths(axes: Any, rows: Sequence[Mapping]) -> None:
  places = sorted({row["tokens"] for row in rows})
  axes.set_xscale("log", base=2)
  axes.set_xticks(places, [str(place) for place in places])
  axes.set_xlabel("response length T (tokens)")


def _spread(figure: Any, results: Mapping[str, Any]) -> None:
  prefixes, drifts = results["prefixes"], results["drifts"]
  (variance, spread), (largest, ess) = figure.subplots(2, 2)
  every = sorted({row["updates"] for row in prefixes})
  shown = [every[0], *([rules.PAPER_UPDATES] if rules.PAPER_UPDATES in every[1:-1] else []), every[-1]]
  for updates, color in zip(shown, _SHADES[-len(shown) :], strict=True):
    rows = [row for row in prefixes if row["updates"] == updates]
    _band(variance, rows, "tokens", "var_rho", color, f"{updates} update" + "s" * (updates > 1))
    _band(largest, rows, "tokens", "mean_max_r", color)
    _band(ess, rows, "tokens", "ess_sequences", color)
    places, *_ = curve(rows, "tokens", "var_rho")
    std_z = curve(rows, "tokens", "std_z")[1][-1]
    variance.plot(places, np.expm1(places * std_z**2), color=color, linestyle=":", linewidth=1)
    ess.plot(*curve(rows, "tokens", "ess_tokens")[:2], color=color, linestyle="--", linewidth=1)
  letter(variance, "a", r"variance of the sequence's weight $\rho=r_1\cdots r_T$")
  variance.set_yscale("log")
  variance.set_ylabel(r"Var($\rho$)")
  handles, labels = variance.get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
  independent = variance.plot([], [], color=GREY, linestyle=":", linewidth=1)
  variance.legend(independent, [r"$e^{T\,\sigma^2}-1$: independent tokens"], loc="lower right")

  at_paper = [row for row in prefixes if row["updates"] == rules.PAPER_UPDATES]
  for kind, color, marker, label in (("shared", PINK, "s", "shared drift"), ("autoregressive", ORANGE, "^", "autoregressive drift")):
    _band(spread, [row for row in drifts if row["kind"] == kind], "tokens", "std_log_s", color, f"half {label}", marker=marker)
  _band(spread, at_paper, "tokens", "std_log_s", BLUE, "measured")
  places, mean, *_ = curve(at_paper, "tokens", "std_log_s")
  spread.plot(places, mean[0] * np.sqrt(places[0] / places), color=BLACK, linestyle=":", linewidth=1, label=r"$\propto T^{-1/2}$")
  letter(spread, "b", rf"spread of $s=\rho^{{1/T}}$ after {rules.PAPER_UPDATES} updates")
  spread.set_yscale("log")
  spread.set_ylim(mean.min() / 5, mean.max() * 4)
  spread.set_ylabel("std(log s) (nats)")
  spread.legend(loc="lower left")

  letter(largest, "c", "largest token ratio of a response")
  largest.set_ylabel(r"mean over responses of max$_t\,r_t$")
  letter(ess, "d", "effective sample size")
  weights = [ess.plot([], [], color=GREY, linestyle=style)[0] for style in ("-", "--")]
  ess.legend(weights, [r"sequences, weights $\rho$", "tokens, weights r"], loc="lower left")
  ess.set_ylim(0, 1.04)
  ess.set_ylabel("fraction of the sample")
  for axes in (variance, spread, largest, ess):
    _lengths(axes, prefixes)


_RULES = (
  ("gspo_x0.3", "#9ecae1", "v", "GSPO, band × 0.3"),
  ("gspo_x1", "#4292c6", "o", "× 1"),
  ("gspo_x3", "#08306b", "D", "× 3"),
  ("gspo_matched", GREEN, "^", "as wide as GRPO's"),
  ("grpo", ORANGE, "s", "GRPO, 0.2 / 0.27"),
)
"""Column of `results.json`, colour, marker and label of each rule, for all panels."""


def _clip(figure: Any, results: Mapping[str, Any]) -> None:
  runs = results["runs"]
  lengths = sorted({row["tokens"] for row in runs})
  rate = rules.LEARNING_RATE if any(row["learning_rate"] == rules.LEARNING_RATE for row in runs) else runs[0]["learning_rate"]
  middle = rules.OTHER_AT if rules.OTHER_AT in lengths else lengths[0]
  by_updates, by_length, by_drift = figure.subplots(1, 3)
  main = [row for row in runs if row["learning_rate"] == rate]
  for axes, rows, x in (
    (by_updates, [row for row in main if row["tokens"] == middle], "updates"),
    (by_length, [row for row in main if row["updates"] == rules.PAPER_UPDATES], "tokens"),
  ):
    for name, color, marker, label in _RULES:
      places, mean, *_ = curve(rows, x, name)
      seen = [(row[x], row[name]) for row in rows if row[name] > 0]
      axes.plot([place for place, _ in seen], [value for _, value in seen], ".", color=color, markersize=2.5, alpha=0.5)
      axes.plot(places, np.where(mean > 0, mean, np.nan), color=color, marker=marker, label=label)
    axes.set_yscale("log")
    axes.set_ylim(_FLOOR, 1)
    axes.set_ylabel("fraction of tokens clipped")
  by_updates.set_xscale("log", base=2)
  ticks = sorted({row["updates"] for row in main})
  by_updates.set_xticks(ticks, [str(tick) for tick in ticks])
  by_updates.set_xlabel("updates on one rollout batch")
  letter(by_updates, "a", f"{middle} tokens")
  _lengths(by_length, main)
  letter(by_length, "b", f"{rules.PAPER_UPDATES} updates")

  table = measures.clip_table(runs)
  for band, color, marker, _ in _RULES[:-1]:
    cells = [cell for cell in table if cell["band"] == band and cell["ratio"] is not None]
    by_drift.plot([c["grpo"] for c in cells], [c["ratio"] for c in cells], marker, color=color, markersize=3, alpha=0.85)
  by_drift.axhline(rules.E1_FACTOR, color=BLACK, linestyle=":", linewidth=1)
  by_drift.set(xscale="log", yscale="log", xlim=(3e-6, 0.2), ylim=(0.1, 2e5))
  by_drift.text(4.5e-6, rules.E1_FACTOR * 0.8, "rule: at least 10", va="top", fontsize=7)
  by_drift.set_xlabel("GRPO's clipped fraction")
  by_drift.set_ylabel("GSPO's over GRPO's")
  letter(by_drift, "c", "all lengths, rates, updates")
  handles, labels = by_updates.get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
