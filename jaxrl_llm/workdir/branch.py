"""The beginning of a branch: a new workdir with a checkpoint of another run, which is only read.

The branch takes the steps from that checkpoint to its fork once more, with the settings of the
other run, and goes on with its own settings (see `pending`).
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config.fork import FILE, FOLDER, ROLLOUTS, Fork, fork_of, num_warm_steps
from jaxrl_llm.config.recorded import run_config, saved_config
from jaxrl_llm.messages import Problem
from jaxrl_llm.workdir import claim, disk, source
from jaxrl_llm.workdir.metrics import read_rows

# Rows after the checkpoint are cut off at the start.
_COPIED = ("metrics.jsonl", "samples.jsonl", "schedule.jsonl")
# Fields, or sections with a final dot, that say how recorded rollouts were drawn.
_DRAWN = ("rollout.", "environment.", "serving.", "model.sampler_dtype")


def check(fork: Fork, workdir: Path, config: Mapping[str, Any], *, anyway: bool = False) -> None:
  """Refuses a branch that cannot begin or continue. Changes nothing, and does not start JAX.

  Args:
    fork: Run and RL step to continue from.
    workdir: Folder of the branch.
    config: Resolved config of the branch.
    anyway: Whether steps may be repeated although the package's code has changed.

  Raises:
    WorkdirError: If the run or the step does not exist, no checkpoint leads there, a changed field
      does not fit its state, or the workdir holds another run. One line for each problem.
  """
  if (workdir / claim.MARKER).exists():
    if fork_of(workdir) != fork:
      expected = "a new folder for the branch (a run resumes with the command that began it)"
      raise claim.WorkdirError(str(Problem("--workdir", f"a run in {workdir}", expected)))
    return  # Resuming needs no other run.
  parent, warm = Path(fork.workdir), num_warm_steps(config)
  if saved_config(parent) is None:
    raise _refused(f"no RL run in {parent}", "WORKDIR@STEP, as in runs/gspo@412")
  claim.check_claim(parent, config, allow_changes=True)
  numbers = _checkpoints(parent)
  steps = [row["step"] for row in read_rows(parent / "metrics.jsonl") if row["phase"] == "rl"]
  reached = max([*steps, *(number - warm for number in numbers)], default=-1)
  if fork.step > reached:
    raise _refused(f"step {fork.step}", f"at most {max(reached, 0)}, the last RL step that the run in {parent} has reached")
  if config["num_steps"] <= fork.step:
    raise claim.WorkdirError(str(Problem("config.num_steps", str(config["num_steps"]), f"more than {fork.step}, the step of the fork")))
  if (other := fork_of(parent)) is not None and fork.step < other.step:
    raise _refused(f"step {fork.step}", f"{other.step} or later, since {parent} is a branch itself; or branch {other.workdir}")
  number = checkpoint_of(fork, config)
  if number is None:
    kept = ", ".join(str(n - warm) for n in numbers if n >= warm) or "none"
    raise _refused(f"step {fork.step}", f"a checkpoint at or before it; those of {parent} are of RL step {kept} (checkpoint.keep)")
  if fork.recorded:
    _check_recorded(fork, parent, config, reached=reached)
  if number < warm + fork.step or fork.recorded:
    _check_replay(fork, parent, config, number)
    if (files := source.changed(parent)) and not anyway:
      shown = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
      expected = "the same code, because steps are repeated; --anyway takes this one"
      raise _refused(f"code of jaxrl_llm that has changed since the run ({shown})", expected)


def _check_recorded(fork: Fork, parent: Path, config: Mapping[str, Any], *, reached: int) -> None:
  """Refuses rollouts that the run has not drawn, or that the settings of a branch do not describe.

  Raises:
    WorkdirError: See `check`.
  """
  rollout, most, flag = run_config(parent).rollout, reached - fork.step, "--recorded_steps"
  if fork.recorded > most:
    expected = f"at most {most}, the number of RL steps that the run in {parent} has taken after step {fork.step}"
    raise claim.WorkdirError(str(Problem(flag, str(fork.recorded), expected)))
  if rollout.update_in_flight is not None or rollout.samplers:
    name = "update_in_flight" if rollout.update_in_flight is not None else "samplers"
    expected = "a run whose batches are each drawn by one set of weights in its own process; leave the flag out"
    raise claim.WorkdirError(str(Problem(flag, f"rollout.{name}={rollout[name]!r} in the run in {parent}", expected)))
  differing = [(field, *x) for field, x in claim.changes(parent, config).items() if field.startswith(_DRAWN)]
  why = "because the recorded rollouts were drawn so (--recorded_steps)"
  lines = [str(Problem(f"config.{field}", repr(now), f"{was!r} as in the run, {why}")) for field, was, now in differing]
  if lines:
    raise claim.WorkdirError("\n".join(lines))


def _check_replay(fork: Fork, parent: Path, config: Mapping[str, Any], number: int) -> None:
  """Refuses a fork whose run cannot be repeated from a checkpoint exactly as it was.

  Raises:
    WorkdirError: See `check`.
  """
  old, at, other = run_config(parent).to_dict(), f"step {fork.step}, which has no checkpoint", fork_of(parent)
  if number == num_warm_steps(old) + fork.step:
    at = f"step {fork.step} and steps after it to repeat (--recorded_steps)"
  steps = ", ".join(str(n - num_warm_steps(old)) for n in _checkpoints(parent) if n >= num_warm_steps(old)) or "none"
  if claim.changes(parent, old) or _settings_changed(parent, number):
    why = "because the settings or the package changed afterwards, so that the steps up to it cannot be repeated"
    raise _refused(at, f"that of a checkpoint ({steps}), {why}")
  if other is not None and other.recorded and number < num_warm_steps(old) + other.step + other.recorded:
    why = f"because {parent} learned from the rollouts of {other.workdir} up to then"
    raise _refused(at, f"that of a checkpoint after step {other.step + other.recorded}, {why}")
  if not fork.recorded and not claim.changes(parent, config):
    return
  rollout, every = old["rollout"], old["checkpoint"]["every"]
  if rollout["staleness"] and fork.step % every and number < num_warm_steps(old) + fork.step:
    why = f"because rollouts are in flight after other steps (rollout.staleness={rollout['staleness']}) and belong to the old settings"
    raise _refused(at, f"a multiple of checkpoint.every={every} or the step of a checkpoint ({steps}), {why}")
  if rollout["samplers"]:
    raise _refused(at, f"that of a checkpoint ({steps}), because sampler processes (rollout.samplers) join one config only")


def _settings_changed(parent: Path, number: int) -> bool:
  """Returns whether a run's config changed, or may have changed, after a checkpoint."""
  if not (parent / claim.CHANGES).exists():
    return False
  try:
    changed = json.loads((parent / claim.CHANGES).read_text(encoding="utf-8").splitlines()[-1])["attempt"]
    record = json.loads((parent / "checkpoints" / str(number) / "record" / "metadata").read_text(encoding="utf-8"))
    other = fork_of(parent)
    # A checkpoint that a branch has copied counts the attempts at another run.
    return record.get("branched_from") != (other and other._asdict()) or record["attempts"] < changed
  except (OSError, ValueError, LookupError):  # Nothing says that it did not.
    return True


