"""`python -m jaxrl_llm.main --config=configs/gspo.py [--workdir=DIR] [--config.FIELD=VALUE ...] [--dry_run]`."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_flags

from jaxrl_llm import config_check, workdirs

_CONFIG = config_flags.DEFINE_config_file("config", None, "The experiment: a file of configs/, with an optional :argument.", lock_config=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; the same command goes on where it stopped. Default: runs/CONFIG.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print the resolved config, mesh, sizes, memory and every problem; train nothing.")

USAGE_ERROR = 2


class UsageError(Exception):
  """What the user asked for cannot be done; the message is the lines to show."""


def main(argv: Sequence[str]) -> int:
  """The command line.

  Args:
    argv: program name and arguments.

  Returns:
    0 after a finished run, 1 for a run that stopped itself, 2 for bad input.
  """
  try:
    config, workdir = parse(argv)
    if _DRY_RUN.value:
      return dry_run(config)
    if found := config_check.problems(config):
      raise UsageError("\n".join(found))
    if workdirs.is_finished(workdir):
      print(f"{workdir} holds a finished run; see {workdir / 'report.html'}, or give another --workdir to run again")
      return 0
    workdirs.claim(workdir, config.to_dict())
    return train_in(config, workdir, command=shlex.join(["python", "-m", "jaxrl_llm.main", *argv[1:]]))
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


def parse(argv: Sequence[str]) -> tuple[ConfigDict, Path]:
  """The resolved config and the workdir.

  Raises:
    UsageError: a config file or field that does not exist, a value of the wrong type, an unknown flag.
  """
  path = next((arg.split("=", 1)[1] for arg in argv[1:] if arg.startswith("--config=")), None)
  if path is None:
    raise UsageError(f"--config is missing; for instance --config=configs/gspo.py (there are: {available()})")
  if not Path(path.split(":")[0]).is_file():
    raise UsageError(f"--config: no file {path.split(':')[0]!r}, expected a config file; there are: {available()}")
  overrides = dict(m.groups() for arg in argv[1:] if (m := re.match(r"--config\.([^=]+)=(.*)$", arg)))
  try:
    config = load(argv, path, overrides)
  except flags.Error as error:
    raise UsageError(str(error).splitlines()[0]) from error
  name = Path(path.split(":")[0]).stem + "".join(f"-{part}" for part in path.split(":")[1:])
  workdir = _WORKDIR.value or f"runs/{name}{workdirs.suffix(overrides)}"
  return config, Path(workdir)


def load(argv: Sequence[str], path: str, overrides: dict[str, str]) -> ConfigDict:
  """Reads the config file and lays the overrides over it."""
  root = str(Path(path.split(":")[0]).resolve().parent.parent)
  if root not in sys.path:  # So that a config finds `configs.common` from any working directory.
    sys.path.append(root)
  try:
    flags.FLAGS(["jaxrl_llm.main", f"--config={path}"])
    config = _CONFIG.value
  except flags.Error:
    raise
  except Exception as error:  # The file is Python: anything can be wrong with it.
    raise UsageError(f"--config={path}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}") from error
  if unknown := config_check.unknown_fields(overrides, config):
    raise UsageError("\n".join(unknown))
  # Another objective does not inherit this file's hyper-parameters: GSPO's clip range would ruin GRPO without a word.
  if overrides.get("objective.name", config.objective.name) != config.objective.name:
    dropped = {f: v for f, v in config.objective.items() if f != "name" and v is not None and f"objective.{f}" not in overrides}
    if dropped:
      print(f"objective.name={overrides['objective.name']}: this config's {', '.join(f'{f}={v}' for f, v in dropped.items())} dropped")
  else:
    dropped = {}
  flags.FLAGS.unparse_flags()
  flags.FLAGS(list(argv))
  config = _CONFIG.value
  with config.unlocked():
    for field in dropped:
      config.objective[field] = None
  return config


def available() -> str:
  """The config files there are."""
  return ", ".join(sorted(str(p) for p in Path("configs").glob("*.py") if p.stem not in ("__init__", "common"))) or "none in ./configs"


if __name__ == "__main__":
  sys.exit(main(sys.argv))
