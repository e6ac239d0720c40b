"""Which runs repeat one another with other seeds, what sets the others apart, and what came out."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.report.comparison.runs import RunRecord
from jaxrl_llm.report.data import is_number, series

UNCOUNTED = ("log.", "checkpoint.", "profile.", "watchdog.", "alarms.")
"""Sections of a config that change nothing of what is learned: runs that differ in these only, or in `seed`, are one arm."""

MAX_NAMED = 3
"""Fields of a name; where arms differ in more, as few as tell them apart."""


class Arm(NamedTuple):
  """Runs that differ in their seed only.

  Attributes:
    name: What sets it apart from the other arms.
    runs: Its runs, in the order given.
    config: Fields that all of its runs share.
  """

  name: str
  runs: list[RunRecord]
  config: dict[str, Any]


class Interval(NamedTuple):
  """A mean over seeds with its 95 % interval.

  Attributes:
    mean: Mean over the seeds.
    low: Lower end; None with fewer than two seeds.
    high: Upper end.
    n: Number of seeds.
  """

  mean: float
  low: float | None
  high: float | None
  n: int


def t_factor(n: int) -> float:
  """Half the width of Student's 95 % interval for a mean of n numbers, in standard errors.

  Example:
    >>> round(t_factor(3), 3)
    4.303
  """
  from scipy.special import stdtrit  # jax needs scipy, so it is there.

  return float(stdtrit(n - 1, 0.975))


def interval(values: Sequence[float]) -> Interval | None:
  """Returns the mean over seeds with Student's 95 % interval; None without a value.

  Args:
    values: One value a seed. A single one has no interval: nothing is known of how seeds scatter.

  Example:
    >>> [round(x, 3) for x in interval([0.5, 0.6, 0.7])]
    [0.6, 0.352, 0.848, 3]
    >>> interval([0.5])
    Interval(mean=0.5, low=None, high=None, n=1)
  """
  if not len(values):
    return None
  mean = float(np.mean(values))
  if len(values) < 2:
    return Interval(mean, None, None, 1)
  half = t_factor(len(values)) * float(np.std(values, ddof=1)) / len(values) ** 0.5
  return Interval(mean, mean - half, mean + half, len(values))


def group(runs: Sequence[RunRecord]) -> list[Arm]:
  """Arms, in the order of their first runs. A run without a config is an arm by itself."""
  together: dict[str, list[RunRecord]] = {}
  for run in runs:
    counted = {field: value for field, value in run.config.items() if _counts(field)}
    together.setdefault(_canonical(counted) if run.config else f"{run.path}", []).append(run)
  configs = [{field: value for field, value in members[0].config.items() if _counts(field)} for members in together.values()]
  names = arm_names(configs, [members[0].name for members in together.values()])
  return [Arm(name, members, config) for name, members, config in zip(names, together.values(), configs, strict=True)]


def _counts(field: str) -> bool:
  return field != "seed" and not field.startswith(UNCOUNTED) and field.rpartition(".")[2] not in ("workdir", "logdir", "out_dir")


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
  """Fields in which configs differ, with the value in each; "–" where a config has no such field."""
  fields = dict.fromkeys(field for config in configs if config for field in config)
  rows = {field: [config.get(field, "–") for config in configs] for field in fields}
  known = [i for i, config in enumerate(configs) if config]
  return {field: values for field, values in rows.items() if len({_canonical(values[i]) for i in known}) > 1}


def _canonical(value: Any) -> str:
  """A setting as text that is the same for equal settings: 1 is 1.0, and not True."""
  if isinstance(value, dict):
    return json.dumps({name: _canonical(item) for name, item in value.items()}, sort_keys=True)
  if isinstance(value, list):
    return json.dumps([_canonical(item) for item in value])
  return json.dumps(float(value) if isinstance(value, int) and not isinstance(value, bool) else value)


def arm_names(configs: Sequence[Mapping[str, Any]], fallbacks: Sequence[str]) -> list[str]:
  """Returns names that say what sets each arm apart.

  Args:
    configs: Configs of the arms; an empty one takes its fallback.
    fallbacks: Names of arms without a config.

  Example:
    >>> arm_names([{"objective.clip_low": 3e-4, "num_steps": 80}, {"objective.clip_low": 0.2, "num_steps": 80}], ["a", "b"])
    ['clip_low=3e-4', 'clip_low=0.2']
  """
  found = differences(configs)
  fields = sorted(found, key=lambda field: field != "objective.name")  # First what matters most; the rest as the configs have them.
  known = [i for i, config in enumerate(configs) if config]
  if fields[:1] == ["objective.name"] and len({_canonical(found["objective.name"][i]) for i in known}) == len(known):
    fields = [field for field in fields if field == "objective.name" or not field.startswith("objective.")]  # The name stands for them.
  if len(fields) > MAX_NAMED:
    fields = _telling(found, fields, known)
  names = list(fallbacks)
  for digits in (4, 17):  # The fewest that tell them apart.
    names = _names(configs, found, fields, fallbacks, digits)
    if len(set(names)) == len(names):
      break
  return names


def _names(
  configs: Sequence[Mapping[str, Any]], found: Mapping[str, Sequence[Any]], fields: Sequence[str], fallbacks: Sequence[str], digits: int
) -> list[str]:
  short = {field: field.rpartition(".")[2] for field in fields}
  clashing = {name for name in short.values() if list(short.values()).count(name) > 1}
  names = []
  for i, config in enumerate(configs):
    parts = []
    for field in fields if config else ():
      text = value_text(found[field][i], digits)
      label = field if short[field] in clashing or short[field] in ("name", "path") else short[field]
      parts.append(text if field == "objective.name" else f"{label}={text}")
    names.append(", ".join(parts) or (str(config.get("objective.name") or "all runs") if config else fallbacks[i]))
  return names


def _telling(found: Mapping[str, Sequence[Any]], fields: Sequence[str], arms: Sequence[int]) -> list[str]:
  """As few fields as tell the arms apart: again and again the one that splits most of those still together."""
  chosen: list[str] = []
  key = lambda i, used: tuple(_canonical(found[field][i]) for field in used)
  count = lambda used: len({key(i, used) for i in arms})
  while count(chosen) < len(arms):
    chosen.append(max((field for field in fields if field not in chosen), key=lambda field: count([*chosen, field])))
  return chosen


def value_text(value: Any, digits: int = 4) -> str:
  """Writes a setting as a name shows it.

  Args:
    value: Value of the config.
    digits: Most digits of a fraction. With more than 4 a path is not cut down to its last part either.

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
  """Returns each seed's held-out accuracy at the "start" or "final"; runs of one seed are averaged, for they are no further seed."""
  found: dict[Any, list[float]] = {}
  for i, run in enumerate(runs):
    if (accuracy := accuracy_of(run, value)) is not None:
      found.setdefault(run.seed if run.seed is not None else f"run {i}", []).append(accuracy)
  return {seed: float(np.mean(values)) for seed, values in found.items()}


