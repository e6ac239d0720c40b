"""`python -m experiments.launch --config=FILE[:ARGUMENT] [--sweep=FILE] [--target=TARGET] ...`

  --config          the experiment, as for jaxrl_llm.main
  --config.FIELD    another value for one field, in all trials
  --sweep           file with sweep(add), get_hyper(h) or, for --search, space(h). Default: the
                    config file itself
  --seeds           seeds with which each row is repeated, as in --seeds=0,1,2,3,4
  --folder          folder of the sweep. Default: runs/sweeps/CONFIG-SWEEP
  --workdirs        folder of the trials' workdirs, as the machine that trains sees it. Default:
                    --folder
  --target          local (default) | slurm | xpk | skypilot
  --max_parallel    maximum number of trials at a time, local (default: 1) and on Slurm (default:
                    no limit)
  --search          random | tpe: draws --num_trials trials from the file's space
  --search_seed     seed of the draws. Default: 0
  --metric          number in summary.json that --search maximises. Default: accuracy_final
  --dry_run         print the trials and their commands, write scripts and manifests; train nothing
  --help            this text, and with --target=... the target's own flags

The same command again skips finished trials and continues with the others.
"""

import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from experiments.launch import local, rows, running, searching, trial
from experiments.launch.rows import SweepError
from experiments.launch.trial import Sweep, Trial
from jaxrl_llm.config import command_line
from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.workdir import claim

TARGETS = {
  "local": "experiments.launch.local",
  "slurm": "experiments.launch.slurm",
  "xpk": "experiments.launch.xpk",
  "skypilot": "experiments.launch.skypilot",
}
FLAGS = ("sweep", "seeds", "folder", "workdirs", "target", "max_parallel", "search", "num_trials", "search_seed", "metric", "dry_run")


class Request(NamedTuple):
  """Parsed command line.

  Attributes:
    sweep: Sweep to launch.
    file: Path of the file with the rows or the space.
    seeds: Seeds with which each row is repeated; empty for none.
    target: Key of `TARGETS`.
    module: Module of the target.
    options: Options of the target.
    max_parallel: Maximum number of trials at a time; 0 if not given.
    search: Kind of the search, "random" | "tpe"; empty for none.
    num_trials: Number of trials of a search.
    search_seed: Seed of a search's draws.
    metric: Number in summary.json that a search maximises.
    dry_run: Whether to start nothing.
  """

  sweep: Sweep
  file: str
  seeds: tuple[int, ...]
  target: str
  module: ModuleType
  options: Any
  max_parallel: int
  search: str
  num_trials: int
  search_seed: int
  metric: str
  dry_run: bool


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line.

  Returns:
    The exit status: 0 if every trial has finished or was handed over, 1 if one has not, 2 for bad
    input, 130 after Ctrl-C.
  """
  args = list(sys.argv[1:] if argv is None else argv)
  try:
    if {"-h", "--help"} & set(args):
      print(usage(args))
      return 0
    return launch(parse(args))
  except (SweepError, ImportError, OSError, command_line.UsageError, claim.WorkdirError) as error:
    for line in str(error).splitlines():
      print(f"error: {line}", file=sys.stderr)
    return 2


def usage(args: Sequence[str]) -> str:
  """Returns the help, with the flags of a target if the arguments name one."""
  target = next((arg.partition("=")[2] for arg in args if arg.startswith("--target=")), "local")
  if target not in TARGETS:
    return __doc__
  options = importlib.import_module(TARGETS[target]).Options
  lines = inspect.getdoc(options).split("Attributes:", 1)[-1].strip("\n")
  flags = re.sub(r"^\s+(\w+):", r"  --\1:", lines, flags=re.MULTILINE)
  return f"{__doc__}\nFlags of --target={target}:\n{flags}"


def parse(args: Sequence[str]) -> Request:
  """Parses the arguments.

  Raises:
    SweepError: If a flag is unknown or a value is invalid.
  """
  config, base, rest = command_line.split(args)
  if not config:
    raise SweepError(
      f"--config is missing, expected one as in --config=configs/gspo.py (there are: {command_line.available()})"
    )
  given: dict[str, list[str]] = {}
  for i, arg in enumerate(rest):
    match = re.fullmatch(r"--([\w.]+)(?:=(.*))?", arg, re.DOTALL)
    if not match:
      raise SweepError(
        f"unknown argument {arg!r}, expected flags only, as in --target=local; "
        f"--help lists them (after {rest[i - 1]!r})"
      )
    given.setdefault(match[1], []).append("true" if match[2] is None else match[2])
  mine = {name: texts[-1] for name, texts in given.items() if name in FLAGS}
  target = mine.get("target", "local")
  if target not in TARGETS:
    raise SweepError(f"--target: found {target!r}, expected one of {', '.join(TARGETS)}")
  file = mine.get("sweep", config)
  name = trial.sweep_name(config, file) + (f"-{mine['search']}" if "search" in mine else "")
  folder = Path(mine.get("folder", f"runs/sweeps/{name}"))
  module = importlib.import_module(TARGETS[target])
  dry_run = mine.get("dry_run", "false").lower()
  if dry_run not in ("true", "false"):
    raise SweepError(f"--dry_run: found {mine['dry_run']!r}, expected no value")
  request = Request(
    sweep=Sweep(name, config, base, folder, mine.get("workdirs", str(folder))),
    file=file,
    seeds=_seeds(mine.get("seeds", "")),
    target=target,
    module=module,
    options=_options(module, {name: texts for name, texts in given.items() if name not in FLAGS}, target),
    max_parallel=_count(mine, "max_parallel", 1 if target == "local" else 0),
    search=mine.get("search", ""),
    num_trials=_count(mine, "num_trials", 0),
    search_seed=_count(mine, "search_seed", 0, least=0),
    metric=mine.get("metric", "accuracy_final"),
    dry_run=dry_run == "true",
  )
  _refuse_ineffective(request, mine)
  return request


def _refuse_ineffective(request: Request, given: Mapping[str, str]) -> None:
  """Refuses flags that would have no effect."""
  only_search = [name for name in ("num_trials", "search_seed", "metric") if name in given]
  if only_search and not request.search:
    raise SweepError(f"--{only_search[0]}: found it without --search, expected both or neither")
  if request.max_parallel and request.target in ("xpk", "skypilot"):
    raise SweepError(
      f"--max_parallel: found it with --target={request.target}, whose queue sets the limit; leave it out"
    )
  if request.target == "local" and "workdirs" in given:
    raise SweepError(
      "--workdirs: found it with --target=local, whose workdirs are in --folder; leave it out"
    )
  if not request.search:
    return
  if request.search not in ("random", "tpe"):
    raise SweepError(f"--search: found {request.search!r}, expected random or tpe")
  if request.target != "local":
    raise SweepError(
      f"--search: found --target={request.target}, from which a search cannot read results; expected --target=local"
    )
  if request.seeds:
    raise SweepError(
      "--seeds: found it with --search, expected one of the two; "
      "give the space a seed, as in 'seed': h.choice((0, 1, 2))"
    )
  if not request.num_trials:
    raise SweepError("--num_trials: not set; --search requires it, as in --search=random --num_trials=20")


def _options(module: ModuleType, given: Mapping[str, Sequence[str]], target: str) -> Any:
  """Parses the target's flags; if one is unknown, the hint may name a flag of the launcher."""
  for flag in given:
    hint = did_you_mean(flag, FLAGS, ", did you mean --{}?", cutoff=0.75)
    if hint and flag.removeprefix(f"{target}.") not in module.Options._fields:
      raise SweepError(f"--{flag}: unknown{hint}")
  return trial.options(module.Options, given, target=target)


