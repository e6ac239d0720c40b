"""A trial is a row with a workdir and a command; a sweep's folder holds them all, and remembers what it is a sweep of."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.launch.rows import Row, SweepError, overrides_of, slug
from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.workdir import claim as workdirs

try:
  import fcntl
except ImportError:  # Windows.
  fcntl = None

_RECORD = "sweep.json"


class Trial(NamedTuple):
  """One run of a sweep.

  Attributes:
    name: unique in the sweep, of lower-case letters, digits and hyphens.
    row: what makes it different.
    workdir: of the run, as the machine that trains sees it.
    command: `python -m jaxrl_llm.main ...`; the same command starts it, goes on with it, and finds that it is finished.
  """

  name: str
  row: Row
  workdir: str
  command: tuple[str, ...]


class Sweep(NamedTuple):
  """What a folder holds the trials of.

  Attributes:
    name: of the sweep.
    config: FILE or FILE:ARGUMENT.
    base: overrides of all trials, texts by field.
    folder: of the sweep's own files.
    workdirs: where the trials' workdirs lie; the folder itself unless another machine trains.
  """

  name: str
  config: str
  base: dict[str, list[str]]
  folder: Path
  workdirs: str


def sweep_name(config: str, sweep: str) -> str:
  """The name of a sweep, by its files.

  Example:
    >>> sweep_name("configs/gspo.py:tiny", "experiments/sweeps/clip_range.py"), sweep_name("configs/gspo.py", "configs/gspo.py")
    ('gspo-tiny-clip-range', 'gspo')
  """
  file, _, argument = config.partition(":")
  parts = [Path(file).stem, argument] + ([Path(sweep.split(":")[0]).stem] if sweep.split(":")[0] != file else [])
  return "-".join(slug(part) for part in parts if part)


def make_trials(sweep: Sweep, rows: Sequence[Row]) -> list[Trial]:
  """The trials of a sweep."""
  return [make_trial(sweep, row) for row in rows]


def make_trial(sweep: Sweep, row: Row) -> Trial:
  """The trial of one row."""
  workdir = f"{sweep.workdirs.rstrip('/')}/{row.id}"
  flags = [f"--config.{field}={text}" for field, texts in overrides_of(sweep.base, row).items() for text in texts]
  command = ("python", "-m", "jaxrl_llm.main", f"--config={sweep.config}", *flags, f"--workdir={workdir}")
  return Trial(f"{sweep.name}-{row.id}", row, workdir, command)


def refuse_changed(trials: Sequence[Trial], configs: Mapping[str, Mapping[str, Any]]) -> None:
  """Refuses to take runs of an older config file for trials of this sweep.

  Args:
    trials: of the sweep.
    configs: resolved, flat, by row.

  Raises:
    SweepError: there are some; the message shows the first.
  """
  changed = [(trial, found) for trial in trials if (found := workdirs.changes(Path(trial.workdir), configs[trial.row.id]))]
  if changed:
    trial, fields = changed[0]
    shown = "; ".join(f"{field}: {was!r} there, {now!r} now" for field, (was, now) in list(fields.items())[:3])
    more = f", as do {len(changed) - 1} more" if len(changed) > 1 else ""
    raise SweepError(f"{trial.workdir} holds a run with another config ({shown}){more}; set these back, or give another --folder")


@contextlib.contextmanager
def claimed(sweep: Sweep) -> Iterator[None]:
  """The folder, for this launcher alone as long as it lasts.

  Raises:
    SweepError: another launcher works in it.
  """
  try:
    sweep.folder.mkdir(parents=True, exist_ok=True)
    (sweep.folder / ".launcher").touch()
  except OSError as error:
    raise SweepError(f"--folder={sweep.folder}: {error.strerror or error}; expected a folder that can be written") from error
  with open(sweep.folder / ".launcher", "a+") as file:
    try:
      if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      file.seek(0)
      raise SweepError(f"--folder={sweep.folder}: another launcher works in it ({file.read().strip() or 'unknown'}); wait for it") from None
    file.truncate(0)
    file.write(f"process {os.getpid()}")
    file.flush()
    yield


def record(sweep: Sweep, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
  """Writes down what the folder is a sweep of.

  Args:
    sweep: of now.
    rows: of now.

  Returns:
    Rows of earlier launches that the sweep no longer has, overrides by id; their workdirs stay.

  Raises:
    SweepError: the folder holds another sweep, or something else.
  """
  path = sweep.folder / _RECORD
  mine = {"config": sweep.config, "base": sweep.base}
  before = _read(path)
  if before is not None and (other := {key: before.get(key) for key in mine}) != mine:
    differing = "; ".join(f"{key}: {other[key]!r} there, {mine[key]!r} now" for key in mine if other[key] != mine[key])
    raise SweepError(f"--folder={sweep.folder}: it holds a sweep of something else ({differing}); give another --folder")
  rows_before = (before or {}).get("rows", {})
  now = {row.id: row.overrides for row in rows}
  text = json.dumps({"name": sweep.name, **mine, "rows": rows_before | now}, indent=1)
  temporary = path.with_suffix(".tmp")
  temporary.write_text(text + "\n", encoding="utf-8")
  os.replace(temporary, path)
  return {row_id: overrides for row_id, overrides in rows_before.items() if row_id not in now}


def _read(path: Path) -> dict[str, Any] | None:
  if not path.exists():
    return None
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except ValueError as error:
    raise SweepError(f"{path}: not JSON ({error}); move the folder away") from error
  if not isinstance(value, dict):
    raise SweepError(f"{path}: found a {type(value).__name__}, expected an object; move the folder away")
  return value


def options(kind: type, given: Mapping[str, Sequence[str]], *, target: str) -> Any:
  """A target's own flags as its `Options`.

  Args:
    kind: a NamedTuple of texts, whole numbers and tuples of texts.
    given: texts by flag.
    target: whose they are.

  Raises:
    SweepError: a flag that it does not have, or a value of another type; a line each.
  """
  types, values, wrong = kind.__annotations__, {}, []
  for flag, texts in given.items():
    name = flag.removeprefix(f"{target}.")
    if name not in types:
      hint = did_you_mean(name, types, "did you mean --{}?") or f"known: {', '.join(types)}"
      wrong.append(f"--{flag}: unknown for --target={target}, {hint}")
    elif types[name] is int:
      try:
        values[name] = int(texts[-1])
      except ValueError:
        wrong.append(f"--{flag}: found {texts[-1]!r}, expected a whole number")
    else:
      values[name] = tuple(texts) if "tuple" in str(types[name]) else texts[-1]
  missing = [name for name in kind._fields if name not in kind._field_defaults and name not in values]
  if missing and not wrong:
    wrong.append(f"{', '.join(f'--{name}' for name in missing)}: not set; --target={target} needs it")
  if wrong:
    raise SweepError("\n".join(wrong))
  return kind(**values)
