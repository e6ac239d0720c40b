"""Figures of the objective shapes."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.ablations.objective_shapes.coefficients import OLD_PROBABILITY
from experiments.ablations.objective_shapes.studies import OUTLIER_COUNTS
from experiments.ablations.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, SKY, letter, new_figure, save, two_sided

ORDER = (
  "reinforce", "sft", "cispo", "minpro", "topr", "vespo", "maspo",
  "ppo", "grpo", "dr_grpo", "dapo", "fipo", "reinforce_plus_plus", "minirl",
  "gspo", "gspo_token", "luspo", "gmpo", "rloo", "cppo",
  "dppo_tv", "dppo_kl", "sapo", "dro", "clip_cov", "kl_cov", "custom",
)  # fmt: skip
"""Order of the methods, by family. Methods that are not listed come last."""

LEVELS = {"gspo": "s", "gspo_token": "s", "luspo": "s", "gmpo": "s", "custom": "s", "rloo": r"\rho", "vespo": r"\rho", "topr": r"\rho"}
"""Symbol of the ratio on the axis for methods that weigh sequences."""


def draw(results: Mapping[str, Any], arrays: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws all figures."""
  names = [name for name in ORDER if name in arrays["curves"]]
  names += [name for name in arrays["curves"] if name not in names]
  with new_figure(height=4.9) as figure:
    _coefficients(figure, arrays["curves"], names)
    save(figure, folder, "coefficients", formats)
  with new_figure(height=4.6, width=4.4) as figure:
    _zeros(figure, results["E12"], names)
    save(figure, folder, "zero_mass", formats)
  with new_figure(height=4.4) as figure:
    _tokens(figure, results["E2"], arrays["variation"])
    save(figure, folder, "token_weights", formats)
  with new_figure(height=2.6) as figure:
    _limit(figure, results["E13"], arrays["made"], arrays["real"])
    save(figure, folder, "smooth_limit", formats)
  with new_figure(height=2.6) as figure:
    _outliers(figure, results["E14"])
    save(figure, folder, "outliers", formats)


def _title(name: str) -> str:
  return "custom: sequence, soft" if name == "custom" else name


def _coefficients(figure: Any, curves: Mapping[str, Mapping], names: Sequence[str]) -> None:
  columns = 6
  rows = math.ceil((len(names) + 1) / columns)
  panels = figure.subplots(rows, columns, sharex=True, sharey=True)
  for axes, name in zip(panels.flat, names, strict=False):
    curve = curves[name]
    ignores_sign = np.allclose(curve["negative"], -curve["positive"])
    axes.plot(curve["ratio"], curve["positive"], color=BLUE)
    if not ignores_sign:
      axes.plot(curve["ratio"], curve["negative"], color=ORANGE, linestyle=(0, (3, 1.5)))
    axes.plot([1], curve["positive"][curve["ratio"] == 1], "o", color=BLACK, markersize=3, zorder=5)
    axes.set_title(_title(name), fontsize=7)
    notes = [rf"${LEVELS[name]}$"] if name in LEVELS else []
    notes += [rf"$\pi_\mathrm{{old}}={OLD_PROBABILITY}$"] if curve["reads_probability"] else []
    notes += ["reads no A"] if ignores_sign else []
    axes.text(0.04, 0.95, ", ".join(notes), transform=axes.transAxes, fontsize=6.5, va="top", color="#4a4f57")
    axes.set_xlim(0, 3)
    axes.set_ylim(-0.1, 3.05)
    axes.set_xticks([0, 1, 2, 3])
    axes.set_yticks([0, 1, 2, 3])
  spare = list(panels.flat)[len(names) :]
  for axes in spare:
    axes.set_axis_off()
  # In a column without a panel in the last row, the last panel shows the tick labels.
  for axes in list(panels.flat)[len(names) - columns : len(names)]:
    axes.tick_params(labelbottom=True)
  handles = [
    spare[0].plot([], [], color=BLUE)[0],
    spare[0].plot([], [], color=ORANGE, linestyle=(0, (3, 1.5)))[0],
    spare[0].plot([], [], "o", color=BLACK, markersize=3)[0],
  ]
  spare[0].legend(handles, ["A > 0", "A < 0", "on-policy"], loc="center left", fontsize=8, bbox_to_anchor=(0.05, 0.5))
  figure.supxlabel(r"ratio of the policies: $r$ of the token, or $s$, $\rho$ of the sequence", fontsize=8)
  figure.supylabel(r"coefficient C of $A\,\nabla\log\pi$", fontsize=8)


