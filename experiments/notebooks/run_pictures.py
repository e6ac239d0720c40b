"""Pictures of runs for lectures 2 and 3.

They show curves from `metrics.jsonl`, the time by phase, samples, alarms and comparisons of runs.
"""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments import laptop_job
from experiments.ablations.plots import BLUE, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, letter
from experiments.notebooks.keep_log import LOGS
from experiments.notebooks.pictures import Picture, Table, picture
from experiments.notebooks.sources import ROOT
from jaxrl_llm.report import comparison
from jaxrl_llm.report.comparison import arms as arms_of
from jaxrl_llm.report.comparison import curves
from jaxrl_llm.report.comparison import page as page_lib
from jaxrl_llm.run.observe import alarms
from jaxrl_llm.workdir.metrics import read_rows


class Panel(NamedTuple):
  """A panel with one curve per run.

  Attributes:
    title: Title of the panel.
    phase: Phase of the rows.
    metrics: Names of metrics, of which the first that a run has is drawn.
    band: Names of the metrics at the lower and upper end of a band.
    log: Whether the axis is logarithmic.
    zero: Whether a linear axis begins at 0.
  """

  title: str
  phase: str
  metrics: tuple[str, ...]
  band: tuple[str, str] | None = None
  log: bool = False
  zero: bool = True


PANELS = {
  "accuracy": Panel("held-out accuracy", "eval", ("eval/accuracy",), ("eval/accuracy_low", "eval/accuracy_high")),
  "reward": Panel("reward on training prompts", "rl", ("critic/rewards/mean",)),
  "entropy": Panel("entropy (nats per token)", "rl", ("actor/entropy",), log=True),
  "clip": Panel("clipped tokens (share)", "rl", ("actor/pg_clipfrac",)),
  "length": Panel("response length (tokens)", "rl", ("response_length/mean",)),
  "cut": Panel("responses cut short (share)", "rl", ("response_length/clip_ratio",)),
  "kl": Panel("KL from the old policy (nats)", "rl", ("actor/ppo_kl_k3",), log=True),
  "gradient": Panel("gradient norm, unclipped", "rl", ("actor/grad_norm",), log=True),
  "no_signal": Panel("groups without a signal (share)", "rl", ("group/frac_reward_zero_std",)),
  "learning_rate": Panel("learning rate", "rl", ("actor/lr",)),
  "ratio": Panel("token ratio, 99th percentile", "rl", ("ratio/p99",), zero=False),
  "gate_pos": Panel("SAPO's gate, A > 0 (mean)", "rl", ("sapo/gate_pos",), zero=False),
  "gate_neg": Panel("SAPO's gate, A < 0 (mean)", "rl", ("sapo/gate_neg",), zero=False),
  "sequence_ratio": Panel("sequence ratio, 99th percentile", "rl", ("ratio/sequence/p99",), zero=False),
  "imitation": Panel("loss of the warm start", "warm_start", ("actor/nll_loss",), log=True),
}
"""Panels by the names that the lectures use."""

LIVE_FOLDER = pathlib.Path("runs/laptop_job")
"""Folder of live training runs, relative to the root of the repository.

`python -m experiments.laptop_job` uses the same folder and does not repeat their runs.
"""

_COLORS = (BLUE, ORANGE, GREEN, PINK)


class Run(NamedTuple):
  """Contents of a run's files."""

  workdir: pathlib.Path
  rows: list[dict[str, Any]]
  samples: list[dict[str, Any]]
  summary: dict[str, Any]


def read(workdir: pathlib.Path) -> Run:
  """Reads the files of a run's folder."""
  summary = json.loads((workdir / "summary.json").read_text("utf-8"))
  return Run(workdir, read_rows(workdir / "metrics.jsonl"), read_rows(workdir / "samples.jsonl"), summary)


def checked_in(name: str) -> Run:
  """Reads a log that is part of the repository."""
  return read(LOGS / name)


