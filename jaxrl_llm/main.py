"""`python -m jaxrl_llm.main --config=FILE[:ARGUMENT] [--workdir=DIR] [--config.FIELD=VALUE ...] [--dry_run]`

  --config          the experiment: a file of configs/, as in configs/gspo.py or configs/gspo.py:tiny; configs/reward_model.py trains a
                    reward model
  --workdir         folder of the run; the same command goes on where it stopped. Default: runs/CONFIG
  --config.FIELD    another value for one field, as in --config.learner.learning_rate=1e-4
  --dry_run         print the resolved config, mesh, sizes, memory and every problem; train nothing
"""

import contextlib
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm import config_check, workdirs
from jaxrl_llm.command_line import UsageError, parse

USAGE_ERROR = 2
PREEMPTED = 42  # What launchers of pods take for "start it again".
INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
  """The command line.

  Args:
    argv: program name and arguments.

  Returns:
    0 after a finished run, 1 for a run that stopped itself, 2 for bad input, 42 after SIGTERM, 130 after Ctrl-C.
  """
  if {"-h", "--help"} & set(argv[1:]):
    print(__doc__)
    return 0
  try:
    config, workdir, only_print = parse(argv)
    if only_print:
      return dry_run(config)
    if found := problems(config):
      raise UsageError("\n".join(found))
    workdirs.check(workdir, config.to_dict())
    if workdirs.is_finished(workdir):
      print(f"{workdir} holds a finished run; see {workdir / 'report.html'}, or give another --workdir to run again")
      return 0
    return train_in(config, workdir, command=shlex.join(["python", "-m", "jaxrl_llm.main", *argv[1:]]))
  except (UsageError, workdirs.WorkdirError) as error:
    for line in str(error).splitlines():
      print(f"error: {line}", file=sys.stderr)
    return USAGE_ERROR


def is_reward_model(config: ConfigDict) -> bool:
  """Whether a config trains a reward model: one of its own kind of fields, as in configs/reward_model.py."""
  return "objective" in config and config.objective.get("name") == "bradley_terry"


def problems(config: ConfigDict) -> list[str]:
  """Every problem of a config, a line each."""
  if is_reward_model(config):
    from jaxrl_llm.preferences import check

    return check.problems(config)
  return config_check.problems(config)


def train_in(config: ConfigDict, workdir: Path, *, command: str) -> int:
  """Starts JAX and trains, with the other processes of the run where there are any."""
  from jaxrl_llm import bookkeeping, hosts, platform, train  # Only now: bad input is refused before JAX is even imported.
  from jaxrl_llm.held_out import NoRewardError
  from jaxrl_llm.out_of_memory import OutOfMemoryError, explained
  from jaxrl_llm.preferences import training

  platform.cache_compilations()
  try:
    hosts.start()
  except ValueError as error:
    raise UsageError(str(error)) from error
  try:
    plain = {UsageError: USAGE_ERROR, workdirs.WorkdirError: USAGE_ERROR, OutOfMemoryError: 1, KeyboardInterrupt: INTERRUPTED}
    job, explaining = (training, contextlib.nullcontext()) if is_reward_model(config) else (train, explained(config))
    with hosts.together(plain), explaining:
      this = begin(config, workdir, job.start, command=command)
      try:
        summary = job.proceed(this)
      except (bookkeeping.NonFiniteError, bookkeeping.PreemptedError, NoRewardError) as error:  # In all processes alike.
        if hosts.is_main():
          print(f"error: {error}", file=sys.stderr)
        return PREEMPTED if isinstance(error, bookkeeping.PreemptedError) else 1
      hosts.barrier()  # Whoever left early would seem lost.
  except OutOfMemoryError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
    return INTERRUPTED
  finally:
    workdirs.unlock(workdir)
  if hosts.is_main():
    print(f"accuracy {summary['accuracy_start']:.1%} -> {summary['accuracy_final']:.1%}; report: {workdir / 'report.html'}")
  return 0


def begin(config: ConfigDict, workdir: Path, start: Callable[..., Any], *, command: str):
  """The run, in a workdir that process 0 has claimed for all.

  Args:
    config: checked.
    workdir: of the run.
    start: `train.start`, or that of another job.
    command: what the user typed.

  Returns:
    What `start` does.

  Raises:
    UsageError: processes with different settings, or what `start` refuses.
    WorkdirError: see `workdirs.claim` and `workdirs.lock`.
  """
  from jaxrl_llm import hosts

  is_new = False
  try:
    hosts.agree(config_check.flatten(config) | {"--workdir": str(workdir.absolute())})
    is_new = hosts.on_main(lambda: workdirs.claim(workdir, config.to_dict()))
    hosts.on_main(lambda: workdirs.lock(workdir))
    workdirs.expect(workdir)
    return start(config, workdir, command=command)
  except ValueError as error:
    if is_new and hosts.is_main():  # Or the corrected command would be refused: the folder would hold a run with another config.
      workdirs.release(workdir)
    raise UsageError(str(error)) from error


def dry_run(config: ConfigDict) -> int:
  """Prints what a run would be, and all that is wrong with it."""
  for path, value in config_check.flatten(config).items():
    print(f"config.{path} = {value!r}")
  found = problems(config)
  if not found:
    from jaxrl_llm import hosts
    from jaxrl_llm.dry_run import describe

    if is_reward_model(config):
      from jaxrl_llm.preferences.training import describe

    try:
      hosts.start()
      print(describe(config))
    except ValueError as error:
      found = str(error).splitlines()
  for line in found:
    print(f"error: {line}", file=sys.stderr)
  print(f"{len(found)} problem(s) found" if found else "no problem found")
  return USAGE_ERROR if found else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
