"""From the command line to a resolved config: the file, its overrides, and their error messages."""

import hashlib
import itertools
import re
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxrl_llm.config import check, entries, fields, fork, recorded, renamed
from jaxrl_llm.messages import UsageError, did_you_mean, shown

# Fields whose value type has changed, with the fix.
CHANGED = {"remat": "it names a policy: write 'full' for True, 'none' for False"}


class CommandLine(NamedTuple):
  """Parsed command line.

  Attributes:
    config: Resolved config.
    workdir: Folder of the run.
    dry_run: Whether to only describe the run.
    allow_config_change: Whether to resume in a workdir whose run had another config or other
      devices.
    pilot: Whether to only try the untouched model on the run's problems.
    replay: Workdir of a run to repeat; None for a run of its own.
    branch: Run and RL step to continue from; None for a run of its own.
    anyway: Whether a branch repeats steps although the code has changed.
  """

  config: ConfigDict
  workdir: Path
  dry_run: bool
  allow_config_change: bool = False
  pilot: bool = False
  replay: Path | None = None
  branch: fork.Fork | None = None
  anyway: bool = False


def parse(argv: Sequence[str]) -> CommandLine:
  """Parses the arguments of a command line, beginning with the program's name.

  Raises:
    UsageError: If a config file or field does not exist, a value has the wrong type, a flag is
      unknown, or `--branch` names no run and step.
  """
  path, overrides, rest = split(argv[1:])
  # A separate FlagValues for this call: absl's global one would still hold the overrides of an
  # earlier call.
  values = flags.FlagValues()
  workdir = flags.DEFINE_string("workdir", None, "Folder of the run.", flag_values=values)
  only_print = flags.DEFINE_bool("dry_run", False, "Describe the run without starting it.", flag_values=values)
  pilot = flags.DEFINE_bool("pilot", False, "Try the untouched model on the run's problems.", flag_values=values)
  replay = flags.DEFINE_string("replay", None, "Folder of a run to repeat.", flag_values=values)
  branch = flags.DEFINE_string("branch", None, "Run and step to continue from.", flag_values=values)
  recorded_steps = flags.DEFINE_integer(
    "recorded_steps", None, "Steps of a branch that learn from the rollouts of the run.", lower_bound=1, flag_values=values
  )
  anyway = flags.DEFINE_bool("anyway", False, "Repeat steps with other code.", flag_values=values)
  changes = flags.DEFINE_bool("allow_config_change", False, "Resume with other settings.", flag_values=values)
  try:
    strays = values([argv[0], *rest])[1:]
  except flags.Error as error:
    known = "--config=FILE[:ARGUMENT], --config.FIELD=VALUE, --workdir=DIR, --replay=DIR, --branch=DIR@STEP, --recorded_steps=K, --dry_run"
    raise UsageError(f"{error}; flags are {known}, --anyway, --pilot, --allow_config_change and --help_fields") from error
  if strays:
    raise UsageError(
      f"unknown argument {strays[0]!r}, expected flags only, as in --config.FIELD=VALUE (quote values that contain "
      "spaces)"
    )
  begins, steps = None, recorded_steps.value
  if branch.value is not None:
    begins = _branch(branch.value, workdir.value, recorded_steps=steps or 0, replay=replay.value, pilot=pilot.value)
  elif steps is not None:
    raise UsageError(f"--recorded_steps: found {steps} without --branch, expected the run that drew them, as in --branch=runs/gspo@412")
  if not path and begins is None:
    raise UsageError(f"--config is missing; for instance --config=configs/gspo.py (available: {available()})")
  if anyway.value and begins is None:
    raise UsageError("--anyway: found no --branch, expected it with a branch, whose first steps are repeated")
  if changes.value and not workdir.value:
    raise UsageError("--allow_config_change: found no --workdir, expected the folder of the run to resume")
  config = override(load(path) if path else recorded.run_config(fork.origin(begins, Path(workdir.value))), overrides)
  if replay.value is not None and not workdir.value:
    raise UsageError("--replay: found no --workdir, expected a folder for the run that repeats the other one")
  settings = {field: ",".join(texts) for field, texts in overrides.items()}
  name = Path(path.split(":")[0]).stem + "".join(f"-{part}" for part in path.split(":")[1:])
  folder, repeated = Path(workdir.value or f"runs/{name}{suffix(settings)}"), replay.value and Path(replay.value)
  return CommandLine(config, folder, only_print.value, changes.value, pilot.value, repeated, begins, anyway.value)