def _zeros(figure: Any, zeros: Mapping[str, Any], names: Sequence[str]) -> None:
  axes = figure.subplots()
  values = np.array([zeros["fractions"][name] for name in names])
  axes.imshow(values, cmap="Blues", vmin=0, vmax=0.8, aspect="auto")
  for (row, column), value in np.ndenumerate(values):
    text = "0" if value == 0 else "<0.1" if value < 1e-3 else f"{100 * value:.1f}"
    color = GREY if value == 0 else "white" if value > 0.45 else BLACK
    axes.text(column, row, text, ha="center", va="center", fontsize=7, color=color)
  axes.set_xticks(range(len(zeros["spreads"])), [f"{spread:g}" for spread in zeros["spreads"]])
  axes.set_yticks(range(len(names)), [_title(name) for name in names])
  axes.tick_params(length=0)
  axes.grid(False)
  for side in axes.spines.values():
    side.set_visible(False)
  axes.set_xlabel("spread of log r (nats)")
  axes.set_title("tokens with |C| < 1e-6 (%)")


def _tokens(figure: Any, variant: Mapping[str, Mapping], variation: Mapping[str, np.ndarray]) -> None:
  panels = figure.subplots(2, 2, height_ratios=(1.25, 1))
  rows = min(24, len(variation["grpo"]))
  around_one = two_sided(BLUE, "#ffffff", ORANGE)
  for axes, name, label in zip(panels[0], ("grpo", "gspo"), ("a", "b"), strict=True):
    weights = np.where(variation[name][:rows] == 0, np.nan, variation[name][:rows])
    axes.set_facecolor(BLACK)  # Clipped tokens are NaN, and the background shows there.
    image = axes.imshow(weights, cmap=around_one, vmin=0.75, vmax=1.25, aspect="auto", interpolation="nearest")
    axes.grid(False)
    axes.set_xlabel("token of the response")
    axes.set_ylabel("response")
    letter(axes, label, f"{name.upper()} (black: clipped, C = 0)")
  figure.colorbar(image, ax=panels[0], label="coefficient C", pad=0.01, extend="both")

  spread, bars = panels[1]
  samples = [variation["grpo_variation"], variation["gspo_variation"]]
  parts = spread.violinplot(samples, positions=[0, 1], widths=0.7, showmedians=True)
  for body, color in zip(parts["bodies"], (ORANGE, BLUE), strict=True):
    body.set_facecolor(color)
    body.set_alpha(0.5)
  for name in ("cmedians", "cmins", "cmaxes", "cbars"):
    parts[name].set_color(BLACK)
    parts[name].set_linewidth(0.8)
  spread.set_xticks([0, 1], [f"GRPO ({len(samples[0])} responses)", f"GSPO ({len(samples[1])} not clipped)"])
  spread.set_ylim(bottom=-0.02 * max(map(np.max, samples)))
  spread.set_ylabel("std(C) / mean(C)")
  letter(spread, "c", "variation of C within a response")

  floor = 1e-17
  labels, colors = [], []
  for place, (kind, precision) in enumerate((k, p) for k in ("equal", "unequal") for p in ("float32", "float64")):
    value = variant[precision][kind]
    colors.append(SKY if precision == "float32" else BLUE)
    bars.bar(place, max(value, floor), bottom=0, color=colors[-1], width=0.6)
    text = "exactly 0" if value == 0 else f"{value:.0e}" if value < 0.01 else f"{value:.2f}"
    bars.text(place, max(value, floor) * 2, text, ha="center", va="bottom", fontsize=7)
    labels.append(f"{kind} A,\n{precision}")
  bars.set_yscale("log")
  bars.set_ylim(floor, 1e3)
  bars.set_xticks(range(4), labels)
  bars.set_ylabel("difference / gradient")
  letter(bars, "d", "gradients of GSPO and GSPO-token")


