"""Curves of an arm: mean and band over its seeds, against steps, tokens or seconds."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.report.comparison.arms import Arm, t_factor
from jaxrl_llm.report.comparison.runs import AXES, RunRecord, series

GRID = 160
"""Places of a mean over seeds whose points do not lie together."""

MAX_POINTS = 2400
"""Points of all arms' means of one metric on the page, from 120 to 400 an arm; of more, every k-th."""

MAX_SEED_POINTS = 6000
"""Points of all runs' own curves of one metric on the page, but never fewer than 40 a run; of more, every k-th."""


class Curve(NamedTuple):
  """Mean over seeds at each x, with its 95 % band.

  Attributes:
    x: places, ascending.
    mean: over the seeds that have got there.
    low: lower end of Student's interval; NaN where fewer than two seeds have got there.
    high: upper end.
    n: seeds that have got there.
    members: of each run its number in the arm, x and y.
  """

  x: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray
  n: np.ndarray
  members: list[tuple[int, np.ndarray, np.ndarray]]


def curve(runs: Sequence[RunRecord], name: str, phase: str, axis: str = "step") -> Curve | None:
  """Returns the curve of an arm's metric; None if no run has it.

  Runs that were measured at the same places are averaged place by place, else on a grid, with straight lines between a run's points and
  nothing outside of them.

  Args:
    runs: Runs of the arm.
    name: Name of the metric.
    phase: Phase whose rows it stands in.
    axis: Key of `AXES`.
  """
  found = [(i, *series(run, name, phase, axis)) for i, run in enumerate(runs)]
  members = [member for member in found if len(member[1])]
  if not members:
    return None
  places = np.unique(np.concatenate([x for _, x, _ in members]))
  longest = max((x for _, x, _ in members), key=len)
  # Runs that stopped early are still in step with the others.
  if all(np.isin(x, longest).all() for _, x, _ in members):
    grid, values = longest, np.stack([_at(longest, x, y) for _, x, y in members])
  else:
    first, last = _common_range(runs, members)
    places = places[(places >= first) & (places <= last)]
    grid = places if axis == "step" and len(places) <= GRID else np.linspace(first, last, GRID)
    values = np.stack([np.interp(grid, x, y, left=np.nan, right=np.nan) for _, x, y in members])
  n = np.sum(~np.isnan(values), axis=0)
  kept = n > 0
  grid, values, n = grid[kept], values[:, kept], n[kept]
  mean = np.nansum(values, axis=0) / n
  deviation = np.sqrt(np.nansum((values - mean) ** 2, axis=0) / np.maximum(n - 1, 1))
  factors = np.array([t_factor(k) if k > 1 else np.nan for k in range(1, len(members) + 1)])
  half = factors[n - 1] * deviation / np.sqrt(n)
  return Curve(grid, mean, mean - half, mean + half, n, members)


