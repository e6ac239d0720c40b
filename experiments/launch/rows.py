"""Rows of a sweep: reading them from `sweep(add)` or `get_hyper(h)`, naming and checking them."""

import contextlib
import hashlib
import io
import json
import re
import runpy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.launch import hyper
from jaxrl_llm import main
from jaxrl_llm.config import command_line
from jaxrl_llm.config import fields as fields_lib
from jaxrl_llm.messages import did_you_mean, one_line

ID_LENGTH = 8


class SweepError(ValueError):
  """Reason why a sweep is impossible; the message consists of the lines to show."""


class Row(NamedTuple):
  """Overrides of a trial and their id.

  Attributes:
    id: Hash of the overrides alone. It depends neither on their order, nor on other rows, nor on
      the process.
    overrides: Values by config field, such as "objective.clip_low".
  """

  id: str
  overrides: dict[str, Any]


def make_row(overrides: Mapping[str, Any]) -> Row:
  """Makes a row and its id.

  Raises:
    SweepError: If the command line cannot carry a value.

  Example:
    >>> make_row({"seed": 1, "learner.learning_rate": 1e-4}).id == make_row({"learner.learning_rate": 0.0001, "seed": 1.0}).id
    True
  """
  overrides = {field.removeprefix("config."): _plain(value, field) for field, value in overrides.items()}
  numbers = {field: _hashed(value) for field, value in overrides.items()}
  text = json.dumps(numbers, sort_keys=True, ensure_ascii=True)
  return Row(hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH], overrides)


def _plain(value: Any, field: str) -> Any:
  """Converts NumPy's numbers to Python's and lists to tuples."""
  value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
  if isinstance(value, list | tuple):
    return tuple(_plain(item, field) for item in value)
  if value is None or isinstance(value, bool | int | float | str):
    return value
  raise SweepError(
    f"{field}: found {value!r} ({type(value).__name__}), "
    "expected a number, a text, True, False, None or a tuple of these"
  )


def _hashed(value: Any) -> Any:
  """Normalises a value for the hash: 1 and 1.0 are the same setting, True and 1 are not."""
  if isinstance(value, tuple):
    return [_hashed(item) for item in value]
  return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else value


def value_text(value: Any) -> str:
  """Formats a value for the command line.

  Example:
    >>> [value_text(x) for x in (1e-4, "sapo", (1, 2), None, True)]
    ['0.0001', 'sapo', '(1, 2)', 'None', 'True']
  """
  return value if isinstance(value, str) else repr(value)


def shown(overrides: Mapping[str, Any], fields: Sequence[str] | None = None) -> str:
  """Formats overrides for people: `objective.clip_low=0.003 seed=1`."""
  return " ".join(f"{field}={value_text(overrides[field])}" for field in (fields or overrides) if field in overrides)


def varying(rows: Sequence[Row]) -> list[str]:
  """Returns the fields in which the rows differ, in order of appearance.

  Of a single row it returns all fields.
  """
  fields = list(dict.fromkeys(field for row in rows for field in row.overrides))
  if len(rows) == 1:
    return fields
  missing = object()
  return [field for field in fields if any(row.overrides.get(field, missing) != rows[0].overrides.get(field, missing) for row in rows)]


def read_sweep(path: str, *, seeds: Sequence[int] = ()) -> list[Row]:
  """Reads the rows of a file.

  Args:
    path: Path of a sweep file or of a config. Text after a colon is the config's argument.
    seeds: Seeds with which each row is repeated.

  Raises:
    SweepError: If the file or its function is missing, the function raises an exception, there are
      no rows, or a row occurs twice.
  """
  namespace = load_file(path)
  made: list[dict[str, Any]] = []

  def add(*positional: Any, **overrides: Any) -> None:
    if positional and not (len(positional) == 1 and isinstance(positional[0], Mapping)):
      raise TypeError("add takes fields by name, as in add(seed=0, **{'objective.clip_low': 3e-3})")
    made.append({**(positional[0] if positional else {}), **overrides})

  functions = {
    "sweep": lambda function: function(add),
    "get_hyper": lambda function: made.extend(map(dict, function(hyper))),
  }
  named = [name for name in functions if callable(namespace.get(name))]
  if len(named) != 1:
    there = " and ".join(named) or "neither"
    raise SweepError(
      f"--sweep={path}: found {there} of sweep(add) and get_hyper(h), expected one of them; see experiments/sweeps"
    )
  call(path, lambda: functions[named[0]](namespace[named[0]]))
  if not made:
    raise SweepError(f"--sweep={path}: {named[0]} made no rows, expected at least one")
  if seeds:
    if any("seed" in row for row in made):
      raise SweepError(f"--seeds: the rows of {path} have seeds of their own; leave out one of the two")
    made = [row | {"seed": seed} for row in made for seed in seeds]
  try:
    rows = [make_row(overrides) for overrides in made]
  except SweepError as error:
    raise SweepError(f"--sweep={path}: {error}") from error
  _refuse_twins(rows, path)
  return rows


