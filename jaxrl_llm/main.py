"""Training: `python -m jaxrl_llm.main --config=FILE[:ARGUMENT] [OPTION ...]`

  --config          the experiment: a file in configs/, such as configs/gspo.py or
                    configs/gspo.py:tiny; configs/reward_model.py trains a reward model
  --workdir         folder of the run, which the same command resumes, or gs://BUCKET/RUN or
                    s3://BUCKET/RUN. Default: runs/CONFIG
  --config.FIELD    new value of one field, as in --config.learner.learning_rate=1e-4
  --dry_run         print the resolved config, mesh, sizes, memory and every problem, and train
                    nothing
  --pilot           grade prepared responses to see what the reward pays for, and try the untouched
                    model on the run's problems for a minute or two: pass rate, share of groups that
                    RL can learn from, time of a step and of the run, and what to change first;
                    keeps nothing
  --replay          workdir of a run with config.rollout.update_in_flight, to repeat to the last
                    bit: the same command with another --workdir, on the same devices
  --branch          WORKDIR@STEP: continue from the state of that run after an RL step, in another
                    --workdir and with other settings; the run's own ones without --config
  --recorded_steps  with --branch: number of steps that learn from the rollouts of that run
  --anyway          with --branch: also repeat steps of a run whose code has changed since
  --allow_config_change
                    resume in a --workdir whose run had other settings or devices; each difference
                    is printed and recorded
  --help_fields     print every field, or those that begin with the next argument, with its default
                    and meaning
"""

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.config import changes, check, command_line, fields
from jaxrl_llm.config.command_line import UsageError
from jaxrl_llm.config.fork import Fork
from jaxrl_llm.messages import INTERRUPTED, RESTART, USAGE_ERROR, MissingPackageError, refuse
from jaxrl_llm.workdir import branch, claim, logs, source
from jaxrl_llm.workdir.bucket import address
from jaxrl_llm.workdir.bucket.copies import localize


def main(argv: Sequence[str]) -> int:
  """Runs a command line and returns its exit status.

  Args:
    argv: Arguments, beginning with the program's name.

  Returns:
    0 after a finished run, 1 if the run stopped itself, 2 for bad input, 42 after SIGTERM and 130
    after Ctrl-C.
  """
  try:
    if text := command_line.help_text(argv, __doc__):
      print(text)
      return 0
    request = command_line.parse(argv)
    config, workdir, allow_changes, fork = request.config, request.workdir, request.allow_config_change, request.branch
    if fork is not None and not config_problems(config):
      branch.check(fork, workdir, config.to_dict(), anyway=request.anyway)
    if request.dry_run:
      return dry_run(config)
    if messages := config_problems(config):
      raise UsageError("\n".join(messages))
    if request.pilot:
      return pilot(config)
    command = shlex.join(["python", "-m", "jaxrl_llm.main", *argv[1:]])
    options = dict(command=command, allow_changes=allow_changes, replay=request.replay and local(request.replay), fork=fork)
    if not address.is_address(workdir):
      return train_or_tell(config, workdir, **options)
    return train_in_bucket(config, workdir, **options)
  except (UsageError, claim.WorkdirError) as error:
    return refuse(error)


def train_or_tell(
  config: ConfigDict,
  workdir: Path,
  *,
  allow_changes: bool,
  replay: Path | None,
  ready: Callable[[], None] = lambda: None,
  **options: Any,
) -> int:
  """Trains in a workdir, or says that the run there is finished. Returns the exit status.

  `ready` is called once the run has resumed from its checkpoint, or is found finished. The other
  options are those of `train_in`.
  """
  claim.check_claim(workdir, config.to_dict(), allow_changes=allow_changes)
  if claim.is_finished(workdir) and not claim.changes(workdir, config.to_dict()):
    ready()
    print(f"{workdir} holds a finished run; see {workdir / 'report.html'}, or give another --workdir to run again")
    return 0
  if replay is not None:
    check_replay(config, workdir, replay)
  return train_in(config, workdir, allow_changes=allow_changes, replay=replay, ready=ready, **options)