def series(run: Run, panel: Panel) -> tuple[list[int], list[float], str | None]:
  """Reads the steps and values of a panel's metric, and the metric's name.

  The lists are empty and the name is None if the run has none of the metrics.
  """
  for name in panel.metrics:
    rows = [row for row in run.rows if row["phase"] == panel.phase and isinstance(row.get(name), int | float)]
    if rows:
      return [row["step"] for row in rows], [row[name] for row in rows], name
  return [], [], None


def draw(runs: Mapping[str, Run], panels: Sequence[str]) -> Picture:
  """Draws curves of runs side by side.

  Args:
    runs: Runs by label.
    panels: Keys of `PANELS`, drawn three per row.
  """
  alt = f"Curves of {', '.join(runs)} against the step: {', '.join(PANELS[name].title for name in panels)}."
  return picture(
    _draw, runs, [PANELS[name] for name in panels], height=2.1 * -(-len(panels) // 3) + 0.25 * (len(runs) > 1), alt=alt
  )


def _draw(figure: Any, runs: Mapping[str, Run], panels: Sequence[Panel]) -> None:
  """Draws each panel with the curves of all runs."""
  columns = min(3, len(panels))
  drawn = figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flat
  for axes, panel, name in zip(drawn, panels, "abcdefghi", strict=False):
    for (label, run), color in zip(runs.items(), _COLORS, strict=False):
      steps, values, _ = series(run, panel)
      axes.plot(steps, values, color=color, label=label, marker="o" if len(steps) < 25 else None)
      if panel.band and steps:
        rows = [row for row in run.rows if row["phase"] == panel.phase]
        axes.fill_between(steps, *([row[end] for row in rows] for end in panel.band), color=color, alpha=0.15, linewidth=0)
    _scale(axes, panel, name)
  for axes in list(drawn)[len(panels) :]:
    axes.set_axis_off()
  if len(runs) > 1:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(runs))


def _scale(axes: Any, panel: Panel, name: str) -> None:
  """Sets the labels and the scale of a panel's axes."""
  from matplotlib.ticker import LogLocator, NullFormatter

  letter(axes, name, panel.title)
  axes.set_xlabel("step of the warm start" if panel.phase == "warm_start" else "RL step")
  if panel.log:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < 200:  # Label 2 and 5 as well, in plain digits, within a decade or two.
      axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
      axes.yaxis.set_major_formatter("{x:g}")
      axes.yaxis.set_minor_formatter(NullFormatter())
  elif panel.zero:
    axes.set_ylim(bottom=0)
  else:
    axes.ticklabel_format(useOffset=False)


def metrics_of(run: Run, step: int, names: Sequence[str]) -> Table:
  """Tabulates metrics of one RL step.

  Args:
    run: Run to read.
    step: RL step.
    names: Names of metrics.
  """
  row = next(row for row in run.rows if row["phase"] == "rl" and row["step"] == step)
  return Table(["metric", f"RL step {step}"], [[f"`{name}`", f"{row[name]:.4g}"] for name in names])


def where_time_went(runs: Mapping[str, Run]) -> Picture:
  """Draws the seconds of runs by phase."""
  return picture(_time, runs, height=0.9 + 0.3 * len(runs), alt="Seconds of each run by phase, stacked.")