def _branch(text: str, workdir: str | None, *, recorded_steps: int, replay: str | None, pilot: bool) -> fork.Fork:
  """Returns the fork that `--branch` and `--recorded_steps` name.

  Raises:
    UsageError: If it names none, or another flag does not go with it.
  """
  if not workdir or "://" in workdir:
    raise UsageError(f"--branch: found {f'--workdir={workdir}' if workdir else 'no --workdir'}, expected a new folder for the branch")
  if replay is not None or pilot:
    raise UsageError(f"--branch: found {'--pilot' if pilot else '--replay'} as well, expected one of the two")
  try:
    begins = fork.parse(text)._replace(recorded=recorded_steps)
  except ValueError as error:
    raise UsageError(str(error)) from error
  if recorded.saved_config(fork.origin(begins, Path(workdir))) is None:
    raise UsageError(f"--branch: found no RL run in {begins.workdir}, expected WORKDIR@STEP, as in runs/gspo@412")
  return begins


def help_text(argv: Sequence[str], usage: str) -> str | None:
  """Returns the text that `--help` or `--help_fields` asks for; None without either.

  The fields are those of the config file, or those of every RL experiment without one. Settings are
  those of the entries that the file and the flags name.

  Raises:
    UsageError: If no field has the prefix, or the config file cannot be loaded.
  """
  if {"-h", "--help"} & set(argv[1:]):
    return usage
  path, overrides, rest = split(argv[1:])
  for flag, following in itertools.pairwise([*rest, "-"]):
    if match := re.fullmatch(r"--?help_fields(?:=(.*))?", flag):
      prefix = match[1] or ("" if following.startswith("-") else following)
      try:
        return entries.describe(prefix, override(load(path), overrides) if path else fields.base())
      except ValueError as error:
        raise UsageError(str(error)) from error
  return None


def split(args: Sequence[str]) -> tuple[str, dict[str, list[str]], list[str]]:
  """Splits arguments into the config's path, its overrides and the rest.

  A value either follows "=" or is the next argument. A bare `--config.FIELD` is True, a bare
  `--noconfig.FIELD` False. A field that is given more than once has several values.

  Example:
    >>> split(["--config=a.py:tiny", "--config.seed=1", "--config.model.remat", "--dry_run"])
    ('a.py:tiny', {'seed': ['1'], 'model.remat': ['True']}, ['--dry_run'])
  """
  path, overrides, rest = "", {}, []
  args = list(args)
  while args:
    arg = args.pop(0)
    match = re.fullmatch(r"--?(no)?config(?:\.([^=]+))?(?:=(.*))?", arg, re.DOTALL)
    if not match:
      rest.append(arg)
      continue
    negated, field, value = match.groups()
    if value is None:
      value = "False" if negated else args.pop(0) if args and not args[0].startswith("--") else "True" if field else ""
    if field:
      overrides.setdefault(field, []).append(value)
    else:
      path = value
  return path, overrides, rest


def load(path: str) -> ConfigDict:
  """Loads the config of FILE or FILE:ARGUMENT.

  Raises:
    UsageError: If the file does not exist, or makes no config.
  """
  file, *argument = path.split(":", 1)
  if not Path(file).is_file():
    hint = did_you_mean(Path(file).name, [path.name for path in config_files()], "; did you mean configs/{}?")
    raise UsageError(f"--config: found no file {file!r}, expected a config file; available: {available()}{hint}")
  make_importable(file)
  try:
    config = runpy.run_path(file)["get_config"](*argument)
  except Exception as error:  # The file is Python: anything can fail.
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" (line {lines[-1]})" if lines else ""
    reason = " ".join(str(error).split()) or "no message"
    where += next((f"; {fix}" for field, fix in CHANGED.items() if f"override field {field!r}" in reason), "")
    where += f"; {fix}" if (fix := renamed.hint(reason)) else ""
    # ml_collections lists the whole section before its hint, which comes last.
    if len(reason) > 300:
      reason = f"{reason[:120]} ... {reason[-80:]}"
    raise UsageError(f"--config={path}: {type(error).__name__}: {reason}{where}") from error
  if not isinstance(config, ConfigDict):
    raise UsageError(f"--config={path}: get_config returned a {type(config).__name__}, expected an ml_collections.ConfigDict")
  return config


def make_importable(file: str) -> None:
  """Lets a file import its package, as in `from configs import common`, from any working directory.

  The root of the package is appended to `sys.path`. A folder inside of it would offer the package's
  other folders under the names of installed modules, such as `verifiers`.
  """
  folder = Path(file).resolve().parent
  while (folder.parent / "__init__.py").is_file():
    folder = folder.parent
  if (root := str(folder.parent)) not in sys.path:
    sys.path.append(root)