def local(replay: Path) -> Path:
  """Returns the local folder of a run to repeat, which may be in a bucket."""
  try:
    return localize(replay, checkpoints=False)
  except (MissingPackageError, ValueError) as error:
    raise UsageError(f"--replay: {error}") from error


def train_in_bucket(config: ConfigDict, workdir: Path, **options: Any) -> int:
  """Trains in the local mirror of a workdir in a bucket. Returns the exit status.

  Raises:
    WorkdirError: If the bucket cannot be used; see `session.opened`.
    UsageError: If the address is invalid, or the run has several processes.
  """
  from jaxrl_llm.workdir.bucket import session

  try:
    place = address.parse(str(workdir))
  except ValueError as error:
    raise UsageError(f"--workdir: {error}") from error
  # libtpu may leave a warning there, which has a comma as well.
  hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
  if os.environ.get("JAX_NUM_PROCESSES", "1") != "1" or ("," in hosts and " " not in hosts.strip()):
    raise UsageError(f"--workdir={place}: found several processes, expected one; several need a folder that they share, as on Filestore")
  kept = config.checkpoint
  retention = dict(newest=kept.keep, best=kept.keep_best, every_hours=kept.keep_every_hours)
  with session.opened(place, retention=retention, tell=lambda line: print(line, file=sys.stderr)) as opened:
    status = train_or_tell(config, opened.workdir, ready=opened.enable, **options)
  status = opened.status(status)
  if status == 0:
    print(f"in {place}: all of the run, and its page report.html")
  return status


def config_problems(config: ConfigDict) -> list[str]:
  """Returns every problem of a config, one line each and without duplicates."""
  if fields.is_reward_model(config):
    from jaxrl_llm.run.jobs.reward_model.check import job_problems as problems_of
  else:
    problems_of = check.config_problems
  # The middle of a long line is left out.
  return list(dict.fromkeys(x if len(x) <= 600 else f"{x[:400]} ... {x[-150:]}" for x in problems_of(config)))


def check_replay(config: ConfigDict, workdir: Path, replay: Path) -> None:
  """Refuses to repeat a run that cannot be repeated.

  Raises:
    UsageError: If the folder holds no run with weights that came in flight, or the config has none.
  """
  if fields.is_reward_model(config) or config.rollout.update_in_flight is None:
    expected = "'wait', 'keep' or 'recompute': other runs repeat by their seed"
    raise UsageError(f"--replay: found a config with rollout.update_in_flight=None, expected {expected}")
  if not (replay / "schedule.jsonl").is_file():
    raise UsageError(f"--replay: found no schedule.jsonl in {replay}, expected the workdir of a run with config.rollout.update_in_flight")
  if replay.resolve() == workdir.resolve():
    raise UsageError(f"--replay: found the workdir itself, {workdir}, expected that of another run")