def _time(figure: Any, runs: Mapping[str, Run]) -> None:
  """Draws one stacked bar per run."""
  axes = figure.subplots()
  groups = {
    "warm start": ("warm_start",), "sampling": ("rollout", "weight_sync"), "update": ("update",), "evaluation": ("eval",),
    "scoring": ("old_logprobs", "ref_logprobs", "reward", "advantages"), "other": ("checkpoint", "report", "other"),
  }  # fmt: skip
  for place, run in enumerate(reversed(runs.values())):
    left = 0.0
    for (label, phases), color in zip(groups.items(), (GREY, SKY, BLUE, GREEN, ORANGE, YELLOW), strict=True):
      seconds = sum(run.summary["seconds"].get(phase, 0.0) for phase in phases)
      axes.barh(place, seconds, left=left, color=color, height=0.6, label=label if place == 0 else None)
      left += seconds
  axes.set_yticks(range(len(runs)), list(runs)[::-1])
  axes.grid(axis="y", visible=False)
  axes.set_xlabel("seconds")
  axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def samples(run: Run, step: int, *, count: int = 4) -> Table:
  """Tabulates responses of the policy at a step.

  Args:
    run: Run with samples.
    step: RL step; the nearest step that has samples is used.
    count: Number of responses.
  """
  nearest = min({row["step"] for row in run.samples}, key=lambda sampled: abs(sampled - step))
  rows = [row for row in run.samples if row["step"] == nearest][:count]
  cells = [[_quoted(row["prompt"]), _quoted(row["response"]), row["answer"], f"{row['reward']:g}", row["num_tokens"]] for row in rows]
  return Table([f"prompt (step {nearest})", "response", "right answer", "reward", "tokens"], cells)


def _quoted(text: str, max_chars: int = 90) -> str:
  """Formats a text as one line of code, in which no character acts as markup."""
  flat = text.strip("\n").replace("\n", " ⏎ ").replace("`", "'").replace("|", "¦")
  return f"`{flat[:max_chars]}{'…' if len(flat) > max_chars else ''}`"


def summaries(runs: Mapping[str, Run]) -> Table:
  """Tabulates the results of runs, from `summary.json`."""
  rows = []
  for label, run in runs.items():
    summary = run.summary
    rows.append([
      label, f"{summary['accuracy_start']:.1%}", f"{summary['accuracy_final']:.1%}", f"{summary['tokens']:,}",
      f"{summary['wall_seconds']:.0f} s", summary["skipped_steps"],
      ", ".join(f"{name} x{count}" for name, count in summary["alarms"].items()) or "none",
    ])  # fmt: skip
  return Table(["run", "accuracy after the warm start", "at the end", "tokens", "wall time", "skipped updates", "alarms"], rows)


def alarm_lines(run: Run, **limits: float) -> list[str]:
  """Recomputes the alarm lines of a run from its metrics.

  Args:
    run: Run to read.
    **limits: Fields of `run.alarms.Limits`, as in `config.alarms`; all others keep their defaults.
  """
  state, messages = alarms.new_state(), []
  for row in run.rows:
    if row["phase"] == "rl":
      state, _, lines = alarms.observe(state, row, step=row["step"], limits=alarms.AlarmLimits(**limits))
      messages += lines
  return messages


def trained(chosen: Mapping[str, Sequence[int]], *, live: bool) -> list[pathlib.Path]:
  """Returns the folders of the laptop job's runs.

  Args:
    chosen: Seeds by the name of a file in `configs/`.
    live: Whether to use live runs instead of the checked-in logs. Each run that has not finished is
      trained, for several minutes, and the row of each run is printed.
  """
  pairs = [(config, seed) for config, seeds in chosen.items() for seed in seeds]
  folder = ROOT / LIVE_FOLDER if live else LOGS
  if live:
    before = pathlib.Path.cwd()
    os.chdir(ROOT)  # The paths of the configs are relative to the root.
    try:
      for config, seed in pairs:
        print(laptop_job.run(config, seed, folder), flush=True)
    finally:
      os.chdir(before)
  return [folder / f"{config}-{seed}" for config, seed in pairs]


