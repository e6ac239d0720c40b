"""The training loop, from a config to a report: a warm start by imitation, then RL."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.devices.mesh import place_tokens
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.needs import needed_by_warm_start
from jaxrl_llm.messages import MissingPackageError, UsageError
from jaxrl_llm.run.observe import garbage
from jaxrl_llm.run.setup.out_of_memory import explained
from jaxrl_llm.run.setup.start import Run, start_run
from jaxrl_llm.run.steps import warm_starts
from jaxrl_llm.run.steps.ahead import Ahead, saves
from jaxrl_llm.run.steps.bookkeeping import finish, report_failed_saves, report_recompiles, require_saved, show_samples, watch
from jaxrl_llm.run.steps.grading import assess, grading_metrics
from jaxrl_llm.run.steps.learn import adapt_coefficients, arrange, end_imitation, learn_from, token_scores
from jaxrl_llm.run.steps.sample import evaluate, refill
from jaxrl_llm.run.steps.stop import end_step, position, stop_if_not_exact, stop_if_not_finite, stop_if_preempted
from jaxrl_llm.tasks.pipeline import encode_demonstrations
from jaxrl_llm.workdir import summary as summary_lib


def run(config: ConfigDict, workdir: Path, *, command: str = "") -> dict[str, Any]:
  """Trains one experiment; resumes if `workdir` holds a checkpoint.

  This is `start_run` followed by `proceed`.
  """
  return proceed(start_run(config, workdir, command=command))


def proceed(run: Run) -> dict[str, Any]:
  """Trains to the end of the run.

  Returns:
    The summary that `summary.json` holds.

  Raises:
    NonFiniteError: If `learner.max_skipped` updates in a row were non-finite.
    PreemptedError: If a process received SIGTERM; the run can resume from a checkpoint.
    SaveFailedError: If the last checkpoint could not be saved; the run can resume from an earlier
      one.
    OutOfMemoryError: If the run does not fit into a device's memory.
    UsageError: If a branch cannot start with its own settings.
  """
  explaining, checkpoints = explained(run.config, lambda: run.phases.now), contextlib.closing(run.checkpoints)
  # Restores the terminal and closes the files, however the run ends.
  with explaining, checkpoints, run.phases, run.experiment.drawing.queue, run.grader, run.progress, run.writer, run.samples:
    warm_start(run)
    if run.record.accuracy_start is None:
      begin_rl(run)
    with garbage.exemption() as exempt:
      reinforce(run, exempt)
    require_saved(run)
  return finish(run) if run.goes_on is None else proceed(leave_fork(run))


def leave_fork(run: Run) -> Run:
  """Starts a branch with its own settings, from the checkpoint of its fork.

  Raises:
    UsageError: If it cannot start with them.
  """
  for line in run.trackers.finish():
    run.progress.note(line)
  # The restored state takes their place in the devices' memory.
  run.state = run.reference = run.critic = run.on_sampler = None
  run.teachers = {}
  try:
    following = run.goes_on()
  except (MissingPackageError, ValueError) as error:
    raise UsageError(str(error)) from error
  # It is the same one.
  following.record.attempts, following.record.resumed_at = run.record.attempts, run.record.resumed_at
  return following


def warm_start(run: Run) -> None:
  """Teaches the policy to imitate, because RL cannot learn from a policy that is never right.

  The weights are those of an equal earlier run if there was one.
  """
  warm_starts.reuse(run, imitate)


def imitate(run: Run) -> list[dict[str, Any]]:
  """Takes the remaining steps of the warm start. Returns the metrics of each."""
  rows = []
  config, experiment, record = run.config.warm_start, run.experiment, run.record
  run.progress.start("warm_start", config.num_steps, done=record.warm_steps)
  for step in range(record.warm_steps, config.num_steps):
    run.phases.begin_step(step + 1, "warm_start")
    examples, gallery = next(run.demonstrations), experiment.drawing.gallery
    settings = gallery and gallery.settings
    shown = encode_demonstrations(examples, experiment.task.tokenizer, replies=experiment.replies, pictures=settings)
    pictures = [None] * len(shown) if gallery is None else gallery.pictures(examples, run.state.params)
    sequences = [packing.demonstration(*x, pictures=of_prompt) for x, of_prompt in zip(shown, pictures, strict=True)]
    layout = arrange(run, sequences, row_buckets=config.row_buckets, share_prompts=False)
    batch = needed_by_warm_start(packing.pack(sequences, layout, gallery and gallery.rows))
    placed = place_tokens(experiment.mesh, batch)
    run.state, metrics = experiment.learner.warm_step(run.state, placed)
    metrics, tokens = summary_lib.to_floats(metrics), layout.num_used
    run.phases.begin("other")
    timing = run.phases.timing
    metrics |= timing | {"perf/throughput": tokens / timing["timing_s/warm_start"]} | report_failed_saves(run)
    rows.append(metrics)
    record.warm_steps, record.tokens = step + 1, record.tokens + tokens
    run.writer.write(step + 1, "warm_start", metrics)
    run.progress.update(step + 1, metrics)
    stop_if_not_finite(run, [metrics], [placed])
    # `begin_rl` saves the checkpoint of the last step, with the first accuracy in it.
    if step + 1 < config.num_steps:
      end_step(run, saves=(step + 1) % run.config.checkpoint.warm_start_every == 0)
  return rows


def begin_rl(run: Run) -> None:
  """Switches from imitation to RL, measures the first accuracy and saves a checkpoint."""
  end_imitation(run)
  run.record.accuracy_start = run.record.accuracy_final = evaluate(run, 0)
  run.compiled.passed("eval")
  end_step(run, saves=True)


def reinforce(run: Run, exempt: Callable[[], None] = lambda: None) -> None:
  """Runs the RL loop, and calls `exempt` once the first step has compiled what all of them run.

  A step can be abandoned without loss until its updates begin: `stop_if_preempted` then saves the
  state from the beginning of the step.
  """
  config, record = run.config, run.record
  first, end = record.rl_steps, config.num_steps if run.until is None else run.until
  run.progress.start("rl", config.num_steps, done=first)
  ahead = Ahead(run)
  for step in range(first, end):
    # With rollouts in flight, no saved state would let another process begin this step.
    began = position(run) if ahead.is_empty else None
    run.phases.profiler.step(step + 1)
    run.phases.begin_step(step + 1, "weight_sync")
    drawn, draw_metrics = ahead.take(step, between=lambda: stop_if_preempted(run, began))  # noqa: B023 (asked within the step)
    stop_if_preempted(run, began)

    run.phases.begin("reward", waits_for=run.grader.waits_for)
    batch, refill_metrics = refill(run, assess(run, drawn), step)
    totals = run.phases.poison("reward", batch.graded.totals)
    batch = batch._replace(graded=batch.graded._replace(totals=totals))
    stop_if_preempted(run, began)

    learned = learn_from(run, batch, step, between=lambda: stop_if_preempted(run, began))  # noqa: B023 (asked within the step)
    row = learned.metrics | draw_metrics | refill_metrics | grading_metrics(run) | run.phases.timing
    adapt_coefficients(run, row)
    row |= summary_lib.step_performance(row, learned.num_tokens)
    row |= {"perf/compiles": run.compiled.count}
    record.rl_steps, record.tokens = step + 1, record.tokens + learned.num_tokens
    row |= {"perf/recompiles": report_recompiles(run)} | report_failed_saves(run) | watch(run, row)
    run.writer.write(step + 1, "rl", row)
    run.progress.update(step + 1, row)
    stop_if_not_finite(run, learned.updates, learned.placed)
    stop_if_not_exact(run, learned.updates, lag=row["rollout/staleness"])
    last = step + 1 == config.num_steps
    if step == 0 or last or (step + 1) % config.log.samples_every == 0:
      show_samples(run, step + 1, learned.batch, token_scores(run, learned))
    if last or (step + 1) % config.eval.every == 0:
      record.accuracy_final = evaluate(run, step + 1)
      run.compiled.passed("eval")
    run.compiled.passed("rl")
    is_fork = record.warm_steps + step + 1 == run.checkpoints.last
    end_step(run, saves=saves(config, step) or is_fork, last=last, can_save=ahead.is_empty)
    if step == first:
      exempt()
