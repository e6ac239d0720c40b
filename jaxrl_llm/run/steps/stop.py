"""Early ends of a run: by a signal, or because of non-finite updates."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrl_llm.devices import hosts
from jaxrl_llm.rollouts.carried import Groups
from jaxrl_llm.run.setup.start import Run
from jaxrl_llm.run.steps.bookkeeping import BookkeptRun, finish_saving, is_due, save, summarize
from jaxrl_llm.types import TrainBatch
from jaxrl_llm.workdir import nonfinite


class NonFiniteError(RuntimeError):
  """Too many consecutive updates with a non-finite loss or gradient."""


class InexactError(RuntimeError):
  """Sampler and learner disagree in a run with `numerics.exact`."""


class PreemptedError(RuntimeError):
  """SIGTERM or Ctrl-C, sent to a process of the run."""


def preempted(run: BookkeptRun) -> PreemptedError:
  """Ends a run early and returns the error to raise."""
  why = "Ctrl-C" if hosts.interrupted() else "SIGTERM"
  finish_saving(run)
  summarize(run, f"stopped: {why}")
  return PreemptedError(
    f"stopped by {why}; the same command resumes from checkpoint {run.checkpoints.latest_step()} in {run.workdir}"
  )


class Position(NamedTuple):
  """Position of a run before an RL step, beyond what its arrays and record hold."""

  prompts: Any
  carried: Groups | None


def position(run: Run) -> Position:
  """Returns the position of the run between two RL steps."""
  return Position(run.prompts.get_state(), run.carried)


def stop_if_preempted(run: Run, began: Position | None) -> None:
  """Gives up an RL step that has not changed the policy yet, if the run was asked to stop.

  A checkpoint then holds the state before the step.

  Args:
    run: RL run.
    began: Position before the step. None if no process could begin the step again; the last
      checkpoint is then kept.

  Raises:
    PreemptedError: If the run was asked to stop.
  """
  if not hosts.preempted():
    return
  number = run.record.warm_steps + run.record.rl_steps
  if began is not None and run.checkpoints.latest_step() != number:
    run.prompts.set_state(began.prompts)
    run.carried = began.carried
    save(run)
  raise preempted(run)


def end_step(run: BookkeptRun, *, saves: bool, last: bool = False, can_save: bool = True) -> None:
  """Saves a checkpoint that is planned or due after a step, and ends a run that was asked to stop.

  Args:
    run: RL run or training of a reward model.
    saves: Whether a checkpoint is planned after the step.
    last: Whether the step is the last one, after which the run ends anyway.
    can_save: Whether a checkpoint would hold all that the next step depends on.

  Raises:
    PreemptedError: If the run was asked to stop.
  """
  stop = not last and hosts.preempted()
  if saves or (stop and can_save):
    save(run)
  elif can_save and is_due(run):
    save(run, temporary=True)
  if stop:
    raise preempted(run)


def stop_if_not_finite(run: BookkeptRun, updates: Sequence[dict[str, float]], batches: Sequence[TrainBatch]) -> None:
  """Counts refused updates, and gives up after too many in a row.

  The batch of a step's first refused update goes to WORKDIR/nonfinite, at most
  `nonfinite.MAX_DUMPS` times per run.

  Args:
    run: Run whose record already counts the step.
    updates: Metrics of each update of the step.
    batches: Batch of each update.

  Raises:
    NonFiniteError: If `learner.max_skipped` updates in a row were refused.
  """
  record, limit = run.record, run.config.learner.max_skipped
  refused = [any(metrics.get(f"{name}/skipped", 0) > 0 for name in ("train", "critic", "reward_model")) for metrics in updates]
  if any(refused) and len(record.nonfinite_dumps) < nonfinite.MAX_DUMPS:
    first, in_rl, step = refused.index(True), record.rl_steps > 0, record.rl_steps or record.warm_steps
    name = f"{'' if in_rl else 'warm_'}step_{step}.npz"
    about = {"step": step, "phase": "rl" if in_rl else "warm_start", "update": first, "refused": refused}
    about |= {"metrics": updates[first], "kl_coef": record.kl_coef, "last_good_checkpoint": run.checkpoints.latest_step()}
    if nonfinite.dump(path := run.workdir / nonfinite.FOLDER / name, batches[first], about):
      record.nonfinite_dumps = [*record.nonfinite_dumps, name]
      run.progress.note(f"update {first + 1} of step {step:,} was not finite and was skipped; its batch: {path}")
  for skipped in refused:
    record.skipped_steps += skipped
    record.skipped_in_a_row = record.skipped_in_a_row + 1 if skipped else 0
    if record.skipped_in_a_row >= limit:
      finish_saving(run)
      summarize(run, "stopped: not finite")
      good, dumps = run.checkpoints.latest_step(), record.nonfinite_dumps
      where = "no checkpoint was saved yet" if good is None else f"last good checkpoint: {run.workdir / 'checkpoints' / str(good)}"
      batch = f"; a batch that led to it: {run.workdir / nonfinite.FOLDER / dumps[-1]}" if dumps else ""
      raise NonFiniteError(f"loss or gradient not finite in {limit} updates in a row (learner.max_skipped={limit}); {where}{batch}")


def stop_if_not_exact(run: BookkeptRun, updates: Sequence[dict[str, float]], *, lag: int) -> None:
  """Gives up if sampler and learner disagree about a token in a run with `numerics.exact`.

  Args:
    run: Run whose record already counts the step.
    updates: Metrics of each update of the step.
    lag: Largest lag of its tokens, in RL steps.

  Raises:
    InexactError: If a log-probability of the first update differs.
  """
  if (why := inexact(run.config, run.record.rl_steps, updates, lag=lag)) is not None:
    finish_saving(run)
    summarize(run, "stopped: not exact")
    raise InexactError(why)


def inexact(config: ConfigDict, step: int, updates: Sequence[dict[str, float]], *, lag: int) -> str | None:
  """Returns how the numerics of an RL step are not exact; None if they are or need not be.

  With a lag, the first update has other weights than the sampler had, and nothing is compared. The
  first step of an asynchronous run has none. Nor is anything compared where a token may have read
  keys of earlier weights than its own.
  """
  gap = updates[0].get("rollout_corr/logprob_abs_diff/max", 0.0) if updates else 0.0
  if not config.numerics.exact or config.rollout.update_in_flight == "keep" or lag > 0 or gap == 0:
    return None
  return (
    f"config.numerics.exact: found log-probabilities of RL step {step} that differ between sampler and learner, by up to {gap:.1e} nats "
    f"in {1 - updates[0]['rollout_corr/bits_equal']:.2%} of the tokens, expected none; this processor or these sizes add in another "
    "order: `python -m experiments.mismatch` with the run's --config says in which layer; set numerics.exact=False, and please report it"
  )