def _refused(what: str, expected: str) -> claim.WorkdirError:
  return claim.WorkdirError(str(Problem("--branch", what, expected)))


def checkpoint_of(fork: Fork, config: Mapping[str, Any]) -> int | None:
  """Returns the number of the newest checkpoint at or before a fork; None if there is none."""
  last = num_warm_steps(config) + fork.step
  return max((number for number in _checkpoints(Path(fork.workdir)) if number <= last), default=None)


def _checkpoints(workdir: Path) -> list[int]:
  """Returns the numbers of a run's complete checkpoints. `checkpoint.whole_steps` imports JAX."""
  folders = (path.parent for path in (workdir / "checkpoints").glob("*/manifest.json"))
  return sorted(int(folder.name) for folder in folders if folder.name.isdecimal())


def create(fork: Fork, workdir: Path, config: Mapping[str, Any]) -> bool:
  """Creates the workdir of a branch, all at once, unless it exists.

  Args:
    fork: Checked fork.
    workdir: Folder of the branch, missing or empty.
    config: Resolved config of the branch.

  Returns:
    Whether it was created.

  Raises:
    WorkdirError: If the files cannot be copied.
  """
  if fork_of(workdir) == fork:
    return False
  parent, number, making = Path(fork.workdir), checkpoint_of(fork, config), workdir.with_name(f"{workdir.name}.branching")
  try:
    shutil.rmtree(making, ignore_errors=True)
    # First, because a run in progress may delete it; all that it depends on stays.
    shutil.copytree(parent / "checkpoints" / str(number), making / "checkpoints" / str(number))
    for name in _COPIED:
      if (parent / name).is_file():
        shutil.copyfile(parent / name, making / name)
    if (parent / "judgements").is_dir():
      shutil.copytree(parent / "judgements", making / "judgements")
    (making / FOLDER).mkdir()
    shutil.copyfile(parent / claim.MARKER, making / FOLDER / claim.MARKER)
    disk.replace(making / FOLDER / FILE, json.dumps(fork._asdict()) + "\n")
    disk.replace(making / claim.MARKER, json.dumps(config, indent=2) + "\n")
    os.replace(making, workdir)
  except OSError as error:  # Also `shutil.Error`, with a list of files.
    shutil.rmtree(making, ignore_errors=True)
    reason = error.strerror or f"a file of checkpoint {number} cannot be copied; was it deleted?"
    raise claim.WorkdirError(f"--branch={parent}@{fork.step}: {reason}; expected to copy it to {workdir}") from error
  return True


def describe(fork: Fork, workdir: Path, config: Mapping[str, Any]) -> list[str]:
  """Returns lines about a new branch: where it begins, and which settings differ."""
  warm, origin = num_warm_steps(config), workdir / FOLDER
  first = _checkpoints(workdir)[-1] - warm
  begins = "its checkpoint" if first == fork.step else f"replayed from its checkpoint after step {first}"
  changed = claim.describe_changes(origin, config, number=warm + fork.step)
  lines = [f"branched from {fork.workdir} after RL step {fork.step} ({begins})", *changed]
  if fork.recorded:
    last = f"to {fork.step + fork.recorded} " if fork.recorded > 1 else ""
    lines.append(f"RL steps {fork.step + 1} {last}learn from the rollouts of that run, which is repeated for them first")
  return lines


def pending(workdir: Path, config: Mapping[str, Any]) -> int | None:
  """Returns the RL step up to which a branch still repeats the other run, with that run's settings.

  This is its fork, or the last step whose rollouts it records. None if its own settings apply from
  its newest checkpoint on, as in every run that is no branch.

  Args:
    workdir: Folder of a run.
    config: Resolved config of the run.
  """
  fork = fork_of(workdir)
  if fork is not None and fork.recorded and not (workdir / FOLDER / ROLLOUTS).exists():
    return fork.step + fork.recorded
  if fork is None or not claim.changes(workdir / FOLDER, config):
    return None
  return fork.step if max(_checkpoints(workdir), default=0) < num_warm_steps(config) + fork.step else None
