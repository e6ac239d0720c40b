"""`python -m jaxrl_llm.main --config=FILE[:ARGUMENT] [--workdir=DIR] [--config.FIELD=VALUE ...] [--dry_run]`

  --config          the experiment: a file of configs/, as in configs/gspo.py or configs/gspo.py:tiny
  --workdir         folder of the run; the same command goes on where it stopped. Default: runs/CONFIG
  --config.FIELD    another value for one field, as in --config.learner.learning_rate=1e-4
  --dry_run         print the resolved config, mesh, sizes, memory and every problem; train nothing
"""

import re
import runpy
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxrl_llm import config_check, workdirs

USAGE_ERROR = 2
INTERRUPTED = 130


class UsageError(Exception):
  """What the user asked for cannot be done; the message is the lines to show."""


def main(argv: Sequence[str]) -> int:
  """The command line.

  Args:
    argv: program name and arguments.

  Returns:
    0 after a finished run, 1 for a run that stopped itself, 2 for bad input, 130 after Ctrl-C.
  """
  if {"-h", "--help"} & set(argv[1:]):
    print(__doc__)
    return 0
  try:
    config, workdir, only_print = parse(argv)
    if only_print:
      return dry_run(config)
    if found := config_check.problems(config):
      raise UsageError("\n".join(found))
    if workdirs.is_finished(workdir):
      print(f"{workdir} holds a finished run; see {workdir / 'report.html'}, or give another --workdir to run again")
      return 0
    is_new = workdirs.claim(workdir, config.to_dict())
    try:
      return train_in(config, workdir, command=shlex.join(["python", "-m", "jaxrl_llm.main", *argv[1:]]))
    except UsageError:
      if is_new:  # Or the corrected command would be refused: the folder would hold a run with another config.
        workdirs.release(workdir)
      raise
  except (UsageError, workdirs.WorkdirError) as error:
    for line in str(error).splitlines():
      print(f"error: {line}", file=sys.stderr)
    return USAGE_ERROR


def train_in(config: ConfigDict, workdir: Path, *, command: str) -> int:
  """Starts JAX and trains."""
  from jaxrl_llm import platform, train  # Only now: bad input is refused before JAX is even imported.

  platform.cache_compilations()
  try:
    this = train.start(config, workdir, command=command)
  except ValueError as error:
    raise UsageError(str(error)) from error
  try:
    summary = train.proceed(this)
  except train.NonFiniteError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
    return INTERRUPTED
  print(f"accuracy {summary['accuracy_start']:.1%} -> {summary['accuracy_final']:.1%}; report: {workdir / 'report.html'}")
  return 0


def dry_run(config: ConfigDict) -> int:
  """Prints what a run would be, and all that is wrong with it."""
  for path, value in config_check.flatten(config).items():
    print(f"config.{path} = {value!r}")
  found = config_check.problems(config)
  if not found:
    from jaxrl_llm import experiment

    try:
      print(experiment.describe(config))
    except ValueError as error:
      found = str(error).splitlines()
  for line in found:
    print(f"error: {line}", file=sys.stderr)
  print(f"{len(found)} problem(s) found" if found else "no problem found")
  return USAGE_ERROR if found else 0


def parse(argv: Sequence[str]) -> tuple[ConfigDict, Path, bool]:
  """The resolved config, the workdir, and whether only to print them.

  Raises:
    UsageError: a config file or field that does not exist, a value of the wrong type, an unknown flag.
  """
  path, overrides, rest = split(argv[1:])
  # A FlagValues of this call's own: absl's global one would still hold the overrides of an earlier call.
  values = flags.FlagValues()
  workdir = flags.DEFINE_string("workdir", None, "Folder of the run.", flag_values=values)
  only_print = flags.DEFINE_bool("dry_run", False, "Print what a run would be.", flag_values=values)
  try:
    strays = values([argv[0], *rest])[1:]
  except flags.Error as error:
    raise UsageError(f"{error}; flags are --config=FILE[:ARGUMENT], --config.FIELD=VALUE, --workdir=DIR and --dry_run") from error
  if strays:
    raise UsageError(f"unknown argument {strays[0]!r}, expected flags only, as in --config.FIELD=VALUE (quote a value that has spaces)")
  if not path:
    raise UsageError(f"--config is missing; for instance --config=configs/gspo.py (there are: {available()})")
  config = override(load(path), overrides)
  settings = {field: ",".join(texts) for field, texts in overrides.items()}
  name = Path(path.split(":")[0]).stem + "".join(f"-{part}" for part in path.split(":")[1:])
  return config, Path(workdir.value or f"runs/{name}{workdirs.suffix(settings)}"), only_print.value


def split(args: Sequence[str]) -> tuple[str, dict[str, list[str]], list[str]]:
  """Arguments as the config's path, its overrides and the rest.

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
  """The config of a file.

  Args:
    path: FILE or FILE:ARGUMENT.
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
    if len(reason) > 300:  # ml_collections recites the whole section before its hint, which comes last.
      reason = f"{reason[:120]} ... {reason[-80:]}"
    raise UsageError(f"--config={path}: {type(error).__name__}: {reason}{where}") from error
  if not isinstance(config, ConfigDict):
    raise UsageError(f"--config={path}: get_config returned a {type(config).__name__}, expected an ml_collections.ConfigDict")
  return config


def override(config: ConfigDict, overrides: dict[str, list[str]]) -> ConfigDict:
  """The config with the command line's values in it.

  Raises:
    UsageError: unknown fields and values of a wrong type, a line each.
  """
  wrong = config_check.unknown_fields(overrides, config)
  known = config_check.flatten(config)
  before = dict(config.objective.items()) if "objective" in config else {}
  for field, texts in overrides.items():
    if field not in known:
      continue
    args = ["jaxrl_llm.main", *(f"--config.{field}={text}" for text in texts)]
    values = flags.FlagValues()
    try:
      config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=args)
      values(args)
    except (flags.Error, TypeError, ValueError):
      found = ", ".join(map(repr, texts))
      wrong.append(f"config.{field}: found {found}, expected {config_check.type_in_words(config, field)}; the file has {known[field]!r}")
  if wrong:
    raise UsageError("\n".join(wrong))
  # Another objective does not inherit this file's hyper-parameters: GSPO's clip range would ruin GRPO without a word.
  if before and config.objective.name != before["name"]:
    dropped = {f: v for f, v in before.items() if f != "name" and v is not None and f"objective.{f}" not in overrides}
    for field in dropped:
      config.objective[field] = None
    if dropped:
      print(f"objective.name={config.objective.name}: this config's {', '.join(f'{f}={v}' for f, v in dropped.items())} dropped")
  return config


def available() -> str:
  """The config files there are."""
  return ", ".join(sorted(str(p) for p in Path("configs").glob("*.py") if p.stem not in ("__init__", "common"))) or "none in ./configs"


if __name__ == "__main__":
  sys.exit(main(sys.argv))