def accuracy_of(run: RunRecord, value: str) -> float | None:
  """Held-out accuracy at the start or at the end: from the rows, which are always there, else from the summary."""
  _, measured = series((row for row in run.rows if row["phase"] == "eval"), "eval/accuracy")
  if measured:
    return measured[0 if value == "start" else -1]
  found = run.summary.get(f"accuracy_{value}")
  return found if is_number(found) else None


def results(arms: Sequence[Arm]) -> list[dict[str, Any]]:
  """A row of results for each arm. Only complete runs count, unless an arm has none: then its numbers so far stand there.

  Returns:
    For each arm `counted` runs, whether they are `so_far`, intervals `start`, `final` and `gain` by seed, `difference` of the final
    accuracy to the first arm over the seeds that both have, unless one of the two arms has no complete run, and means of `tokens`, `steps`
    and `seconds`.
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
        "start": _plain(interval(list(start.values()))),
        "final": _plain(interval(list(final.values()))),
        "gain": _plain(interval([final[seed] - start[seed] for seed in final if seed in start])),
        "difference": None if i == 0 or so_far[0] or so_far[i] else _plain(interval(paired)),
        "tokens": _mean([run.summary.get("tokens") for run in runs]),
        "steps": _mean([run.num_steps for run in runs]),
        "seconds": _mean([run.summary.get("wall_seconds") for run in runs]),
      }
    )
  return rows


def _plain(found: Interval | None) -> dict[str, Any] | None:
  return found and found._asdict()


def _mean(values: Sequence[Any]) -> float | None:
  known = [value for value in values if is_number(value)]
  return float(np.mean(known)) if known else None
