"""Builders of rows and search spaces: the module that `get_hyper(h)` and `space(h)` receive as `h`.

Rows are plain lists of {field: value}.

  def get_hyper(h):
    return h.product([
      h.zipit([
        h.sweep("objective.clip_low", (3e-3, 6e-3)),
        h.sweep("objective.clip_high", (4e-3, 8e-3)),
      ]),
      h.sweep("seed", range(5)),
    ])

The names follow the config files of big_vision and scenic. For `--search`, a file's `space(h)`
returns the distributions to draw from:

  def space(h):
    return {
      "objective.clip_low": h.log_uniform(1e-4, 1e-2),
      "learner.updates_per_rollout": h.choice((1, 2, 4)),
      "num_steps": 60,
    }
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Rows = list[dict[str, Any]]


class Uniform(NamedTuple):
  """Uniform or log-uniform distribution of a number.

  Attributes:
    low: Smallest number.
    high: Largest number.
    log: Whether the logarithms are uniform.
    whole: Whether to draw whole numbers only.
  """

  low: float
  high: float
  log: bool = False
  whole: bool = False


class Choice(NamedTuple):
  """Uniform distribution over a set of values.

  Attributes:
    values: Values to choose from, at least one.
  """

  values: tuple[Any, ...]


def uniform(low: float, high: float) -> Uniform:
  """Returns the distribution of a number from `low` to `high`."""
  return _checked(Uniform(float(low), float(high)))


def log_uniform(low: float, high: float) -> Uniform:
  """Returns a log-uniform distribution: [1e-4, 1e-3] is as likely as [1e-3, 1e-2]."""
  if low <= 0:
    raise ValueError(f"log_uniform: found {low} to {high}, expected numbers > 0")
  return _checked(Uniform(float(low), float(high), log=True))


def integers(low: int, high: int) -> Uniform:
  """Returns the distribution of a whole number from `low` to `high`, both included."""
  if low != int(low) or high != int(high):
    raise ValueError(f"integers: found {low} to {high}, expected whole numbers")
  return _checked(Uniform(int(low), int(high), whole=True))


def choice(values: Iterable[Any]) -> Choice:
  """Returns the distribution of a choice among some values."""
  choices = tuple(values)
  if not choices:
    raise ValueError("choice: found no values, expected at least one")
  return Choice(choices)


def _checked(space: Uniform) -> Uniform:
  if not math.isfinite(space.high - space.low):
    raise ValueError(f"found {space.low} to {space.high}, expected finite numbers")
  if not space.low < space.high:
    raise ValueError(f"found {space.low} to {space.high}, expected the smaller number first")
  return space


def sweep(field: str, values: Iterable[Any]) -> Rows:
  """Makes a row for each value of one field.

  Example:
    >>> sweep("seed", range(2))
    [{'seed': 0}, {'seed': 1}]
  """
  return [{field: value} for value in values]


def fixed(field: str, value: Any, length: int = 1) -> Rows:
  """Repeats the same value in `length` rows."""
  return [{field: value}] * length


def product(groups: Sequence[Rows]) -> Rows:
  """Makes every combination of a row of each group; the last group varies fastest.

  Example:
    >>> product([sweep("a", (1, 2)), sweep("seed", (0, 1))])
    [{'a': 1, 'seed': 0}, {'a': 1, 'seed': 1}, {'a': 2, 'seed': 0}, {'a': 2, 'seed': 1}]
  """
  return [_merged(rows) for rows in itertools.product(*groups)]


def zipit(groups: Sequence[Rows]) -> Rows:
  """Joins the groups row by row. A group of one row joins all rows of the others.

  Raises:
    ValueError: If the groups differ in length.

  Example:
    >>> zipit([sweep("a", (1, 2)), sweep("b", (3, 4))])
    [{'a': 1, 'b': 3}, {'a': 2, 'b': 4}]
  """
  longest = max(map(len, groups), default=0)
  if wrong := sorted({len(rows) for rows in groups} - {1, longest}):
    raise ValueError(
      f"zipit: found groups of {', '.join(map(str, [*wrong, longest]))} rows, expected as many rows in each"
    )
  return [_merged(rows) for rows in zip(*(rows * longest if len(rows) == 1 else rows for rows in groups), strict=True)]


def chainit(groups: Sequence[Rows]) -> Rows:
  """Concatenates the rows of the groups.

  Example:
    >>> chainit([sweep("a", (1,)), sweep("b", (2,))])
    [{'a': 1}, {'b': 2}]
  """
  return [dict(row) for rows in groups for row in rows]


def _merged(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
  merged: dict[str, Any] = {}
  for row in rows:
    if both := merged.keys() & row.keys():
      raise ValueError(f"{', '.join(sorted(both))}: found in two groups of one product or zipit, expected it in one")
    merged |= row
  return merged