def train_in(
  config: ConfigDict,
  workdir: Path,
  *,
  command: str,
  allow_changes: bool,
  replay: Path | None,
  fork: Fork | None,
  ready: Callable[[], None],
) -> int:
  """Starts JAX and trains, together with the run's other processes if there are any.

  `ready` is called once the run has resumed from its checkpoint.
  """
  from jaxrl_llm import train  # Imported late: bad input is refused before JAX is imported.
  from jaxrl_llm.decoding.engine.requests import ReplayLost
  from jaxrl_llm.devices import compilation_cache, hosts, xla_flags
  from jaxrl_llm.rewards.outcome import NoRewardError
  from jaxrl_llm.rollouts.jobs import EngineError
  from jaxrl_llm.rollouts.schedule import ReplayDiffersError
  from jaxrl_llm.rollouts.weight_sync import WeightSyncError
  from jaxrl_llm.run.jobs.reward_model import training
  from jaxrl_llm.run.observe import faults
  from jaxrl_llm.run.setup.out_of_memory import OutOfMemoryError
  from jaxrl_llm.run.steps import stop
  from jaxrl_llm.run.steps.grading import NegativeRewardError
  from jaxrl_llm.run.steps.sample import StaleError
  from jaxrl_llm.workdir.checkpoint import SaveFailedError

  own_ends = (stop.NonFiniteError, NoRewardError, NegativeRewardError, SaveFailedError, WeightSyncError, EngineError)
  own_ends += (ReplayDiffersError, StaleError, stop.InexactError)
  compilation_cache.cache_compilations()
  try:
    flags = xla_flags.set_flags(exact=fields.flatten(config).get("numerics.exact", False))
    hosts.join_processes()
    faults.from_environment()
  except ValueError as error:
    raise UsageError(str(error)) from error
  # Closes the log and releases the lock when the process ends.
  with contextlib.ExitStack() as ending:
    ending.callback(claim.unlock, workdir)
    plain = {UsageError: USAGE_ERROR, claim.WorkdirError: USAGE_ERROR, OutOfMemoryError: 1, KeyboardInterrupt: INTERRUPTED}
    job = training if fields.is_reward_model(config) else train
    starting = job.start_run if replay is None else partial(job.start_run, replay=replay)
    try:
      with hosts.together(plain):
        asked = dict(command=command, allow_changes=allow_changes, fork=fork, note=flags)
        run, log = begin_attempt(config, workdir, starting, ending=ending, **asked)
        ready()
        try:
          with hosts.interruptible(run.progress.note):
            summary = job.proceed(run)
        except stop.PreemptedError as error:  # Raised in every process, like the next ones.
          tell(error, log)
          return INTERRUPTED if hosts.interrupted() else RESTART
        except ReplayLost as error:
          tell(f"{error}; the same command resumes from the last checkpoint", log)
          return RESTART
        except own_ends as error:
          tell(error, log)
          return 1
        hosts.barrier()  # A process that left early would look lost.
    except OutOfMemoryError as error:
      print(f"error: {error}", file=sys.stderr)
      return 1
    except KeyboardInterrupt:
      print("interrupted; the same command resumes from the last checkpoint", file=sys.stderr)
      return INTERRUPTED
  if hosts.is_main():
    print(f"accuracy {summary['accuracy_start']:.1%} -> {summary['accuracy_final']:.1%}; report: {workdir / 'report.html'}")
  return 0


def tell(error: Exception | str, log: logs.Log) -> None:
  """Reports why a run has stopped itself: process 0 on stderr, every other process in its log."""
  from jaxrl_llm.devices import hosts

  if hosts.is_main():
    print(f"error: {error}", file=sys.stderr)
  else:
    log.write(f"error: {error}")


