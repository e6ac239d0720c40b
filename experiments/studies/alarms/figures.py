"""The curve of each rule, drawn from `results.json` alone."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.ablations.plots import BLACK, BLUE, GREY, ORANGE, letter, new_figure, save
from experiments.claims.drawing import percent
from experiments.studies.alarms import rules
from jaxrl_llm.run.observe.alarms import AlarmLimits

TITLES = {
  "loss_spike": "loss spike", "grad_norm_spike": "gradient norm spike", "reward_collapse": "reward collapse",
  "entropy_collapse": "entropy collapse", "truncation": "truncation", "no_signal": "no signal", "policy_kl": "KL to the old policy",
}  # fmt: skip

_LIMITS = AlarmLimits()
NOW = dict.fromkeys(TITLES) | {"reward_collapse": _LIMITS.reward_sigmas, "policy_kl": _LIMITS.policy_kl_above}
"""Default of each rule; None for those that are off."""


def draw(results: Mapping[str, Any], folder: pathlib.Path, formats: Sequence[str]) -> None:
  """Draws a panel for each rule.

  A panel shows the share of collapses that are warned of against the false alarms in healthy runs,
  as the limit of the rule moves, and in grey the share of healthy runs in which the rule holds in
  the same steps.
  """
  columns = 4
  rows = -(-len(results["rules"]) // columns)
  with new_figure(height=0.6 + 1.9 * rows) as figure:
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for place, (name, rule) in enumerate(results["rules"].items()):
      _panel(panels[place], rule, NOW[name])
      letter(panels[place], chr(ord("a") + place), TITLES[name])
    for axes in panels[len(results["rules"]) :]:
      axes.set_visible(False)
    figure.supxlabel("false alarms per 1,000 healthy steps", fontsize=8)
    figure.supylabel("collapses warned of", fontsize=8)
    entries = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=4)
    save(figure, folder, "alarms", formats)


def _panel(axes: Any, rule: Mapping, now: float | None) -> None:
  """Draws the curve of a rule with its 95 % band over the seeds, and marks its limits."""
  curve = rule["curve"]["all"]
  column = lambda name: [row[name] for row in curve]
  axes.fill_between(column("false_alarms"), column("warned_low"), column("warned_high"), color=BLUE, alpha=0.16, linewidth=0)
  axes.plot(column("false_alarms"), column("by_chance"), color=GREY, linewidth=1, linestyle=(0, (3, 2)), label="healthy runs, same steps")
  axes.plot(column("false_alarms"), column("warned"), color=BLUE, marker=".", markersize=3, label="collapses")
  for limit, color, marker, label in ((rule["default"], ORANGE, "o", "limit before"), (now, BLACK, "x", "limit now")):
    for row in curve:
      if row["limit"] == limit:
        axes.plot(row["false_alarms"], row["warned"], marker, color=color, markersize=6, fillstyle="none", label=label, linestyle="none")
  axes.axvline(rules.BUDGET, color=GREY, linewidth=0.7, linestyle=":")
  axes.set_xscale("symlog", linthresh=1)
  axes.set_xlim(0, 60)
  axes.set_ylim(-0.03, 1.03)
  percent(axes)
