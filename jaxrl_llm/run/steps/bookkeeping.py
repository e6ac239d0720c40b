"""Bookkeeping of a run: checkpoints, summary, sample rollouts and alarms."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ml_collections import ConfigDict

from jaxrl_llm import report
from jaxrl_llm.devices import hosts
from jaxrl_llm.devices.compilation import declared
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.run.observe import alarms
from jaxrl_llm.run.observe.phases import Phases
from jaxrl_llm.run.observe.progress import Progress
from jaxrl_llm.run.observe.trackers.followers import Followers
from jaxrl_llm.run.setup.start import Run
from jaxrl_llm.workdir import checkpoint, disk, summary
from jaxrl_llm.workdir.metrics import MetricWriter
from jaxrl_llm.workdir.record import Record, record_to_json


@runtime_checkable
class BookkeptRun(Protocol):
  """The interface that an RL run and the training of a reward model share."""

  config: ConfigDict
  workdir: Path
  record: Record
  checkpoints: checkpoint.Checkpoints
  writer: MetricWriter
  progress: Progress
  phases: Phases
  trackers: Followers

  @property
  def num_params(self) -> int:
    """Number of weights of the model."""

  def arrays(self) -> dict[str, Any]:
    """Returns the arrays of a checkpoint, by name."""

  def places(self) -> dict[str, Any]:
    """Returns the positions of the data iterators, as JSON by name."""


def save(run: BookkeptRun, *, temporary: bool = False) -> None:
  """Writes one atomic checkpoint of all that the next step depends on.

  The next checkpoint replaces a temporary one.
  """
  record, phases = run.record, run.phases
  number = record.warm_steps + record.rl_steps
  phases.begin("checkpoint", number)
  record.phase_steps = run.writer.phase_steps
  summarize(run, "running")
  measured = record.phase_steps.get("eval") == record.rl_steps  # At this step, not earlier.
  options = dict(accuracy=record.accuracy_final if measured else None, temporary=temporary, at=lambda place: phases.strike(place, number))
  # With several processes, the first save compiles what splits the arrays among them.
  with declared():
    checkpoint.save(run.checkpoints, number, run.arrays(), record_to_json(record) | run.places(), **options)
  report_failed_saves(run)
  report_failed_trackers(run)
  phases.clock.lap("checkpoint")
  write_report(run)  # So that the report can be read while the run goes on.
  phases.clock.lap("report")


def is_due(run: BookkeptRun) -> bool:
  """Returns whether a temporary checkpoint is due, given the time since the last save was tried."""
  minutes = run.config.checkpoint.every_minutes
  return minutes is not None and hosts.on_main(lambda: time.monotonic() - run.checkpoints.last_try >= 60 * minutes)


def report_failed_saves(run: BookkeptRun) -> dict[str, float]:
  """Prints a line for each save that has failed since the last call.

  Returns:
    The number of failed saves so far, as a metric; empty if there are none.
  """
  for line in checkpoint.failures(run.checkpoints):
    run.progress.note(line)
    run.record.failed_saves += 1
  failed = run.record.failed_saves
  return {"checkpoint/failed": failed} if failed else {}


def report_failed_trackers(run: BookkeptRun) -> None:
  """Prints a line for each tracker that has failed since the last call."""
  for line in run.trackers.news():
    run.progress.note(line)


def finish_saving(run: BookkeptRun) -> None:
  """Waits for the save in flight."""
  checkpoint.finish(run.checkpoints)
  report_failed_saves(run)
  run.phases.clock.lap("checkpoint")


def require_saved(run: BookkeptRun) -> None:
  """Waits for the last checkpoint of a run.

  Raises:
    SaveFailedError: If it could not be written.
  """
  finish_saving(run)
  if (failure := run.checkpoints.failure) is not None:
    summarize(run, "stopped: not saved")
    raise checkpoint.SaveFailedError(f"{failure}; free some space, and the same command repeats the steps after it")


def finish(run: BookkeptRun) -> dict[str, Any]:
  """Writes the summary and the report of a finished run, and returns the summary.

  The trackers get both, so that the run waits for them here, for a limited time.
  """
  written = summarize(run, "finished")
  write_report(run)
  for line in run.trackers.finish():
    run.progress.note(line)
  return written


def write_report(run: BookkeptRun) -> None:
  """Writes `report.html`, unless the disk is full."""
  if hosts.is_main():
    disk.write_if_room(run.workdir / "report.html", lambda: report.write_report(run.workdir))


def summarize(run: BookkeptRun, status: str) -> dict[str, Any]:
  """Updates the record, writes `summary.json` and returns the summary."""
  record, clock = run.record, run.phases.clock
  clock.lap("other")
  clock.settle(record.seconds)
  record.peak_memory_gb = max(record.peak_memory_gb, summary.peak_memory_gb())
  folder = run.workdir if hosts.is_main() else None
  return summary.write_summary(folder, record, objective=run.config.objective.name, num_params=run.num_params, status=status)


def show_samples(run: Run, step: int, batch: batch_lib.Batch, token_scores: Sequence[Mapping[str, Any]]) -> None:
  """Writes some of a step's rollouts to `samples.jsonl` and prints the first few.

  Each row includes its `learn.token_scores`.
  """
  options = dict(num_rows=run.config.log.num_samples, token_text=run.experiment.task.tokenizer.decode)
  rows = batch_lib.sample_rows(batch, token_scores=token_scores, **options)
  run.samples.write(step, "rl", rows)
  if shown := rows[: run.config.log.num_table_rows]:
    run.progress.samples(shown, title=f"rollouts of RL step {step}")


def watch(run: Run, row: dict[str, Any]) -> dict[str, int]:
  """Returns the alarms of the record's RL step as metrics; prints each one that begins or ends.

  Nothing else changes.
  """
  limits = alarms.AlarmLimits(**run.config.alarms)
  run.record.alarms, metrics, lines = alarms.observe(run.record.alarms, row, step=run.record.rl_steps, limits=limits)
  for line in lines:
    run.progress.note(line)
  return metrics


def report_recompiles(run: Run) -> int:
  """Prints a line for each program that was compiled although the run was warm.

  Returns:
    The number of such compilations in this process, as a metric.
  """
  for culprit, times in Counter(run.compiled.culprits()).items():
    often = f", {times} times" if times > 1 else ""
    run.progress.note(f"compiled again at RL step {run.record.rl_steps:,}{often}: {culprit}; changing shapes cost time")
  return run.compiled.unexpected