def _limit(figure: Any, limit: Mapping[str, Any], made: Mapping[str, np.ndarray], real: Mapping[int, Mapping]) -> None:
  scatter, swap, angle = figure.subplots(1, 3)
  tiny = 1e-12
  dots = dict(color=GREY, markersize=1.5, alpha=0.6, rasterized=True)
  scatter.plot(made["variance"], np.maximum(made["difference"], tiny), ".", label="made up", **dots)
  last = max(real)
  scatter.plot(
    real[last]["variance"], np.maximum(real[last]["difference"], tiny), ".", color=ORANGE, markersize=2.5,
    label=f"transformer, {last} updates", rasterized=True,
  )  # fmt: skip
  line = np.geomspace(1e-9, 10, 50)
  scatter.plot(line, line / 4, color=BLACK, linewidth=1, label=r"$\tau^2\,\mathrm{Var}/4$")
  scatter.set(xscale="log", yscale="log", xlim=(1e-5, 10), ylim=(1e-7, 1))
  scatter.set_xlabel(r"Var$_i$ of log r in a sequence (nats$^2$)")
  scatter.set_ylabel(r"$D_i$, difference of mean gates")
  scatter.legend(loc="lower right", markerscale=3, handletextpad=0.4, borderpad=0.1)
  letter(scatter, "a", "token gates against one gate")

  sparse = slice(None, None, 20)
  swap.plot(made["swap_bound"][sparse], made["swap"][sparse], ".", label="made up", **dots)
  swap.plot(line, line, color=BLACK, linewidth=1, label="error = bound")
  swap.set(xscale="log", yscale="log", xlim=(1e-9, 10), ylim=(1e-9, 2))
  swap.set_xlabel(r"bound $\frac{2\tau}{3\sqrt{3}}\,(r-1-\log r)$")
  swap.set_ylabel(r"$|w(r)-g(\log r)|$")
  swap.legend(loc="upper left", markerscale=3)
  letter(swap, "b", "r − 1 read as log r")

  rows = limit["cosines"]
  updates = sorted({row["updates"] for row in rows})
  for name, color, marker, label in (
    ("smooth_gspo", BLUE, "o", "smooth GSPO"), ("grpo", ORANGE, "s", "GRPO"), ("gspo", GREEN, "^", "GSPO, hard clip"),
  ):  # fmt: skip
    values = np.array([[row[name] for row in rows if row["updates"] == update] for update in updates])
    angle.fill_between(updates, values.min(axis=1), values.max(axis=1), color=color, alpha=0.18, linewidth=0)
    angle.plot(updates, values.mean(axis=1), color=color, marker=marker, label=label)
  angle.set_xscale("log", base=2)
  angle.set_xticks(updates, [str(update) for update in updates])
  angle.set_xlabel("updates on one rollout batch")
  angle.set_ylabel("cosine with SAPO's gradient")
  angle.set_ylim(-0.05, 1.05)
  angle.legend(loc="lower left")
  letter(angle, "c", "gradients in the weights")


def _outliers(figure: Any, outliers: Mapping[str, Any]) -> None:
  methods = (
    ("grpo", ORANGE, "s", 6, "GRPO"), ("gspo", BLUE, "o", 6, "GSPO"), ("sapo", GREEN, "^", 4.5, "SAPO"),
    ("sapo_tau5", GREEN, "", 0, r"SAPO, $\tau=5$"), ("gmpo", PINK, "v", 3.5, "GMPO"), ("cispo", BLACK, "D", 3, "CISPO"),
  )  # fmt: skip
  titles = (("positive", "a", "whole gradient, A > 0"), ("negative", "b", "whole gradient, A < 0"), ("others", "c", "other tokens, A > 0"))
  panels = figure.subplots(1, 3, sharex=True, sharey=True)
  for axes, (key, label, title) in zip(panels, titles, strict=True):
    for name, color, marker, size, text in methods:
      # Small marks lie on top of large ones, because the curves of some methods coincide.
      style = dict(linestyle="--", linewidth=1) if name == "sapo_tau5" else dict(marker=marker, markersize=size)
      axes.plot(range(len(OUTLIER_COUNTS)), outliers[name][key], color=color, label=text, **style)
    axes.set_xticks(range(len(OUTLIER_COUNTS)), [str(count) for count in OUTLIER_COUNTS])
    axes.set_xlabel("tokens with r = 2.5, of 64")
    letter(axes, label, title)
  panels[0].set_ylabel("gradient norm, on-policy = 1")
  panels[0].set_ylim(-0.05, 2.0)
  handles, labels = panels[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=6)
