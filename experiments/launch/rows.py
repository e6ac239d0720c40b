"""Rows of a sweep: read from a file's `sweep(add)` or `get_hyper(h)`, named by what they override, and checked before anything starts."""

import contextlib
import hashlib
import io
import json
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.launch import hyper
from jaxrl_llm import main
from jaxrl_llm.config import command_line
from jaxrl_llm.config import fields as fields_lib
from jaxrl_llm.messages import one_line

ID_LENGTH = 8


class SweepError(ValueError):
  """What makes a sweep impossible; the message is the lines to show."""


class Row(NamedTuple):
  """A trial's overrides, and their name.

  Attributes:
    id: depends on the overrides alone: not on their order, on other rows or on the process.
    overrides: value by config field, such as "objective.clip_low".
  """

  id: str
  overrides: dict[str, Any]


def make_row(overrides: Mapping[str, Any]) -> Row:
  """A row with its id.

  Raises:
    SweepError: a value that no command line can carry.

  Example:
    >>> make_row({"seed": 1, "learner.learning_rate": 1e-4}).id == make_row({"learner.learning_rate": 0.0001, "seed": 1.0}).id
    True
  """
  overrides = {field.removeprefix("config."): _plain(value, field) for field, value in overrides.items()}
  numbers = {field: _hashed(value) for field, value in overrides.items()}
  text = json.dumps(numbers, sort_keys=True, ensure_ascii=True)
  return Row(hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH], overrides)


def _plain(value: Any, field: str) -> Any:
  """NumPy's numbers as Python's, lists as tuples."""
  value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
  if isinstance(value, list | tuple):
    return tuple(_plain(item, field) for item in value)
  if value is None or isinstance(value, bool | int | float | str):
    return value
  raise SweepError(f"{field}: found {value!r} ({type(value).__name__}), expected a number, a text, True, False, None or a tuple of these")


def _hashed(value: Any) -> Any:
  """1 and 1.0 are the same setting, True and 1 are not."""
  if isinstance(value, tuple):
    return [_hashed(item) for item in value]
  return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else value


def value_text(value: Any) -> str:
  """A value as the command line takes it.

  Example:
    >>> [value_text(x) for x in (1e-4, "sapo", (1, 2), None, True)]
    ['0.0001', 'sapo', '(1, 2)', 'None', 'True']
  """
  return value if isinstance(value, str) else repr(value)


def shown(overrides: Mapping[str, Any], fields: Sequence[str] | None = None) -> str:
  """Overrides for people: `objective.clip_low=0.003 seed=1`."""
  return " ".join(f"{field}={value_text(overrides[field])}" for field in (fields or overrides) if field in overrides)


def varying(rows: Sequence[Row]) -> list[str]:
  """The fields that not all rows have alike, in the order in which they come up; all fields of a single row."""
  fields = list(dict.fromkeys(field for row in rows for field in row.overrides))
  if len(rows) == 1:
    return fields
  missing = object()
  return [field for field in fields if any(row.overrides.get(field, missing) != rows[0].overrides.get(field, missing) for row in rows)]


def read_sweep(path: str, *, seeds: Sequence[int] = ()) -> list[Row]:
  """The rows of a file.

  Args:
    path: of a file of sweeps or of a config (what stands behind a colon is the config's argument).
    seeds: each row once with each of them.

  Raises:
    SweepError: no such file, no such function, an exception in it, no rows, or the same row twice.
  """
  namespace = load_file(path)
  found: list[dict[str, Any]] = []

  def add(*positional: Any, **overrides: Any) -> None:
    if positional and not (len(positional) == 1 and isinstance(positional[0], Mapping)):
      raise TypeError("add takes fields by name, as in add(seed=0, **{'objective.clip_low': 3e-3})")
    found.append({**(positional[0] if positional else {}), **overrides})

  functions = {"sweep": lambda function: function(add), "get_hyper": lambda function: found.extend(map(dict, function(hyper)))}
  named = [name for name in functions if callable(namespace.get(name))]
  if len(named) != 1:
    there = " and ".join(named) or "neither"
    raise SweepError(f"--sweep={path}: found {there} of sweep(add) and get_hyper(h), expected one of them; see experiments/sweeps")
  call(path, lambda: functions[named[0]](namespace[named[0]]))
  if not found:
    raise SweepError(f"--sweep={path}: {named[0]} made no rows, expected at least one")
  if seeds:
    if any("seed" in row for row in found):
      raise SweepError(f"--seeds: the rows of {path} have seeds of their own; leave out one of the two")
    found = [row | {"seed": seed} for row in found for seed in seeds]
  try:
    rows = [make_row(overrides) for overrides in found]
  except SweepError as error:
    raise SweepError(f"--sweep={path}: {error}") from error
  _refuse_twins(rows, path)
  return rows


