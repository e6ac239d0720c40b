"""From the command line to a resolved config: the file, its overrides, and a message for everything that can be wrong with either."""

import hashlib
import itertools
import re
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxrl_llm.config import check, fields
from jaxrl_llm.messages import shown

# Fields whose kind of value has changed, and what to write now.
CHANGED = {"remat": "it names a policy: write 'full' for True, 'none' for False"}


class UsageError(Exception):
  """What the user asked for cannot be done; the message is the lines to show."""


class Request(NamedTuple):
  """What the user asked for.

  Attributes:
    config: Resolved config.
    workdir: Folder of the run.
    dry_run: Whether to say only what the run would be.
    allow_config_change: Whether to go on in a workdir whose run had another config, or other devices.
  """

  config: ConfigDict
  workdir: Path
  dry_run: bool
  allow_config_change: bool = False


def parse(argv: Sequence[str]) -> Request:
  """Reads what the arguments, the program's name first, ask for.

  Raises:
    UsageError: A config file or field that does not exist, a value of the wrong type, an unknown flag.
  """
  path, overrides, rest = split(argv[1:])
  # A FlagValues of this call's own: absl's global one would still hold the overrides of an earlier call.
  values = flags.FlagValues()
  workdir = flags.DEFINE_string("workdir", None, "Folder of the run.", flag_values=values)
  only_print = flags.DEFINE_bool("dry_run", False, "Print what a run would be.", flag_values=values)
  changes = flags.DEFINE_bool("allow_config_change", False, "Go on with another config, or other devices.", flag_values=values)
  try:
    strays = values([argv[0], *rest])[1:]
  except flags.Error as error:
    known = "--config=FILE[:ARGUMENT], --config.FIELD=VALUE, --workdir=DIR, --dry_run, --allow_config_change and --help_fields"
    raise UsageError(f"{error}; flags are {known}") from error
  if strays:
    raise UsageError(f"unknown argument {strays[0]!r}, expected flags only, as in --config.FIELD=VALUE (quote a value that has spaces)")
  if not path:
    raise UsageError(f"--config is missing; for instance --config=configs/gspo.py (there are: {available()})")
  if changes.value and not workdir.value:
    raise UsageError("--allow_config_change: found no --workdir, expected the folder of the run to go on with")
  config = override(load(path), overrides)
  settings = {field: ",".join(texts) for field, texts in overrides.items()}
  name = Path(path.split(":")[0]).stem + "".join(f"-{part}" for part in path.split(":")[1:])
  return Request(config, Path(workdir.value or f"runs/{name}{suffix(settings)}"), only_print.value, changes.value)


def help_fields(argv: Sequence[str]) -> str | None:
  """Describes the fields if `--help_fields` asks for them: those of the config file, else of every RL experiment; None without the flag.

  Raises:
    UsageError: A prefix that no field has, or a config file that cannot be loaded.
  """
  path, _, rest = split(argv[1:])
  for flag, following in itertools.pairwise([*rest, "-"]):
    if match := re.fullmatch(r"--?help_fields(?:=(.*))?", flag):
      prefix = match[1] or ("" if following.startswith("-") else following)
      try:
        return fields.described(prefix, fields.table_of(load(path)) if path else fields.FIELDS)
      except ValueError as error:
        raise UsageError(str(error)) from error
  return None


def split(args: Sequence[str]) -> tuple[str, dict[str, list[str]], list[str]]:
  """Splits arguments into the config's path, its overrides and the rest.

  A value may stand behind "=" or be the next argument; of a bare `--config.FIELD` or `--noconfig.FIELD` it is True or False. A field given
  more than once has several values.

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
    UsageError: No such file, or one that makes no config.
  """
  file, *argument = path.split(":", 1)
  if not Path(file).is_file():
    raise UsageError(f"--config: no file {file!r}, expected a config file; there are: {available()}")
  root = str(Path(file).resolve().parent.parent)
  if root not in sys.path:  # So that a config finds `configs.common` from any working directory.
    sys.path.append(root)
  try:
    config = runpy.run_path(file)["get_config"](*argument)
  except Exception as error:  # The file is Python: anything can be wrong with it.
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" (line {lines[-1]})" if lines else ""
    reason = " ".join(str(error).split()) or "no message"
    where += next((f"; {fix}" for field, fix in CHANGED.items() if f"override field {field!r}" in reason), "")
    if len(reason) > 300:  # ml_collections recites the whole section before its hint, which comes last.
      reason = f"{reason[:120]} ... {reason[-80:]}"
    raise UsageError(f"--config={path}: {type(error).__name__}: {reason}{where}") from error
  if not isinstance(config, ConfigDict):
    raise UsageError(f"--config={path}: get_config returned a {type(config).__name__}, expected an ml_collections.ConfigDict")
  return config


def override(config: ConfigDict, overrides: dict[str, list[str]]) -> ConfigDict:
  """Puts the command line's values into a config and returns it.

  Raises:
    UsageError: Unknown fields and values of a wrong type, a line each.
  """
  wrong = check.unknown_fields(overrides, config)
  known, table = fields.flatten(config), fields.table_of(config)
  before = fields.given(config.objective) if "objective" in config else {}
  for field, texts in overrides.items():
    if field not in known:
      continue
    if texts[-1] == "None" and field in table and table[field].takes_none:
      config.update_from_flattened_dict({field: None})  # ml_collections reads no None.
      continue
    args = ["jaxrl_llm.main", *(f"--config.{field}={text}" for text in texts)]
    values = flags.FlagValues()
    try:
      config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=args)
      values(args)
    except (flags.Error, TypeError, ValueError):
      found = ", ".join(map(shown, texts[:3])) + (", ..." if len(texts) > 3 else "")
      expected = table[field].check.words if field in table else "another value"  # The file is refused later.
      wrong.append(f"config.{field}: found {found}, expected {expected}; the file has {shown(known[field])}")
  if wrong:
    raise UsageError("\n".join(wrong))
  # Another objective does not inherit this file's hyper-parameters: GSPO's clip range would ruin GRPO without a word.
  if before and config.objective.name != before.get("name"):
    dropped = {f: v for f, v in before.items() if f != "name" and f"objective.{f}" not in overrides}
    for field in dropped:
      config.objective[field] = None
    if dropped:
      print(f"objective.name={config.objective.name}: this config's {', '.join(f'{f}={v}' for f, v in dropped.items())} dropped")
  return config


def available() -> str:
  """Lists the config files there are."""
  return ", ".join(sorted(str(p) for p in Path("configs").glob("*.py") if p.stem not in ("__init__", "common"))) or "none in ./configs"


def suffix(overrides: Mapping[str, str]) -> str:
  """Writes overrides as the end of a folder's name, so that runs of one config file with other settings do not meet.

  Example:
    >>> suffix({"seed": "1", "objective.name": "sapo"})
    '-seed=1-objective.name=sapo'
  """
  text = "".join(f"-{path}={re.sub(r'[^A-Za-z0-9._-]', '_', value)}" for path, value in overrides.items())
  return text if len(text) <= 80 else f"-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
