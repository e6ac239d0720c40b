"""The arms of a comparison: groups of runs that differ only in their seed, and their results."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.report.comparison.runs import RunRecord
from jaxrl_llm.report.data import is_number, series

UNCOUNTED = ("log.", "checkpoint.", "profile.", "watchdog.", "alarms.")
"""Sections of a config that do not affect learning.

Runs that differ only in these or in `seed` form one arm.
"""

MAX_NAMED = 3
"""Maximum number of differing fields that all go into a name.

From more fields, the fewest that distinguish the arms are chosen.
"""


class Arm(NamedTuple):
  """Runs that differ only in their seed.

  Attributes:
    name: Name that distinguishes the arm from the others.
    runs: Runs of the arm, in the given order.
    config: Fields that all runs of the arm share.
  """

  name: str
  runs: list[RunRecord]
  config: dict[str, Any]


def t_factor(n: int) -> float:
  """Returns half the width of Student's 95 % interval for a mean of n numbers, in standard errors.

  Example:
    >>> round(t_factor(3), 3)
    4.303
  """
  from scipy.special import stdtrit  # Always installed, since jax requires scipy.

  return float(stdtrit(n - 1, 0.975))


def interval(values: Sequence[float]) -> dict[str, float | None] | None:
  """Returns the mean over seeds with Student's 95 % interval, and their number; None without any.

  Args:
    values: One value per seed. A single value has no interval, since the variance is unknown.

  Example:
    >>> interval([0.5, 0.6, 0.7])
    {'mean': 0.6, 'low': 0.352, 'high': 0.848, 'n': 3}
    >>> interval([0.5])
    {'mean': 0.5, 'low': None, 'high': None, 'n': 1}
  """
  if not len(values):
    return None
  mean = float(np.mean(values))
  if len(values) < 2:
    return {"mean": mean, "low": None, "high": None, "n": 1}
  half = t_factor(len(values)) * float(np.std(values, ddof=1)) / len(values) ** 0.5
  return {"mean": mean, "low": mean - half, "high": mean + half, "n": len(values)}


def group(runs: Sequence[RunRecord]) -> list[Arm]:
  """Groups runs into arms, in the order of their first runs.

  A run without a config is an arm of its own.
  """
  groups: dict[str, Arm] = {}
  for run in runs:
    counted = {field: value for field, value in run.config.items() if _counts(field)}
    key = _canonical(counted) if run.config else f"{run.path}"
    groups.setdefault(key, Arm(run.name, [], counted)).runs.append(run)
  arms = list(groups.values())
  names = arm_names([arm.config for arm in arms], [arm.name for arm in arms])
  return [arm._replace(name=name) for arm, name in zip(arms, names, strict=True)]


def _counts(field: str) -> bool:
  return field != "seed" and not field.startswith(UNCOUNTED) and field.rpartition(".")[2] not in ("workdir", "logdir", "out_dir")


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
  """Returns the fields in which configs differ, with the value in each, or "–" if missing."""
  fields = dict.fromkeys(field for config in configs if config for field in config)
  rows = {field: [config.get(field, "–") for config in configs] for field in fields}
  known = [i for i, config in enumerate(configs) if config]
  return {field: values for field, values in rows.items() if len({_canonical(values[i]) for i in known}) > 1}


def _canonical(value: Any) -> str:
  """Encodes a setting as text that is the same for equal settings: 1 equals 1.0, but not True."""
  if isinstance(value, dict):
    return json.dumps({name: _canonical(item) for name, item in value.items()}, sort_keys=True)
  if isinstance(value, list):
    return json.dumps([_canonical(item) for item in value])
  return json.dumps(float(value) if isinstance(value, int) and not isinstance(value, bool) else value)


def arm_names(configs: Sequence[Mapping[str, Any]], fallbacks: Sequence[str]) -> list[str]:
  """Returns names that distinguish the arms.

  Args:
    configs: Configs of the arms. An arm with an empty config gets its fallback.
    fallbacks: Names of the arms without a config.

  Example:
    >>> arm_names([{"objective.clip_low": 3e-4, "num_steps": 80}, {"objective.clip_low": 0.2, "num_steps": 80}], ["a", "b"])
    ['clip_low=3e-4', 'clip_low=0.2']
  """
  values = differences(configs)
  # The objective matters most. All other fields keep the order of the configs.
  fields = sorted(values, key=lambda field: field != "objective.name")
  known = [i for i, config in enumerate(configs) if config]
  if fields[:1] == ["objective.name"] and len({_canonical(values["objective.name"][i]) for i in known}) == len(known):
    # The name of the objective represents its settings.
    fields = [field for field in fields if field == "objective.name" or not field.startswith("objective.")]
  if len(fields) > MAX_NAMED:
    fields = _distinguishing(values, fields, known)
  names = list(fallbacks)
  for digits in (4, 17):  # The fewest that distinguish the arms.
    names = _names(configs, values, fields, fallbacks, digits)
    if len(set(names)) == len(names):
      break
  return names


def _names(
  configs: Sequence[Mapping[str, Any]],
  values: Mapping[str, Sequence[Any]],
  fields: Sequence[str],
  fallbacks: Sequence[str],
  digits: int,
) -> list[str]:
  short = {field: field.rpartition(".")[2] for field in fields}
  clashing = {name for name in short.values() if list(short.values()).count(name) > 1}
  names = []
  for i, config in enumerate(configs):
    parts = []
    for field in fields if config else ():
      text = value_text(values[field][i], digits)
      label = field if short[field] in clashing or short[field] in ("name", "path") else short[field]
      parts.append(text if field == "objective.name" else f"{label}={text}")
    names.append(", ".join(parts) or (str(config.get("objective.name") or "all runs") if config else fallbacks[i]))
  return names


def _distinguishing(values: Mapping[str, Sequence[Any]], fields: Sequence[str], arms: Sequence[int]) -> list[str]:
  """Chooses few fields that distinguish the arms.

  The choice is greedy: each field adds the most distinct combinations of values.
  """
  chosen: list[str] = []
  key = lambda i, used: tuple(_canonical(values[field][i]) for field in used)
  count = lambda used: len({key(i, used) for i in arms})
  while count(chosen) < len(arms):
    chosen.append(max((field for field in fields if field not in chosen), key=lambda field: count([*chosen, field])))
  return chosen


def value_text(value: Any, digits: int = 4) -> str:
  """Formats a setting for a name.

  Args:
    value: Value of the config.
    digits: Maximum number of digits of a fraction. With at most 4, a path is cut to its last part.

  Example:
    >>> [value_text(x) for x in (3e-4, 4e-4 / 3, 0.25, 1000000, None, "runs/models/base", [1, 2])]
    ['3e-4', '1.333e-4', '0.25', '1000000', 'None', 'base', '[1, 2]']
  """
  if isinstance(value, float) and np.isfinite(value):
    value = float(f"{value:.{digits}g}")
    return np.format_float_scientific(value, trim="-", exp_digits=1) if value and abs(value) < 1e-2 else f"{value!r}".removesuffix(".0")
  if isinstance(value, str):
    return (digits <= 4 and value.rstrip("/").rpartition("/")[2]) or value
  return str(value)


def by_seed(runs: Sequence[RunRecord], value: str) -> dict[Any, float]:
  """Returns the held-out accuracy of each seed, averaged over the runs of the seed.

  Args:
    runs: Runs of an arm.
    value: "start" or "final".
  """
  accuracies: dict[Any, list[float]] = {}
  for i, run in enumerate(runs):
    if (accuracy := accuracy_of(run, value)) is not None:
      accuracies.setdefault(run.seed if run.seed is not None else f"run {i}", []).append(accuracy)
  return {seed: float(np.mean(values)) for seed, values in accuracies.items()}


def accuracy_of(run: RunRecord, value: str) -> float | None:
  """Returns the held-out accuracy of a run, from its rows or else from its summary.

  Args:
    run: Record of the run.
    value: "start" or "final".
  """
  _, measured = series((row for row in run.rows if row["phase"] == "eval"), "eval/accuracy")
  if measured:
    return measured[0 if value == "start" else -1]
  accuracy = run.summary.get(f"accuracy_{value}")
  return accuracy if is_number(accuracy) else None


def results(arms: Sequence[Arm]) -> list[dict[str, Any]]:
  """Returns a row of results for each arm.

  Only complete runs count. An arm without one gets the numbers of its unfinished runs so far.

  Returns:
    For each arm:
      `counted`: Number of runs.
      `so_far`: Whether the arm has no complete run.
      `start`, `final`, `gain`: Intervals of the accuracy and of its gain over seeds.
      `difference`: Interval of the difference in final accuracy from the first arm, over the seeds
        of both; None for the first arm, and if one of the two has no complete run.
      `tokens`, `steps`, `seconds`: Means over the runs.
  """
  chosen = [[run for run in arm.runs if run.is_complete] or arm.runs for arm in arms]
  first = by_seed(chosen[0], "final") if chosen else {}
  rows = []
  so_far = [not any(run.is_complete for run in arm.runs) for arm in arms]
  for i, runs in enumerate(chosen):
    start, final = by_seed(runs, "start"), by_seed(runs, "final")
    paired = [final[seed] - first[seed] for seed in final if seed in first and not str(seed).startswith("run ")]
    rows.append(
      {
        "counted": len(runs),
        "so_far": so_far[i],
        "start": interval(list(start.values())),
        "final": interval(list(final.values())),
        "gain": interval([final[seed] - start[seed] for seed in final if seed in start]),
        "difference": None if i == 0 or so_far[0] or so_far[i] else interval(paired),
        "tokens": _mean([run.summary.get("tokens") for run in runs]),
        "steps": _mean([run.num_steps for run in runs]),
        "seconds": _mean([run.summary.get("wall_seconds") for run in runs]),
      }
    )
  return rows


def _mean(values: Sequence[Any]) -> float | None:
  known = [value for value in values if is_number(value)]
  return float(np.mean(known)) if known else None