def _common_range(runs: Sequence[RunRecord], members: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> tuple[float, float]:
  """Where all runs of an arm are that got as far as its furthest one: outside, a mean would jump as one seed after the other ends."""
  steps = [runs[i].num_steps or 0 for i, _, _ in members]
  whole = [x for (_, x, _), reached in zip(members, steps, strict=True) if reached == max(steps)]
  first, last = max(x[0] for x in whole), min(x[-1] for x in whole)
  return (first, last) if first < last else (min(x[0] for x in whole), max(x[-1] for x in whole))


def _at(grid: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Values at the places that a run has; NaN at the others."""
  values = np.full(len(grid), np.nan)
  values[np.searchsorted(grid, x)] = y
  return values


class Panel(NamedTuple):
  """One chart of the page.

  Attributes:
    group: under which heading.
    title: of the chart.
    metric: name in the rows.
    unit: "%" for fractions.
    zero: whether the axis begins at 0.
    log: True or "auto" for a logarithmic axis.
    phase: whose rows.
  """

  group: str
  title: str
  metric: str
  unit: str = ""
  zero: bool = False
  log: bool | str = False
  phase: str = "rl"


PANELS = (
  Panel("Learning", "Held-out accuracy", "eval/accuracy", "%", phase="eval"),
  Panel("Learning", "Reward", "critic/rewards/mean"),
  Panel("Learning", "Response length", "response_length/mean", "tokens", zero=True),
  Panel("Learning", "Groups without a signal", "group/frac_reward_zero_std", "%", zero=True),
  Panel("Learning", "Responses cut at the budget", "response_length/clip_ratio", "%", zero=True),
  Panel("Policy", "Entropy", "actor/entropy", "nats per token", zero=True),
  Panel("Policy", "KL to the old policy (k3)", "actor/ppo_kl_k3", "nats per token", log="auto"),
  Panel("Policy", "KL to the reference", "actor/ref_kl", "nats per token"),
  Panel("Policy", "Clip fraction", "actor/pg_clipfrac", "%", zero=True),
  Panel("Policy", "Gate where the advantage is positive", "sapo/gate_pos"),
  Panel("Policy", "Gate where the advantage is negative", "sapo/gate_neg"),
  Panel("Policy", "Importance ratio, 99th percentile", "ratio/p99", log="auto"),
  Panel("Policy", "Importance ratio, largest", "ratio/max", log="auto"),
  Panel("Policy", "Effective sample size of the ratios", "ratio/ess", "%"),
  Panel("Policy", "Sampler to learner gap, mean", "rollout_corr/logprob_abs_diff/mean", "nats", log="auto"),
  Panel("Optimizer", "Gradient norm", "actor/grad_norm", log="auto"),
  Panel("Optimizer", "Learning rate", "actor/lr", zero=True),
  Panel("Optimizer", "Skipped updates", "train/skipped_steps", zero=True),
  Panel("Experts", "Experts that change by an update", "moe/expert_change/update", "%", zero=True),
  Panel("Experts", "Experts that change, sampler to learner", "moe/expert_change/sampler", "%", zero=True),
  Panel("Experts", "Load of the busiest expert", "moe/load_max", "even shares", zero=True),
  Panel("Reward model", "Loss", "reward_model/loss", "nats per pair", phase="reward_model"),
  Panel("Reward model", "Accuracy on the step's pairs", "reward_model/accuracy", "%", phase="reward_model"),
  Panel("Speed", "Throughput", "perf/throughput", "tokens per second", zero=True),
  Panel("Speed", "Time of a step", "timing_s/step", "seconds", log="auto"),
)


def page_panels(arms: Sequence[Arm], panels: Sequence[Panel] = PANELS) -> list[dict[str, Any]]:
  """Returns the charts of the page: of every panel that some run has data for, the curves of all arms against every axis."""
  shown = []
  for panel in panels:
    curves = {axis: _page_curves(arms, panel, axis) for axis in AXES}
    if any(curves["step"]):
      shown.append(panel._asdict() | {"curves": curves})
  return shown


def _page_curves(arms: Sequence[Arm], panel: Panel, axis: str) -> list[dict[str, Any]]:
  rows = []
  of_mean = min(400, max(120, MAX_POINTS // len(arms)))
  of_seed = min(400, max(40, MAX_SEED_POINTS // sum(len(arm.runs) for arm in arms)))
  for number, arm in enumerate(arms):
    found = curve(arm.runs, panel.metric, panel.phase, axis)
    if found is None:
      continue
    columns = {name: _short(_thin(getattr(found, name), of_mean)) for name in ("x", "mean", "low", "high")}
    seeds = []
    if len(found.members) > 1:  # Of a single run the mean is its line.
      seeds = [{"run": i, "x": _short(_thin(x, of_seed)), "y": _short(_thin(y, of_seed))} for i, x, y in found.members]
    rows.append({"arm": number, "n": _thin(found.n, of_mean).tolist(), "seeds": seeds} | columns)
  return rows


def _thin(x: np.ndarray, most: int) -> np.ndarray:
  stride = -(-len(x) // most)
  return x[(len(x) - 1) % stride :: stride]  # So that the newest is always there.


def _short(values: np.ndarray) -> list[float | None]:
  """Five digits are more than a screen can show."""
  return [float(f"{x:.5g}") if np.isfinite(x) else None for x in values.tolist()]