def _seeds(text: str) -> tuple[int, ...]:
  try:
    seeds = tuple(int(part) for part in text.split(",")) if text else ()
  except ValueError:
    raise SweepError(
      f"--seeds: found {text!r}, expected whole numbers separated by commas, as in 0,1,2"
    ) from None
  if len(set(seeds)) < len(seeds):
    raise SweepError(f"--seeds: found {text!r}, expected each seed only once")
  return seeds


def _count(given: Mapping[str, str], name: str, default: int, *, least: int = 1) -> int:
  text = given.get(name, str(default))
  if name in given and not (text.isdecimal() and int(text) >= least):
    raise SweepError(f"--{name}: found {text!r}, expected a whole number of at least {least}")
  return int(text)


def launch(request: Request) -> int:
  """Reads the rows, checks all of them, and hands them to the target."""
  if request.search:
    return searching.launch(request)
  sweep_rows = rows.read_sweep(request.file, seeds=request.seeds)
  configs = rows.check_rows(request.sweep.config, request.sweep.base, sweep_rows)
  trials = trial.make_trials(request.sweep, sweep_rows)
  if request.target in ("local", "slurm"):
    trial.refuse_changed(trials, configs)
  if request.target == "local":
    local.check(request.options, request.max_parallel)
  if request.dry_run and request.target == "local":
    for one in trials:
      print(f"{one.row.id}  {rows.shown(one.row.overrides)}\n  {shlex.join(one.command)}")
    print(
      f"{len(trials)} trial(s), {request.max_parallel} at a time, in {request.sweep.folder}; nothing was started"
    )
    return 0
  with trial.claimed(request.sweep):
    for row_id, overrides in trial.record(request.sweep, sweep_rows).items():
      print(
        f"note: row {row_id} ({rows.shown(overrides)}) is no longer in the sweep; "
        f"{request.sweep.workdirs}/{row_id} stays as it is"
      )
    if request.target == "local":
      return running.run(request, trials)
    return hand_over(request, trials)


def hand_over(request: Request, trials: Sequence[Trial]) -> int:
  """Writes scripts and manifests for another machine and, except in a dry run, submits them."""
  more = {"max_parallel": request.max_parallel} if request.target == "slurm" else {}
  if request.dry_run:
    for path in request.module.write(trials, request.sweep.folder, options=request.options, **more):
      print(path)
    print(f"{len(trials)} trial(s) for {request.target}; nothing was submitted")
  else:
    request.module.submit(trials, request.sweep.folder, options=request.options, **more)
  return 0


if __name__ == "__main__":
  sys.exit(main())