def load_file(path: str) -> dict[str, Any]:
  """What a file of sweeps defines."""
  file = path.split(":")[0]
  if not Path(file).is_file():
    there = ", ".join(sorted(str(p) for p in Path("experiments/sweeps").glob("*.py") if p.stem != "__init__"))
    raise SweepError(f"--sweep: no file {file!r}, expected a Python file; there are: {there or 'none in experiments/sweeps'}")
  root = str(Path(file).resolve().parent.parent)
  if root not in sys.path:  # A config imports `configs.common` from any working directory.
    sys.path.append(root)
  return call(path, lambda: runpy.run_path(file))


def call(path: str, function: Callable[[], Any]) -> Any:
  """What a function of the user's file returns.

  Raises:
    SweepError: whatever it raises, with the line.
  """
  try:
    return function()
  except SweepError:
    raise
  except Exception as error:  # The file is Python: anything can be wrong with it.
    file = path.split(":")[0]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" (line {lines[-1]})" if lines else ""
    raise SweepError(f"--sweep={path}: {one_line(error, limit=1000)}{where}") from error


def _refuse_twins(rows: Sequence[Row], path: str) -> None:
  seen: dict[str, int] = {}
  for number, row in enumerate(rows, 1):
    if (first := seen.setdefault(row.id, number)) != number:
      other = rows[first - 1].overrides
      same = "the same overrides" if other == row.overrides else f"the same id {row.id} (the other: {shown(other)})"
      raise SweepError(f"--sweep={path}: rows {first} and {number} have {same}: {shown(row.overrides)}; each row is to be another trial")


def check_rows(config_path: str, base: Mapping[str, Sequence[str]], rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
  """Refuses rows that could not run, all of them at once. No device starts for it.

  Args:
    config_path: FILE or FILE:ARGUMENT.
    base: overrides of all rows, texts by field.
    rows: of the sweep.

  Returns:
    Each row's resolved config, flat, by id.

  Raises:
    SweepError: a line for each thing that is wrong, with the row.
  """
  wrong: dict[str, list[Row]] = {}
  configs: dict[str, dict[str, Any]] = {}
  for row in rows:
    try:
      with contextlib.redirect_stdout(io.StringIO()):  # What another objective drops is said by the trial.
        config = command_line.override(command_line.load(config_path), overrides_of(base, row))
      configs[row.id] = fields_lib.flatten(config)
      found = [*_lost(configs[row.id], row), *main.problems(config)]
    except command_line.UsageError as error:
      found = str(error).splitlines()
    for line in found:
      wrong.setdefault(line, []).append(row)
  if wrong:
    raise SweepError("\n".join(f"{_whose(of, rows)}{line}" for line, of in wrong.items()))
  _refuse_same_configs(configs, rows)
  return configs


def overrides_of(base: Mapping[str, Sequence[str]], row: Row) -> dict[str, list[str]]:
  """Texts by field: those of all rows, and the row's, which come after them."""
  # None stands where the file has None already, and no command line can bring it about.
  mine = {field: [value_text(value)] for field, value in row.overrides.items() if value is not None}
  return {field: list(texts) for field, texts in base.items() if field not in mine} | mine


def _lost(config: Mapping[str, Any], row: Row) -> Iterator[str]:
  """Values that the command line cannot carry, such as None for a text."""
  for field, value in row.overrides.items():
    if field in config and _hashed(_plain(config[field], field)) != _hashed(value):
      yield f"config.{field}: found {value!r}, but a command line makes it {config[field]!r}; leave it to the config file"


def _whose(of: Sequence[Row], rows: Sequence[Row]) -> str:
  """Before a problem: the row, or nothing where all rows have it."""
  if len(of) == len(rows):
    return ""
  more = f" and {len(of) - 1} more" if len(of) > 1 else ""
  return f"row {of[0].id}{more} ({shown(of[0].overrides)}): "


def _refuse_same_configs(configs: Mapping[str, Mapping[str, Any]], rows: Sequence[Row]) -> None:
  seen: dict[str, Row] = {}
  for row in rows:
    text = repr(sorted(configs[row.id].items()))
    if (first := seen.setdefault(text, row)) is not row:
      raise SweepError(
        f"rows {first.id} ({shown(first.overrides) or 'nothing'}) and {row.id} ({shown(row.overrides) or 'nothing'}) give the same config; "
        "each row is to be another trial"
      )


def slug(text: str) -> str:
  """A name for files and jobs.

  Example:
    >>> slug("experiments/Clip_Range.py")
    'experiments-clip-range-py'
  """
  return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
