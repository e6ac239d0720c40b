"""What a run leaves behind and says as it goes: checkpoints, summary, sample rollouts, alarms."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ml_collections import ConfigDict

from jaxrl_llm import report
from jaxrl_llm.devices import hosts
from jaxrl_llm.devices.compiling import declared
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts import partial
from jaxrl_llm.run import alarms
from jaxrl_llm.run.progress import Progress
from jaxrl_llm.run.saved_state import saved_part
from jaxrl_llm.run.start import Run
from jaxrl_llm.workdir import checkpoint, disk, summary
from jaxrl_llm.workdir.record import Record, to_json


@runtime_checkable
class Job(Protocol):
  """What an RL run and the training of a reward model have in common."""

  config: ConfigDict
  workdir: Path
  record: Record
  checkpoints: checkpoint.Checkpoints
  progress: Progress
  clock: summary.Clock


def save(this: Run, *, temporary: bool = False) -> None:
  """One atomic checkpoint of all that the next step depends on.

  Args:
    this: the run.
    temporary: goes once there is a newer one.
  """
  number = this.record.warm_steps + this.record.rl_steps
  this.phases.begin("checkpoint", number)
  this.record.phase_steps = this.writer.phase_steps
  summarize(this, "running")
  optional = {"reference": this.reference, "critic": this.critic}
  arrays = {"state": saved_part(this.experiment, this.state)} | {name: x for name, x in optional.items() if x is not None}
  demonstrations = this.demonstrations and this.demonstrations.get_state()
  carried = None if this.carried is None else partial.to_json(this.carried)
  iterators = {"prompts": this.prompts.get_state(), "demonstrations": demonstrations, "carried": carried}
  measured = this.writer.phase_steps.get("eval") == this.record.rl_steps  # At this step, not some time ago.
  options = dict(accuracy=this.record.accuracy_final if measured else None, temporary=temporary)
  strike = lambda place: this.phases.strike(place, number)
  with declared():  # The first save of several processes compiles what parts the arrays among them.
    checkpoint.save(this.checkpoints, number, arrays, to_json(this.record) | iterators, at=strike, **options)
  tell_of_failed_saves(this)
  this.clock.lap("checkpoint")
  write_report(this)  # A run can be looked at while it runs.
  this.clock.lap("report")


def is_due(this: Job) -> bool:
  """Whether a temporary checkpoint is: so much time has passed since the last one, or since the last that failed."""
  minutes = this.config.checkpoint.every_minutes
  return minutes is not None and hosts.on_main(lambda: time.monotonic() - this.checkpoints.last_try >= 60 * minutes)


def tell_of_failed_saves(this: Job) -> dict[str, float]:
  """A line for each save that has failed since the last call; how many have so far, as a metric."""
  for line in checkpoint.failures(this.checkpoints):
    this.progress.note(line)
    this.record.failed_saves += 1
  failed = this.record.failed_saves
  return {"checkpoint/failed": failed} if failed else {}


def finish_saving(this: Job) -> None:
  """Waits for the save that is under way."""
  checkpoint.finish(this.checkpoints)
  tell_of_failed_saves(this)
  this.clock.lap("checkpoint")


def unsaved(this: Job) -> checkpoint.SaveFailedError | None:
  """Waits for the last checkpoint of a run; what the run says where it is not there."""
  finish_saving(this)
  if (failure := this.checkpoints.failure) is None:
    return None
  return checkpoint.SaveFailedError(f"{failure}; make room, and the same command does again what came after")


def write_report(this: Job) -> None:
  """Writes `report.html`, where there is room."""
  if hosts.is_main():
    disk.write_if_room(this.workdir / "report.html", lambda: report.write_report(this.workdir))


def summarize(this: Run, status: str) -> dict[str, Any]:
  """Brings the record up to date and writes `summary.json`."""
  this.clock.lap("other")
  this.clock.settle(this.record.seconds)
  this.record.peak_memory_gb = max(this.record.peak_memory_gb, summary.peak_memory_gb())
  folder = this.workdir if hosts.is_main() else None
  return summary.write_summary(
    folder, this.record, objective=this.config.objective.name, num_params=this.experiment.learner.model.num_params, status=status
  )


def show_samples(this: Run, step: int, batch: batch_lib.Batch, token_scores: Sequence[Mapping[str, Any]]) -> None:
  """Sample rollouts to `samples.jsonl`, and the first few to the screen.

  Args:
    this: the run.
    step: that they were drawn in.
    batch: of all rollouts of the step.
    token_scores: of each rollout, see `learn.token_scores`.
  """
  options = dict(num_rows=this.config.log.num_samples, token_text=this.experiment.task.tokenizer.decode)
  rows = batch_lib.sample_rows(batch, token_scores=token_scores, **options)
  this.samples.write(step, "rl", rows)
  if shown := rows[: this.config.log.num_table_rows]:
    this.progress.samples(shown, title=f"rollouts of RL step {step}")


def watch(this: Run, row: dict[str, Any]) -> dict[str, int]:
  """Alarms of an RL step, as metrics, with a line for each that begins or ends; they change nothing else.

  Args:
    this: the run; the step counts in its record.
    row: the step's metrics.
  """
  limits = alarms.Limits(**this.config.alarms)
  this.record.alarms, metrics, lines = alarms.observe(this.record.alarms, row, step=this.record.rl_steps, limits=limits)
  for line in lines:
    this.progress.note(line)
  return metrics


def tell_of_recompiles(this: Run) -> int:
  """A line for each program that was compiled although the run was warm; how many there have been in this process, as a metric."""
  for culprit, times in Counter(this.compiled.culprits()).items():
    often = f", {times} times" if times > 1 else ""
    this.progress.note(f"compiled again at RL step {this.record.rl_steps:,}{often}: {culprit}; changing shapes cost time")
  return this.compiled.unexpected