def override(config: ConfigDict, overrides: dict[str, list[str]]) -> ConfigDict:
  """Writes the command line's values into a config and returns it.

  The file's values of fields that nothing reads any more are dropped, with a line. A field that the
  command line sets although nothing reads it is refused here if it has its default already, and by
  the checks of the config if not.

  Raises:
    UsageError: If a field is unknown, a value has the wrong type, or nothing reads it. One line for
      each.
  """
  wrong = check.unknown_fields([field for field in overrides if field not in renamed.RENAMED], config)
  known, table = fields.flatten(config), fields.table_of(config)
  unread_before = fields.unread_defaults(config, table)
  # The settings of an entry come after its name, on which their types depend.
  for field, texts in sorted(overrides.items(), key=lambda item: fields.is_open(item[0], table)):
    expected = None
    if fields.is_open(field, table):
      if texts[-1] == "None" and fields.OPEN[field.partition(".")[0]]:
        entries.drop(config, field)
        continue
      try:
        expected = entries.admit(config, field, texts[-1])
      except ValueError as error:
        wrong.append(f"config.{error}")
        continue
      if texts[-1] == "None":
        config.update_from_flattened_dict({field: None})
        continue
    elif field not in known:
      continue
    elif texts[-1] == "None" and field in table and table[field].takes_none:
      config.update_from_flattened_dict({field: None})  # ml_collections cannot parse None.
      continue
    args = ["jaxrl_llm.main", *(f"--config.{field}={text}" for text in texts)]
    values = flags.FlagValues()
    try:
      config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=args)
      values(args)
    except (flags.Error, TypeError, ValueError):
      written = ", ".join(map(shown, texts[:3])) + (", ..." if len(texts) > 3 else "")
      # A later check refuses a field outside the table.
      expected = expected or (table[field].check.words if field in table else "another value")
      wrong.append(f"config.{field}: found {written}, expected {expected}; the file has {shown(known.get(field))}")
  # After the other fields, on which the new value depends.
  wrong += [str(renamed.problem(field, texts[-1], config)) for field, texts in overrides.items() if field in renamed.RENAMED]
  wrong += [
    f"config.{field}: found {overrides[field][-1]}, expected no such flag, because {why}"
    for field, why in fields.unread(config, table).items()
    if field in overrides and overrides[field][-1] != "None" and fields.flatten(config)[field] == known[field] == table[field].default
  ]
  if wrong:
    raise UsageError("\n".join(wrong))
  unread = {field: value for field, value in fields.unread_defaults(config, table).items() if field not in {*overrides, *unread_before}}
  if unread:
    print(f"dropped what nothing reads any more: {', '.join(f'{field}={known[field]}' for field in unread)}")
    config.update_from_flattened_dict(unread)
  _drop_settings(config, fields.open_sections(table), known, overrides)
  return config


def _drop_settings(
  config: ConfigDict, sections: Mapping[str, str], before: Mapping[str, Any], overrides: Mapping[str, list[str]]
) -> None:
  """Drops the file's settings of entries that the command line has replaced, with a line for each.

  Another objective inherits none of them: GSPO's clip range would silently ruin GRPO. Other entries
  keep those that they have too.
  """
  for section, name in sections.items():
    chosen = f"{section}.{name}"
    if not name or fields.flatten(config).get(chosen) == before.get(chosen):
      continue
    kept = () if section == "objective" else entries.paths(config)
    gone = {path: x for path, x in before.items() if path.startswith(f"{section}.") and path not in (*overrides, *kept)}
    gone = {path: x for path, x in gone.items() if fields.is_open(path) and x is not None}
    for path in gone:
      entries.drop(config, path)
    if gone:
      listed = ", ".join(f"{path.partition('.')[2]}={x}" for path, x in gone.items())
      print(f"{chosen}={config[section][name]}: dropped this config's {listed}")


def config_files() -> list[Path]:
  """Returns the paths of the available config files."""
  return sorted(path for path in Path("configs").glob("*.py") if path.stem not in ("__init__", "common"))


def available() -> str:
  """Lists the available config files."""
  return ", ".join(map(str, config_files())) or "none in ./configs"


def suffix(overrides: Mapping[str, str]) -> str:
  """Formats overrides as a folder's suffix, so that variants of one config file do not collide.

  Example:
    >>> suffix({"seed": "1", "objective.name": "sapo"})
    '-seed=1-objective.name=sapo'
  """
  text = "".join(f"-{path}={re.sub(r'[^A-Za-z0-9._-]', '_', value)}" for path, value in overrides.items())
  return text if len(text) <= 80 else f"-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