def load_file(path: str) -> dict[str, Any]:
  """Executes a sweep file and returns the names that it defines."""
  file = path.split(":")[0]
  if not Path(file).is_file():
    there = sorted(path for path in Path("experiments/sweeps").glob("*.py") if path.stem != "__init__")
    hint = did_you_mean(Path(file).name, [path.name for path in there], "; did you mean experiments/sweeps/{}?")
    names = ", ".join(map(str, there)) or "none in experiments/sweeps"
    raise SweepError(f"--sweep: found no file {file!r}, expected a Python file; available: {names}{hint}")
  command_line.make_importable(file)
  return call(path, lambda: runpy.run_path(file))


def call(path: str, function: Callable[[], Any]) -> Any:
  """Calls a function of the user's file and returns its result.

  Raises:
    SweepError: If the function raises anything. The message names the line.
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
      raise SweepError(
        f"--sweep={path}: rows {first} and {number} have {same}: {shown(row.overrides)}; "
        "make each row a different trial"
      )


def check_rows(config_path: str, base: Mapping[str, Sequence[str]], rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
  """Refuses rows that could not run, all at once and without starting a device.

  Args:
    config_path: Config of all rows, as FILE or FILE:ARGUMENT.
    base: Overrides of all rows, as texts by field.
    rows: Rows of the sweep.

  Returns:
    The resolved and flattened config of each row, by id.

  Raises:
    SweepError: If a row could not run. One line for each problem, with its row.
  """
  wrong: dict[str, list[Row]] = {}
  configs: dict[str, dict[str, Any]] = {}
  for row in rows:
    try:
      with contextlib.redirect_stdout(io.StringIO()):  # The trial itself reports dropped settings.
        config = command_line.override(command_line.load(config_path), overrides_of(base, row))
      configs[row.id] = fields_lib.flatten(config)
      problems = [*_lost(configs[row.id], row), *main.config_problems(config)]
    except command_line.UsageError as error:
      problems = str(error).splitlines()
    for line in problems:
      wrong.setdefault(line, []).append(row)
  if wrong:
    raise SweepError("\n".join(f"{_prefix(affected, rows)}{line}" for line, affected in wrong.items()))
  _refuse_same_configs(configs, rows)
  return configs


def overrides_of(base: Mapping[str, Sequence[str]], row: Row) -> dict[str, list[str]]:
  """Returns the overrides of a trial, as texts by field; the row's replace those of all rows."""
  # A row may set None only where the file has None already: no command line can set it.
  mine = {field: [value_text(value)] for field, value in row.overrides.items() if value is not None}
  return {field: list(texts) for field, texts in base.items() if field not in mine} | mine


def _lost(config: Mapping[str, Any], row: Row) -> Iterator[str]:
  """Yields a message for each value that the command line cannot carry, such as None for a text."""
  for field, value in row.overrides.items():
    if field in config and _hashed(_plain(config[field], field)) != _hashed(value):
      yield (
        f"config.{field}: found {value!r}, which the command line turns into {config[field]!r}; "
        "set it in the config file"
      )


def _prefix(affected: Sequence[Row], rows: Sequence[Row]) -> str:
  """Returns the row to name before a problem, or nothing if all rows have the problem."""
  if len(affected) == len(rows):
    return ""
  more = f" and {len(affected) - 1} more" if len(affected) > 1 else ""
  return f"row {affected[0].id}{more} ({shown(affected[0].overrides)}): "


def _refuse_same_configs(configs: Mapping[str, Mapping[str, Any]], rows: Sequence[Row]) -> None:
  seen: dict[str, Row] = {}
  for row in rows:
    text = repr(sorted(configs[row.id].items()))
    if (first := seen.setdefault(text, row)) is not row:
      raise SweepError(
        f"rows {first.id} ({shown(first.overrides) or 'nothing'}) and {row.id} ({shown(row.overrides) or 'nothing'}) "
        "give the same config; make each row a different trial"
      )


def slug(text: str) -> str:
  """Returns a text as a name for files and jobs.

  Example:
    >>> slug("experiments/Clip_Range.py")
    'experiments-clip-range-py'
  """
  return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
