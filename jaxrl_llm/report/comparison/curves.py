"""The curves of an arm: mean and band over its seeds, against steps, tokens or seconds."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.report.comparison.arms import Arm, t_factor
from jaxrl_llm.report.comparison.runs import X_AXES, RunRecord, run_series

GRID = 160
"""Number of grid points of a mean over seeds whose x values differ."""

MAX_POINTS = 2400
"""Maximum number of points on the page for the means of a metric, over all arms.

Each arm has from 120 to 400 of them. From more points, every k-th is taken.
"""

MAX_SEED_POINTS = 6000
"""Maximum number of points on the page for the runs of a metric, over all arms.

Each run has from 40 to 400 of them. From more points, every k-th is taken.
"""


class Curve(NamedTuple):
  """The mean over seeds at each x, with its 95 % band.

  Attributes:
    x: Values of the x axis, ascending, [K].
    mean: Mean over the seeds that have reached x, [K].
    low: Lower end of Student's interval; NaN if fewer than two seeds have reached x, [K].
    high: Upper end of the interval, [K].
    n: Number of seeds that have reached x, [K].
    members: Index in the arm, x and y of each run.
  """

  x: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray
  n: np.ndarray
  members: list[tuple[int, np.ndarray, np.ndarray]]


def curve(runs: Sequence[RunRecord], name: str, phase: str, axis: str = "step") -> Curve | None:
  """Returns the curve of an arm's metric; None if no run has it.

  Runs that were measured at the same x are averaged there. Other runs are averaged on a grid, with
  linear interpolation between the points of a run and no values outside of them.

  Args:
    runs: Runs of the arm.
    name: Name of the metric.
    phase: Phase of its rows.
    axis: Key of `X_AXES`.
  """
  candidates = [(i, *run_series(run, name, phase, axis)) for i, run in enumerate(runs)]
  members = [member for member in candidates if len(member[1])]
  if not members:
    return None
  points = np.unique(np.concatenate([x for _, x, _ in members]))
  longest = max((x for _, x, _ in members), key=len)
  # Holds even if some runs have stopped early.
  if all(np.isin(x, longest).all() for _, x, _ in members):
    grid, values = longest, np.stack([_at(longest, x, y) for _, x, y in members])
  else:
    first, last = _common_range(runs, members)
    points = points[(points >= first) & (points <= last)]
    grid = points if axis == "step" and len(points) <= GRID else np.linspace(first, last, GRID)
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
  """Returns the range of x that all runs with the most steps share.

  Outside of it, the mean would jump at the end of each seed.
  """
  steps = [runs[i].num_steps or 0 for i, _, _ in members]
  longest = [x for (_, x, _), reached in zip(members, steps, strict=True) if reached == max(steps)]
  first, last = max(x[0] for x in longest), min(x[-1] for x in longest)
  return (first, last) if first < last else (min(x[0] for x in longest), max(x[-1] for x in longest))


def _at(grid: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Spreads the values of a run over a grid, with NaN at the points that the run lacks."""
  values = np.full(len(grid), np.nan)
  values[np.searchsorted(grid, x)] = y
  return values


class Panel(NamedTuple):
  """A chart of the page.

  Attributes:
    group: Heading of the chart's section.
    title: Title of the chart.
    metric: Name of the metric in the rows.
    unit: Unit of the metric; "%" for fractions.
    zero: Whether the y axis starts at 0.
    log: Whether the y axis is logarithmic; "auto" for one that is if its positive values span more
      than a factor of 8.
    phase: Phase of the rows.
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
  Panel("Policy", "Gate at positive advantages", "sapo/gate_pos"),
  Panel("Policy", "Gate at negative advantages", "sapo/gate_neg"),
  Panel("Policy", "Importance ratio, 99th percentile", "ratio/p99", log="auto"),
  Panel("Policy", "Importance ratio, maximum", "ratio/max", log="auto"),
  Panel("Policy", "Effective sample size of the ratios", "ratio/ess", "%"),
  Panel("Policy", "Gap between sampler and learner, mean", "rollout_corr/logprob_abs_diff/mean", "nats", log="auto"),
  Panel("Teacher", "Reverse KL to the teacher", "teacher/kl", "nats per token", log="auto"),
  Panel("Teacher", "Same likeliest token as the teacher", "teacher/agreement", "%"),
  Panel("Teacher", "Entropy of the teacher", "teacher/entropy", "nats per token", zero=True),
  Panel("Optimizer", "Gradient norm", "actor/grad_norm", log="auto"),
  Panel("Optimizer", "Noise of a response's gradient, relative to no ratio", "gradient/inflation", log="auto"),
  Panel("Optimizer", "Signal over noise of a response's gradient", "gradient/snr"),
  Panel("Optimizer", "Learning rate", "actor/lr", zero=True),
  Panel("Optimizer", "Skipped updates", "train/skipped_steps", zero=True),
  Panel("Experts", "Experts changed by an update", "moe/expert_change/update", "%", zero=True),
  Panel("Experts", "Experts that differ between sampler and learner", "moe/expert_change/sampler", "%", zero=True),
  Panel("Experts", "Load of the busiest expert", "moe/load_max", "even shares", zero=True),
  Panel("Reward model", "Loss", "reward_model/loss", "nats per pair", phase="reward_model"),
  Panel("Reward model", "Accuracy on the step's pairs", "reward_model/accuracy", "%", phase="reward_model"),
  Panel("Speed", "Throughput", "perf/throughput", "tokens per second", zero=True),
  Panel("Speed", "Time per step", "timing_s/step", "seconds", log="auto"),
)


def page_panels(arms: Sequence[Arm], panels: Sequence[Panel] = PANELS) -> list[dict[str, Any]]:
  """Returns the panels that have data, each with its curves for all arms and x axes."""
  shown = []
  for panel in panels:
    curves = {axis: _page_curves(arms, panel, axis) for axis in X_AXES}
    if any(curves["step"]):
      shown.append(panel._asdict() | {"curves": curves})
  return shown


def _page_curves(arms: Sequence[Arm], panel: Panel, axis: str) -> list[dict[str, Any]]:
  rows = []
  of_mean = min(400, max(120, MAX_POINTS // len(arms)))
  of_seed = min(400, max(40, MAX_SEED_POINTS // sum(len(arm.runs) for arm in arms)))
  for number, arm in enumerate(arms):
    drawn = curve(arm.runs, panel.metric, panel.phase, axis)
    if drawn is None:
      continue
    columns = {name: _short(_thin(getattr(drawn, name), of_mean)) for name in ("x", "mean", "low", "high")}
    seeds = []
    if len(drawn.members) > 1:  # The mean of a single run is its own line.
      seeds = [{"run": i, "x": _short(_thin(x, of_seed)), "y": _short(_thin(y, of_seed))} for i, x, y in drawn.members]
    rows.append({"arm": number, "n": _thin(drawn.n, of_mean).tolist(), "seeds": seeds} | columns)
  return rows


def _thin(x: np.ndarray, most: int) -> np.ndarray:
  stride = -(-len(x) // most)
  return x[(len(x) - 1) % stride :: stride]  # Counted so that the newest value always stays.


def _short(values: np.ndarray) -> list[float | None]:
  """Rounds values to five digits, which are more than a screen can show."""
  return [float(f"{x:.5g}") if np.isfinite(x) else None for x in values.tolist()]
