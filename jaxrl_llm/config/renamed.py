"""Fields that others have replaced: what to write instead, and what a recorded config means."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm.messages import Problem, shown


class Renamed(NamedTuple):
  """The successor of a field.

  Attributes:
    path: Field to set instead.
    meaning: What it counts.
    rule: Rule by which its value follows from that of the old field.
  """

  path: str
  meaning: str
  rule: str


RENAMED = {
  "learner.micro_batches": Renamed(
    "learner.rows_per_device",
    "the rows that a device takes at a time",
    "the largest of row_buckets / (micro_batches x devices of mesh data x fsdp x expert), or None for micro_batches=1",
  ),
}
"""Fields that are gone, by path."""


def problem(path: str, value: Any, config: ConfigDict) -> Problem:
  """Returns the problem of a field of `RENAMED` that is still set, with the value to use instead.

  Args:
    path: Path of the old field.
    value: Value of the old field, or its text on the command line.
    config: Config that sets the new field's neighbours, such as the buckets of rows.

  Example:
    >>> from jaxrl_llm.config.fields import base
    >>> config = base()
    >>> config.learner.row_buckets, config.mesh.data = (32, 64), 4
    >>> str(problem("learner.micro_batches", "8", config))
    'config.learner.micro_batches: found 8, expected config.learner.rows_per_device=2, the rows that
    a device takes at a time'
  """
  new = RENAMED[path]
  size = _rows_per_device(value, config)
  value = value if isinstance(value, str) and value.isdigit() else shown(value)
  if size is None:
    return Problem(f"config.{path}", value, f"config.{new.path}, {new.meaning}: {new.rule}")
  return Problem(f"config.{path}", value, f"config.{new.path}={size[0]}, {new.meaning}")


def _rows_per_device(value: Any, config: ConfigDict) -> tuple[int | None] | None:
  """Returns the number of rows per device of a number of micro-batches; None if it is not known."""
  try:
    number = int(value)
  except (TypeError, ValueError):
    return None
  if number == 1:
    return (None,)
  learner, mesh = config.get("learner", {}), config.get("mesh", {})
  sizes, buckets = [mesh.get(axis) for axis in ("data", "fsdp", "expert")], learner.get("row_buckets")
  if not buckets or not all(isinstance(size, int) and size > 0 for size in sizes):
    return None
  size, rest = divmod(max(buckets), max(number, 1) * math.prod(sizes))
  return None if rest or not size else (size,)


def hint(text: str) -> str | None:
  """Returns the fix of a message of `ml_collections` that a field of `RENAMED` does not exist.

  Example:
    >>> hint('Key "micro_batches" does not exist and cannot be added')
    'learner.micro_batches is now learner.rows_per_device, the rows that a device takes at a time:
    the largest of row_buckets / (micro_batches x devices of mesh data x fsdp x expert), or None for
    micro_batches=1'
  """
  for path, new in RENAMED.items():
    if path.rpartition(".")[2] in text:
      return f"{path} is now {new.path}, {new.meaning}: {new.rule}"
  return None


def current(saved: Mapping[str, Any], *, updates: bool = True) -> dict[str, Any]:
  """Returns a recorded config in the fields of this version.

  `learner.micro_batches=1` means what `learner.rows_per_device=None` means, with the same bits. No
  value has the meaning of another number: it split every bucket of rows into as many parts. Such a
  number stays, for the caller to refuse.

  Args:
    saved: Config by section, as a run recorded it.
    updates: Whether the config is read for updates. Nothing else depends on the number, so that it
      is dropped.

  Example:
    >>> current({"seed": 0, "learner": {"b1": 0.9, "micro_batches": 1}})
    {'seed': 0, 'learner': {'b1': 0.9, 'rows_per_device': None}}
  """
  learner = saved.get("learner")
  if not isinstance(learner, Mapping) or "micro_batches" not in learner or (updates and learner["micro_batches"] != 1):
    return dict(saved)
  rest = {name: value for name, value in learner.items() if name != "micro_batches"}
  return dict(saved) | {"learner": rest | {"rows_per_device": None}}
