"""Figures of the routing-replay ablation, drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.ablations.plots import BLACK, BLUE, GREEN, GREY, ORANGE, letter, new_figure, save
from experiments.ablations.routing_replay import rules
from experiments.ablations.routing_replay.measures import mean_of, where

_SHADES = ("#a6cbe3", "#5ba3cf", "#1f6fb2", "#08234f")
_ARMS = {"none": (ORANGE, "o", "no replay"), "R2": (BLUE, "s", "R2"), "R3": (GREEN, "^", "R3")}
_GROUPS = ((4, rules.RATE), (1, rules.RATE), (4, rules.HOT_RATE))
"""Updates per rollout batch and learning rate of the groups of arms that are compared."""


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws the figures."""
  with new_figure(height=4.4) as figure:
    _drift(figure, results["updates"])
    save(figure, folder, "expert_drift", formats)
  with new_figure(height=4.4) as figure:
    _mismatch(figure, results["rollouts"], results["spreads"])
    save(figure, folder, "sampler_mismatch", formats)
  with new_figure(height=4.4) as figure:
    _training(figure, results)
    save(figure, folder, "training", formats)


def seed_means(rows: Sequence[Mapping], x: str, y: str) -> tuple[list, np.ndarray]:
  """Averages y at each place of the x axis for each seed.

  Returns:
    The places on the x axis, and the means, [places, seeds].
  """
  places, seeds = (sorted({row[name] for row in rows}) for name in (x, "seed"))
  return places, np.array([[mean_of(y)(where(rows, seed=seed, **{x: place})) for seed in seeds] for place in places])


def _band(axes: Any, rows: Sequence[Mapping], x: str, y: str, color: str, **style: Any) -> None:
  """Draws the mean over the seeds, and their range."""
  if not rows:
    return
  places, values = seed_means(rows, x, y)
  axes.fill_between(places, values.min(axis=1), values.max(axis=1), color=color, alpha=0.15, linewidth=0)
  axes.plot(places, values.mean(axis=1), color=color, **({"marker": "o"} | style))


def _percent(axes: Any, label: str) -> None:
  axes.yaxis.set_major_formatter(lambda x, _: f"{100 * x:.3g} %")
  axes.set_ylabel(label)


def _by_rollout(axes: Any) -> None:
  axes.set_xlabel("rollout batch")
  axes.set_xticks((1, 4, 8, 12))


def _rate(rate: float) -> str:
  digits, power = f"{rate:.0e}".split("e")
  return rf"${digits}\cdot10^{{{int(power)}}}$"


