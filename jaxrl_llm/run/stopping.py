"""How a run ends before its time: because it is told to, or because its updates are not finite."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.devices import hosts
from jaxrl_llm.rollouts import partial
from jaxrl_llm.run.bookkeeping import Job, finish_saving, save, summarize
from jaxrl_llm.run.start import Run
from jaxrl_llm.types import TrainBatch
from jaxrl_llm.workdir import nonfinite


class NonFiniteError(RuntimeError):
  """Too many updates in a row had a loss or a gradient that is not finite."""


class PreemptedError(RuntimeError):
  """A process of the run was sent SIGTERM, or Ctrl-C."""


def preempted(this: Run) -> PreemptedError:
  """What a run says that ends before its time."""
  why = "Ctrl-C" if hosts.interrupted() else "SIGTERM"
  finish_saving(this)
  summarize(this, f"stopped: {why}")
  return PreemptedError(f"stopped by {why}; the same command goes on from checkpoint {this.checkpoints.latest_step()} in {this.workdir}")


class Position(NamedTuple):
  """Where an RL step began: what the steps before it have left of the data, beside the arrays and the record."""

  prompts: Any
  carried: partial.Groups | None


def position(this: Run) -> Position:
  """Where the run is, between two RL steps."""
  return Position(this.prompts.get_state(), this.carried)


def stop_if_preempted(this: Run, began: Position | None) -> None:
  """Gives up an RL step that has not changed the policy yet, if the run is to end; a checkpoint then holds what was before the step.

  Args:
    this: the run.
    began: where it was; None where no process could begin the step again, and the last checkpoint is what there is.

  Raises:
    PreemptedError: all processes were here when it was to end.
  """
  if not hosts.preempted():
    return
  number = this.record.warm_steps + this.record.rl_steps
  if began is not None and this.checkpoints.latest_step() != number:
    this.prompts.set_state(began.prompts)
    this.carried = began.carried
    save(this)
  raise preempted(this)


def stop_if_not_finite(this: Run, updates: Sequence[dict[str, float]], batches: Sequence[TrainBatch]) -> None:
  """Counts refused updates, and keeps the batch of the first of a step; gives up after too many in a row.

  Args:
    this: the run; the step counts in its record.
    updates: metrics of the step's updates.
    batches: what each was made of.

  Raises:
    NonFiniteError: `learner.max_skipped` updates in a row were refused.
  """
  record, limit = this.record, this.config.learner.max_skipped
  keep_refused(this, updates, batches)
  for metrics in updates:
    skipped = is_refused(metrics)
    record.skipped_steps += skipped
    record.skipped_in_a_row = record.skipped_in_a_row + 1 if skipped else 0
    if record.skipped_in_a_row >= limit:
      finish_saving(this)
      summarize(this, "stopped: not finite")
      raise NonFiniteError(why_not_finite(this))


def is_refused(metrics: Mapping[str, float]) -> bool:
  """Whether an update of the policy, of the critic or of a reward model was not made, because it was not finite."""
  return any(metrics.get(f"{name}/skipped", 0) > 0 for name in ("train", "critic", "reward_model"))


def keep_refused(this: Job, updates: Sequence[dict[str, float]], batches: Sequence[TrainBatch]) -> None:
  """Writes the batch of a step's first refused update to WORKDIR/nonfinite, and says where, `nonfinite.MAX_DUMPS` times in a run.

  Args:
    this: the run or the training; the step counts in its record.
    updates: metrics of the step's updates.
    batches: what each was made of.
  """
  record, refused = this.record, [is_refused(metrics) for metrics in updates]
  if not any(refused) or len(record.nonfinite_dumps) >= nonfinite.MAX_DUMPS:
    return
  first, step = refused.index(True), record.rl_steps or record.warm_steps
  name = f"{'' if record.rl_steps else 'warm_'}step_{step}.npz"
  about = {"step": step, "phase": "rl" if record.rl_steps else "warm_start", "update": first, "refused": refused}
  about |= {"metrics": updates[first], "kl_coef": record.kl_coef, "last_good_checkpoint": this.checkpoints.latest_step()}
  if nonfinite.dump(path := this.workdir / nonfinite.FOLDER / name, batches[first], about):
    record.nonfinite_dumps = [*record.nonfinite_dumps, name]
    this.progress.note(f"update {first + 1} of step {step:,} was not finite and changed nothing; its batch: {path}")


def why_not_finite(this: Job) -> str:
  """What a run says that gives up: how many updates were refused, the last good checkpoint, and the last batch that was kept."""
  limit, good, dumps = this.config.learner.max_skipped, this.checkpoints.latest_step(), this.record.nonfinite_dumps
  where = "no checkpoint was saved yet" if good is None else f"last good checkpoint: {this.workdir / 'checkpoints' / str(good)}"
  batch = f"; a batch that led to it: {this.workdir / nonfinite.FOLDER / dumps[-1]}" if dumps else ""
  return f"loss or gradient not finite in {limit} updates in a row (learner.max_skipped={limit}); {where}{batch}"
