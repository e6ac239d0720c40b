"""Trials (rows with a workdir and a command) and the folder that holds the trials of a sweep."""

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
    name: Name that is unique in the sweep, of lower-case letters, digits and hyphens.
    row: Row that distinguishes the trial from the others.
    workdir: Workdir of the run, as the machine that trains sees it.
    command: Command `python -m jaxrl_llm.main ...`. The same command starts the run, resumes it,
      and exits at once if the run has finished.
  """

  name: str
  row: Row
  workdir: str
  command: tuple[str, ...]


class Sweep(NamedTuple):
  """Identity and folders of a sweep.

  Attributes:
    name: Name of the sweep.
    config: Config of all trials, as FILE or FILE:ARGUMENT.
    base: Overrides of all trials, as texts by field.
    folder: Folder of the sweep's own files.
    workdirs: Folder of the trials' workdirs; the same as `folder` unless another machine trains.
  """

  name: str
  config: str
  base: dict[str, list[str]]
  folder: Path
  workdirs: str


def sweep_name(config: str, sweep: str) -> str:
  """Names a sweep after its files.

  Example:
    >>> sweep_name("configs/gspo.py:tiny", "experiments/sweeps/clip_range.py"), sweep_name("configs/gspo.py", "configs/gspo.py")
    ('gspo-tiny-clip-range', 'gspo')
  """
  file, _, argument = config.partition(":")
  parts = [Path(file).stem, argument] + ([Path(sweep.split(":")[0]).stem] if sweep.split(":")[0] != file else [])
  return "-".join(slug(part) for part in parts if part)


def make_trials(sweep: Sweep, rows: Sequence[Row]) -> list[Trial]:
  """Makes the trials of a sweep."""
  return [make_trial(sweep, row) for row in rows]


def make_trial(sweep: Sweep, row: Row) -> Trial:
  """Makes the trial of one row."""
  workdir = f"{sweep.workdirs.rstrip('/')}/{row.id}"
  flags = [f"--config.{field}={text}" for field, texts in overrides_of(sweep.base, row).items() for text in texts]
  command = ("python", "-m", "jaxrl_llm.main", f"--config={sweep.config}", *flags, f"--workdir={workdir}")
  return Trial(f"{sweep.name}-{row.id}", row, workdir, command)


def refuse_changed(trials: Sequence[Trial], configs: Mapping[str, Mapping[str, Any]]) -> None:
  """Refuses workdirs that hold runs of an older config file.

  Args:
    trials: Trials of the sweep.
    configs: Resolved and flattened configs, by row.

  Raises:
    SweepError: If there are any. The message shows the first.
  """
  changed = [(trial, fields) for trial in trials if (fields := workdirs.changes(Path(trial.workdir), configs[trial.row.id]))]
  if changed:
    trial, fields = changed[0]
    shown = "; ".join(f"{field}: {was!r} there, {now!r} now" for field, (was, now) in list(fields.items())[:3])
    more = f", as do {len(changed) - 1} more" if len(changed) > 1 else ""
    raise SweepError(
      f"{trial.workdir} holds a run with another config ({shown}){more}; "
      "restore these values, or choose another --folder"
    )


@contextlib.contextmanager
def claimed(sweep: Sweep) -> Iterator[None]:
  """Locks the folder for this launcher while the context lasts.

  Raises:
    SweepError: If another launcher is using the folder.
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
      raise SweepError(
        f"--folder={sweep.folder}: another launcher is using it ({file.read().strip() or 'unknown'}); wait for it to end"
      ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()}")
    file.flush()
    yield


def record(sweep: Sweep, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
  """Writes the sweep's identity and rows to its folder.

  Args:
    sweep: Sweep of this launch.
    rows: Rows of this launch.

  Returns:
    Rows of earlier launches that the sweep no longer has, as overrides by id. Their workdirs stay.

  Raises:
    SweepError: If the folder holds another sweep or anything else.
  """
  path = sweep.folder / _RECORD
  mine = {"config": sweep.config, "base": sweep.base}
  before = _read(path)
  if before is not None and (other := {key: before.get(key) for key in mine}) != mine:
    differing = "; ".join(f"{key}: {other[key]!r} there, {mine[key]!r} now" for key in mine if other[key] != mine[key])
    raise SweepError(f"--folder={sweep.folder}: it holds a different sweep ({differing}); choose another --folder")
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
  """Converts a target's own flags to its `Options`.

  Args:
    kind: NamedTuple of texts, whole numbers and tuples of texts.
    given: Texts by flag.
    target: Target that the flags belong to.

  Raises:
    SweepError: If a flag is unknown or a value has another type. One line for each problem.
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
    wrong.append(f"{', '.join(f'--{name}' for name in missing)}: not set; --target={target} requires it")
  if wrong:
    raise SweepError("\n".join(wrong))
  return kind(**values)