def _drift(figure: Any, rows: Sequence[Mapping]) -> None:
  (by_update, by_depth), (by_layer, since) = figure.subplots(2, 2)
  rates, depths = sorted({row["learning_rate"] for row in rows}), sorted({row["depth"] for row in rows})
  middle = depths[len(depths) // 2]
  for rate, color in zip(rates, _SHADES[-len(rates) :], strict=True):
    rows_of_rate = where(rows, learning_rate=rate)
    _band(by_update, where(rows_of_rate, depth=middle), "update", "change", color, label=_rate(rate))
    _band(by_depth, rows_of_rate, "depth", "change", color)
    _band(since, where(rows_of_rate, depth=middle), "update", "since_start", color)
  for axes in (by_update, by_depth):
    axes.axhline(rules.PAPER_CHANGE, color=BLACK, linestyle=":", linewidth=1)
    axes.set_yscale("log")
    axes.set_ylim(1e-3, 0.6)
    _percent(axes, "changed by an update")
  place = dict(transform=by_update.get_yaxis_transform(), ha="right", va="bottom", fontsize=7)
  by_update.text(0.98, rules.PAPER_CHANGE * 1.12, "the paper's 10 %", **place)
  by_depth.set_xscale("log", base=2)
  by_depth.set_xticks(depths, [str(depth) for depth in depths])
  by_depth.set_xlabel("layers of the model")
  letter(by_update, "a", f"activated experts, {middle} layers")
  letter(by_depth, "b", "against depth, mean over the updates")
  for depth, color in zip(depths, _SHADES[-len(depths) :], strict=True):
    flat = [
      {"seed": row["seed"], "layer": layer, "change": change}
      for row in where(rows, depth=depth, learning_rate=rules.DRIFT_RATE)
      for layer, change in enumerate(row["layers"], start=1)
    ]
    _band(by_layer, flat, "layer", "change", color, label=f"{depth} layers")
  letter(by_layer, "c", f"in each layer, learning rate {_rate(rules.DRIFT_RATE)}")
  by_layer.set_xlabel("layer")
  by_layer.set_xticks(range(1, depths[-1] + 1))
  by_layer.set_ylim(bottom=0)
  _percent(by_layer, "changed by an update")
  by_layer.legend(loc="lower right")
  letter(since, "d", f"since before the first update, {middle} layers")
  since.set_ylim(bottom=0)
  _percent(since, "changed since the start")
  for axes in (by_update, since):
    axes.set_xlabel("update")
  _legend(figure, by_update, title="learning rate", title_fontsize=7)


def _legend(figure: Any, axes: Any, **options: Any) -> None:
  handles, labels = axes.get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=max(len(handles), 1), **options)


def _points(axes: Any, rows: Sequence[Mapping], name: str) -> None:
  """Draws a quantity of each arm, with large marks for the means and dots for the seeds."""
  for place, (updates, rate) in enumerate(_GROUPS):
    for offset, (replay, (color, marker, _)) in zip((-0.24, 0, 0.24), _ARMS.items(), strict=True):
      rows_of_arm = where(rows, updates=updates, rate=rate, replay=replay, sampler="bfloat16")
      if rows_of_arm:
        _, values = seed_means(rows_of_arm, "updates", name)
        axes.plot([place + offset] * values.size, values[0], ".", color=color, markersize=4, alpha=0.5, clip_on=False)
        axes.plot(place + offset, values.mean(), marker, color=color, markersize=5, clip_on=False)
  axes.grid(axis="x", visible=False)
  axes.set_xlim(-0.5, len(_GROUPS) - 0.5)
  axes.set_xticks(range(len(_GROUPS)), [f"N = {updates}\n{_rate(rate)}" for updates, rate in _GROUPS])


def _mismatch(figure: Any, rollouts: Sequence[Mapping], spreads: Sequence[Mapping]) -> None:
  (divergence, far, change), (tokens, sequences, largest) = figure.subplots(2, 3)
  _points(divergence, rollouts, "k3")
  for place, (updates, rate) in enumerate(_GROUPS):
    _, values = seed_means(where(rollouts, updates=updates, rate=rate, replay="R3"), "updates", "k3_live")
    divergence.plot(place + 0.24, values.mean(), "^", color=GREEN, markersize=5, fillstyle="none")
  divergence.set_yscale("log")
  divergence.set_ylim(1e-5, 2e-3)
  divergence.set_ylabel("nats a token")
  letter(divergence, "a", r"k3-KL($\mu\,\Vert\,\pi_{old}$)")
  _points(far, rollouts, "f2")
  far.set_ylim(bottom=0)
  _percent(far, "of the tokens")
  letter(far, "b", r"F(2) of $\pi_{old}/\mu$")

  main = where(rollouts, updates=4, rate=rules.RATE, sampler="bfloat16")
  for replay, (color, marker, label) in _ARMS.items():
    _band(change, where(main, replay=replay), "rollout", "sampler_change", color, marker=marker, label=label)
  _band(change, where(rollouts, sampler="float32"), "rollout", "sampler_change", GREY, marker=None, linestyle="--", label="float32 sampler")
  _by_rollout(change)
  change.set_ylim(bottom=0)
  _percent(change, "of the activated experts")
  letter(change, "c", "sampler and learner differ")

  # After the last update no response is unseen, so only earlier updates count.
  late = [row for row in where(spreads, updates=4, rate=rules.RATE, sampler="bfloat16") if row["update"] < row["updates"]]
  labels = {"std_log_r": "std(log r) (nats)", "std_log_s": "std(log s) (nats)", "max_r": "max r"}
  for axes, (name, label) in zip((tokens, sequences, largest), labels.items(), strict=True):
    for replay, (color, marker, _) in _ARMS.items():
      view = "live" if replay == "none" else "replay"
      _band(axes, where(late, replay=replay, view=view), "update", name, color, marker=marker)
    _band(axes, where(late, replay="none", view="replay"), "update", name, ORANGE, marker="x", linestyle=":")
    axes.set_xticks(sorted({row["update"] for row in late}))
    axes.set_xlabel("updates since the rollout")
    axes.set_ylim(bottom=1 if name == "max_r" else 0)
    axes.set_ylabel(label)
  letter(tokens, "d", "token ratios")
  letter(sequences, "e", "sequence ratios")
  letter(largest, "f", "largest token ratio")
  change.plot([], [], color=ORANGE, marker="x", linestyle=":", label="R2's routes, weights of no replay")
  _legend(figure, change)


