"""What a run leaves behind: checkpoints, summary, sample rollouts; and why it stops before its time."""

from typing import Any

from jaxrl_llm import assessment, checkpoint, hosts, ledger, partial_rollouts, report
from jaxrl_llm.run import Run
from jaxrl_llm.states import saved_part


class NonFiniteError(RuntimeError):
  """Too many updates in a row had a loss or a gradient that is not finite."""


class PreemptedError(RuntimeError):
  """A process of the run was sent SIGTERM."""


def save(this: Run) -> None:
  """One atomic checkpoint of all that the next step depends on."""
  this.record["phase_steps"] = this.writer.phase_steps
  summarize(this, "running")
  optional = {"reference": this.reference, "critic": this.critic}
  arrays = {"state": saved_part(this.experiment, this.state)} | {name: x for name, x in optional.items() if x is not None}
  demonstrations = this.demonstrations and this.demonstrations.get_state()
  carried = None if this.carried is None else partial_rollouts.to_json(this.carried)
  iterators = {"prompts": this.prompts.get_state(), "demonstrations": demonstrations, "carried": carried}
  checkpoint.save(this.checkpoints, this.record["warm_steps"] + this.record["rl_steps"], arrays, this.record | iterators)
  this.clock.lap("checkpoint")
  if hosts.is_main():
    report.write_report(this.workdir)  # A run can be looked at while it runs.
  this.clock.lap("report")


def summarize(this: Run, status: str) -> dict[str, Any]:
  """Brings the record up to date and writes `summary.json`."""
  this.clock.lap("other")
  this.clock.settle(this.record)
  this.record["peak_memory_gb"] = max(this.record["peak_memory_gb"], ledger.peak_memory_gb())
  folder = this.workdir if hosts.is_main() else None
  return ledger.write_summary(
    folder, this.record, objective=this.config.objective.name, num_params=this.experiment.model.num_params, status=status
  )


def preempted(this: Run) -> PreemptedError:
  """What a run says that ends before its time."""
  summarize(this, "stopped: SIGTERM")
  return PreemptedError(f"stopped by SIGTERM; the same command goes on from checkpoint {this.checkpoints.latest_step()} in {this.workdir}")


def show_samples(this: Run, step: int, batch: assessment.Batch) -> None:
  """Sample rollouts to `samples.jsonl`, and the first few to the screen."""
  rows = assessment.sample_rows(batch, num_rows=this.config.log.num_samples, token_text=this.experiment.task.tokenizer.decode)
  this.samples.write(step, "rl", rows)
  if shown := rows[: this.config.log.num_table_rows]:
    this.progress.samples(shown, title=f"rollouts of RL step {step}")


def stop_if_not_finite(this: Run, updates: list[dict[str, float]]) -> None:
  """Counts refused updates; gives up after too many in a row."""
  record, limit = this.record, this.config.learner.max_skipped
  for metrics in updates:
    skipped = int(max(metrics.get("train/skipped", 0), metrics.get("critic/skipped", 0)))
    record["skipped_steps"] += skipped
    record["skipped_in_a_row"] = record["skipped_in_a_row"] + 1 if skipped else 0
    if record["skipped_in_a_row"] >= limit:
      summarize(this, "stopped: not finite")
      good = this.checkpoints.latest_step()
      where = f"last good checkpoint: {this.workdir / 'checkpoints' / str(good)}" if good is not None else "no checkpoint was saved yet"
      raise NonFiniteError(f"loss or gradient not finite in {limit} updates in a row (learner.max_skipped={limit}); {where}")