def begin_attempt(
  config: ConfigDict,
  workdir: Path,
  start: Callable[..., Any],
  *,
  command: str,
  ending: contextlib.ExitStack,
  allow_changes: bool,
  fork: Fork | None,
  note: str,
) -> tuple[Any, logs.Log]:
  """Starts an attempt at a run in a workdir that process 0 claims for all processes.

  Args:
    config: Checked config.
    workdir: Folder of the run.
    start: `train.start_run`, or the equivalent of another kind of training.
    command: Command line that the user typed.
    ending: Stack that closes the log when the process ends.
    allow_changes: Whether an existing run in the workdir may have had another config or other
      devices.
    fork: Checked fork of a branch; None for a run of its own.
    note: First line of the log.

  Returns:
    The result of `start`, and the log of this attempt.

  Raises:
    UsageError: If the processes have different settings, or `start` refuses the config.
    WorkdirError: If the workdir cannot be claimed or locked; see `claim.claim` and `claim.lock`.
  """
  import jax

  from jaxrl_llm.devices import hosts

  is_new, kept, settings = False, None, config.to_dict()
  begins = partial(claim.claim, workdir, settings, allow_changes=allow_changes)
  if fork is not None:
    begins = partial(branch.create, fork, workdir, settings)
  try:
    hosts.agree(fields.flatten(config) | {"--workdir": str(workdir.absolute())})
    is_new = hosts.on_main(begins)
    hosts.on_main(lambda: claim.lock(workdir))
    claim.expect(workdir)
    attempt = hosts.on_main(lambda: logs.number(workdir / "logs"))
    log = ending.enter_context(logs.logged(workdir / "logs", attempt, process=jax.process_index(), command=command))
    log.write(note)
    other = hosts.on_main(lambda: changes.check_devices(workdir, jax.device_count(), allowed=allow_changes))
    differing = hosts.on_main(lambda: claim.describe_changes(workdir, settings))
    if is_new and fork is not None:
      differing = hosts.on_main(lambda: branch.describe(fork, workdir, settings))
    for line in (*differing, *filter(None, [other])):
      if hosts.is_main():
        print(line)
      log.write(line)
    kept = hosts.on_main(lambda: claim.change(workdir, settings, attempt=attempt))
    run = start(config, workdir, command=command, log=log.write)
    hosts.on_main(lambda: source.record(workdir))
    return run, log
  except (MissingPackageError, ValueError) as error:
    # Otherwise the folder would hold a run with another config, and the corrected command would be
    # refused.
    if is_new and hosts.is_main():
      claim.release(workdir)
    elif kept is not None and hosts.is_main():
      claim.change_back(workdir, kept)
    raise UsageError(str(error)) from error


def dry_run(config: ConfigDict) -> int:
  """Prints the resolved config, what a run of it would be, and every problem."""
  for path, value in fields.flatten(config).items():
    print(f"config.{path} = {value!r}")
  messages, doubts = config_problems(config), 0
  if not messages:
    from jaxrl_llm.devices import hosts, xla_flags
    from jaxrl_llm.run.jobs.dry_run import describe_run
    from jaxrl_llm.run.setup.out_of_memory import DoesNotFitError
    from jaxrl_llm.tasks.files.report import CAREFUL

    if fields.is_reward_model(config):
      from jaxrl_llm.run.jobs.reward_model.training import describe_training as describe_run

    try:
      print(xla_flags.set_flags(exact=fields.flatten(config).get("numerics.exact", False)))
      hosts.join_processes()
      print(described := describe_run(config))
      doubts = sum(line.startswith(CAREFUL) for line in described.splitlines())
    except DoesNotFitError as error:
      print(error.description)
      messages = [str(error)]
    except (MissingPackageError, ValueError) as error:
      messages = str(error).splitlines()
  rest = f"nothing prevents the run, but look at {doubts} line(s) above: {CAREFUL}..." if doubts else "no problem found"
  print(f"{len(messages)} problem(s) found" if messages else rest)
  return refuse("\n".join(messages)) if messages else 0


def pilot(config: ConfigDict) -> int:
  """Prints the pass rate of the untouched model, the cost of a step, and advice on the config."""
  if fields.is_reward_model(config):
    raise UsageError("--pilot: found the training of a reward model, expected RL, whose policy can be tried before")
  import jax

  from jaxrl_llm.devices import compilation_cache, xla_flags
  from jaxrl_llm.rewards.outcome import NoRewardError
  from jaxrl_llm.rollouts.jobs import EngineError
  from jaxrl_llm.run.jobs.pilot import describe_pilot
  from jaxrl_llm.run.setup.out_of_memory import OutOfMemoryError

  compilation_cache.cache_compilations()
  try:
    xla_flags.set_flags(exact=config.numerics.exact)
    if jax.process_count() > 1:
      raise UsageError(f"--pilot: found {jax.process_count()} processes, expected one")
    print(describe_pilot(config))
  except (MissingPackageError, ValueError) as error:
    raise UsageError(str(error)) from error
  except (NoRewardError, OutOfMemoryError, EngineError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print("interrupted; a pilot keeps nothing", file=sys.stderr)
    return INTERRUPTED
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv))