def _training(figure: Any, results: Mapping[str, Any]) -> None:
  (wide, single, hot), (ends, change, largest) = figure.subplots(2, 3)
  rollouts, spreads = results["rollouts"], results["spreads"]
  for axes, (updates, rate), name in zip((wide, single, hot), _GROUPS, "abc", strict=True):
    rows = where(rollouts, updates=updates, rate=rate)
    for replay, (color, marker, label) in _ARMS.items():
      _band(axes, where(rows, replay=replay, sampler="bfloat16"), "rollout", "reward", color, marker=marker, label=label)
    _band(axes, where(rows, sampler="float32"), "rollout", "reward", GREY, marker=None, linestyle="--", label="no replay, float32 sampler")
    _by_rollout(axes)
    axes.set_ylim(0, 0.5)
    _percent(axes, "responses that are right")
    letter(axes, name, f"N = {updates}, rate {_rate(rate)}")
  _points(ends, results["ends"], "end")
  start = where(results["ends"], updates=4, rate=rules.RATE, replay="none", sampler="bfloat16")
  ends.axhline(mean_of("start")(start), color=BLACK, linestyle=":", linewidth=1)
  ends.set_ylim(0, 0.5)
  _percent(ends, "held-out accuracy")
  letter(ends, "d", "at the end (dotted: start)")
  for replay, (color, marker, _) in _ARMS.items():
    for rate, style in ((rules.RATE, "-"), (rules.HOT_RATE, "--")):
      rows = where(spreads, updates=4, rate=rate, replay=replay, sampler="bfloat16", view="live")
      _band(change, rows, "rollout", "change", color, marker=marker, linestyle=style)
      view = "live" if replay == "none" else "replay"
      rows = where(spreads, updates=4, rate=rate, replay=replay, sampler="bfloat16", view=view, update=3)
      _band(largest, rows, "rollout", "max_r", color, marker=marker, linestyle=style)
  change.set_ylim(bottom=0)
  _percent(change, "changed by an update")
  largest.set_yscale("log")
  largest.set_ylim(1, 1000)
  largest.set_ylabel("max r after 3 updates")
  for axes, name, title, place in ((change, "e", "activated experts", "center right"), (largest, "f", "largest token ratio", "upper left")):
    _by_rollout(axes)
    lines = [axes.plot([], [], color=GREY, linestyle=style)[0] for style in ("-", "--")]
    axes.legend(lines, [f"rate {_rate(rate)}" for rate in (rules.RATE, rules.HOT_RATE)], loc=place, handlelength=1.6)
    letter(axes, name, title)
  _legend(figure, wide)