def compare(workdirs: Sequence[pathlib.Path], panels: Sequence[str], *, axis: str = "step") -> Picture:
  """Draws curves of arms: the mean over the seeds, and each seed as a thin line.

  Args:
    workdirs: Workdirs of runs; runs that differ only in their seed form one arm.
    panels: Keys of `PANELS`.
    axis: "step", "tokens" or "seconds".
  """
  arms, _ = page_lib.load_arms(workdirs)
  chosen = [PANELS[name] for name in panels]
  alt = f"Curves of {', '.join(map(_objective, arms))}: {', '.join(panel.title for panel in chosen)}."
  return picture(_compare, arms, chosen, axis, height=2.1 * -(-len(panels) // 3) + 0.25, alt=alt)


def _objective(arm: arms_of.Arm) -> str:
  """Returns the name of an arm's objective."""
  return str(arm.config.get("objective.name", arm.name))


def _compare(figure: Any, arms: Sequence[arms_of.Arm], panels: Sequence[Panel], axis: str) -> None:
  """Draws each panel with the curves of all arms."""
  columns = min(3, len(panels))
  drawn = list(figure.subplots(-(-len(panels) // columns), columns, squeeze=False).flat)
  for axes, panel, name in zip(drawn, panels, "abcdefghi", strict=False):
    for arm, color in zip(arms, _COLORS, strict=False):
      points = curves.curve(arm.runs, panel.metrics[0], panel.phase, axis)
      if points is None:
        continue
      for _, x, y in points.members if len(points.members) > 1 else ():
        axes.plot(x, y, color=color, alpha=0.35, linewidth=0.8)
      axes.plot(points.x, points.mean, color=color, marker="o" if len(points.x) < 25 else None)
    _scale(axes, panel, name)
    if axis != "step":
      axes.set_xlabel(axis)
  for axes in drawn[len(panels) :]:
    axes.set_axis_off()
  handles = [drawn[0].plot([], [], color=color)[0] for _, color in zip(arms, _COLORS, strict=False)]
  figure.legend(handles, [_objective(arm) for arm in arms], loc="outside lower center", ncols=len(arms))


def outcome(workdirs: Sequence[pathlib.Path]) -> Table:
  """Tabulates the accuracy of arms at the start and the end, and their tokens and wall time."""
  arms, _ = page_lib.load_arms(workdirs)
  rows = []
  for arm, result in zip(arms, arms_of.results(arms), strict=True):
    seeds = ", ".join(f"{run.summary['accuracy_final']:.1%}" for run in arm.runs)
    difference = result["difference"] and result["difference"]["mean"]
    rows.append([
      f"`{_objective(arm)}`", f"{result['start']['mean']:.1%}", f"{result['final']['mean']:.1%}", seeds,
      "" if difference is None else f"{100 * difference:+.1f} points", f"{result['tokens']:,.0f}", f"{result['seconds']:.0f} s",
    ])  # fmt: skip
  header = ["objective", "after the warm start", "at the end", "each seed", f"against `{_objective(arms[0])}`", "tokens", "wall time"]
  return Table(header, rows)


def differences(workdirs: Sequence[pathlib.Path]) -> Table:
  """Tabulates the settings in which arms differ; "default" means the constant of the paper."""
  arms, _ = page_lib.load_arms(workdirs)
  changed = arms_of.differences([arm.config for arm in arms])
  rows = [[f"`{field}`", *("default" if value is None else f"{value}" for value in values)] for field, values in changed.items()]
  return Table(["setting", *(f"`{_objective(arm)}`" for arm in arms)], rows)


def write_page(workdirs: Sequence[pathlib.Path], name: str = "comparison.html") -> str:
  """Writes a comparison page into `runs/` and returns its path relative to the root."""
  path = comparison.write_comparison(*comparison.load_arms(workdirs), ROOT / "runs" / name)
  return path.relative_to(ROOT).as_posix()


def evaluation_noise(problems: int, samples_each: int, accuracy: float) -> float:
  """Computes half the width of a 95 % interval of an accuracy, in points.

  The formula assumes independent samples, although samples of one problem are not independent.

  Example:
    >>> round(evaluation_noise(256, 4, 0.95), 1)
    1.3
  """
  return 100 * 1.96 * float(np.sqrt(accuracy * (1 - accuracy) / (problems * samples_each)))
