"""The run, from a config to a report: warm start by imitation, then RL. Read it top to bottom."""

import contextlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm.devices import hosts
from jaxrl_llm.devices.mesh import place_tokens
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.needs import needed_by_warm_start
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts import pipelining, trajectories
from jaxrl_llm.run.bookkeeping import (
  is_due,
  save,
  show_samples,
  summarize,
  tell_of_failed_saves,
  tell_of_recompiles,
  unsaved,
  watch,
  write_report,
)
from jaxrl_llm.run.learn import adapt_kl, add_credit, arrange, leave_out, token_scores, update, with_logprobs
from jaxrl_llm.run.sample import assess, evaluate, launch, move_weights, refill, wait
from jaxrl_llm.run.saved_state import CRITIC
from jaxrl_llm.run.start import Run, copy, start
from jaxrl_llm.run.stopping import position, preempted, stop_if_not_finite, stop_if_preempted
from jaxrl_llm.tasks.pipeline import encode_demonstrations
from jaxrl_llm.workdir import summary as summary_lib


def run(config: ConfigDict, workdir: Path, *, command: str = "") -> dict[str, Any]:
  """Trains one experiment, or goes on with it where `workdir` holds a checkpoint: `start`, then `proceed`."""
  return proceed(start(config, workdir, command=command))


def proceed(this: Run) -> dict[str, Any]:
  """Runs to the end.

  Returns:
    The summary, as in `summary.json`.

  Raises:
    NonFiniteError: `learner.max_skipped` updates in a row were refused.
    PreemptedError: a process was sent SIGTERM; the run can go on from a checkpoint.
    SaveFailedError: the last checkpoint could not be saved; the run can go on from one before.
  """
  # Whatever stops the run, the terminal is given back and the files are closed.
  closing = contextlib.closing
  with closing(this.profiler), closing(this.checkpoints), this.watchdog, this.grader, this.progress, this.writer, this.samples:
    warm_start(this)
    if this.record.accuracy_start is None:
      begin_rl(this)
    reinforce(this)
    return finish(this)


def warm_start(this: Run) -> None:
  """Imitates the demonstrations: RL cannot learn from a policy that is never right."""
  config, experiment, record = this.config.warm_start, this.experiment, this.record
  this.progress.start("warm_start", config.num_steps, done=record.warm_steps)
  for step in range(record.warm_steps, config.num_steps):
    this.phases.begin_step(step + 1, "warm_start")
    shown = encode_demonstrations(next(this.demonstrations), experiment.task.tokenizer, replies=experiment.replies)
    sequences = [packing.demonstration(*x) for x in shown]
    batch = packing.pack(sequences, arrange(this, sequences, row_buckets=config.row_buckets, share_prompts=False))
    this.state, metrics = experiment.learner.warm_step(this.state, place_tokens(experiment.mesh, needed_by_warm_start(batch)))
    metrics = summary_lib.to_floats(metrics)
    tokens = int(np.count_nonzero(batch.segments))
    this.phases.begin("other")
    timing = this.phases.timing
    metrics |= timing | {"perf/throughput": tokens / timing["timing_s/warm_start"]} | tell_of_failed_saves(this)
    record.warm_steps, record.tokens = step + 1, record.tokens + tokens
    this.writer.write(step + 1, "warm_start", metrics)
    this.progress.update(step + 1, metrics)
    stop_if_not_finite(this, [metrics], [batch])
    # The last step's checkpoint is `begin_rl`'s, which has the first accuracy in it.
    if step + 1 < config.num_steps:
      stop = hosts.preempted()
      if stop or (step + 1) % this.config.checkpoint.warm_start_every == 0:
        save(this)
      elif is_due(this):
        save(this, temporary=True)
      if stop:
        raise preempted(this)


def begin_rl(this: Run) -> None:
  """From imitation to RL: a fresh optimizer, the reference frozen, the critic with the trunk of the policy, the first accuracy."""
  this.state = this.experiment.learner.restart(this.state.params)
  if this.reference is not None:
    this.reference = copy(this.state.params)
  if this.critic is not None:
    this.critic = this.experiment.learner.critic.init(jax.random.fold_in(this.key, CRITIC), this.state.params)
  this.record.accuracy_start = this.record.accuracy_final = evaluate(this, 0)
  this.compiled.passed("eval")
  stop = hosts.preempted()
  save(this)
  if stop:
    raise preempted(this)


def reinforce(this: Run) -> None:
  """The RL loop. Until its updates begin, a step can be given up at no loss: `stop_if_preempted` then saves where it began."""
  config, experiment, record = this.config, this.experiment, this.record
  this.progress.start("rl", config.num_steps, done=record.rl_steps)
  drawing = None
  for step in range(record.rl_steps, config.num_steps):
    # With rollouts in flight there is nothing that another process could begin this step from.
    began = position(this) if drawing is None else None
    this.profiler.step(step + 1)
    this.phases.begin_step(step + 1, "weight_sync")
    is_ahead = pipelining.draws_ahead(config, step)
    if drawing is None or is_ahead:
      move_weights(this)

    this.phases.begin("rollout")
    current = drawing or launch(this, step)
    drawn, draw_metrics = wait(this, current, step, between=lambda: stop_if_preempted(this, began))  # noqa: B023 (asked within the step)
    # As soon as the sampler is free: all that this step still does, its updates above all, then runs beside it.
    drawing = launch(this, step + 1) if is_ahead else None
    stop_if_preempted(this, began)

    this.phases.begin("reward", waits_for=this.grader.waits_for)
    batch, refill_metrics = refill(this, assess(this, drawn), step)
    totals = this.phases.poison("reward", batch.graded.totals)
    batch = leave_out(this, batch._replace(graded=batch.graded._replace(totals=totals)))
    stop_if_preempted(this, began)

    this.phases.begin("old_logprobs")
    minibatches = packing.split(trajectories.trajectories(batch.rollouts, batch.counted), config.learner.updates_per_rollout)
    layouts = [arrange(this, x) for x in minibatches]
    packed = [packing.pack(x, layout) for x, layout in zip(minibatches, layouts, strict=True)]
    computed = [with_logprobs(this, place_tokens(experiment.mesh, minibatch), step) for minibatch in packed]
    placed, route_metrics = [batch for batch, _ in computed], [metrics for _, metrics in computed]
    stop_if_preempted(this, began)

    this.phases.begin("advantages")
    batch, placed, credit_metrics = add_credit(this, batch, layouts, placed)
    stop_if_preempted(this, began)

    this.phases.begin("update")
    placed = [x._replace(advantages=this.phases.poison("update", x.advantages)) for x in placed]
    updates = [update(this, minibatch, step) for minibatch in placed]
    # One wait, for all updates of the step.
    updates = [summary_lib.to_floats(metrics | routes) for metrics, routes in zip(updates, route_metrics, strict=True)]

    this.phases.begin("other")
    row = summary_lib.combine(updates) | batch_lib.metrics(batch) | draw_metrics | refill_metrics | credit_metrics | this.phases.timing
    adapt_kl(this, row)
    tokens = sum(len(sequence.tokens) for minibatch in minibatches for sequence in minibatch)
    row |= summary_lib.step_performance(row, tokens) | {
      "rollout/staleness": step - current.version,
      "perf/packing_waste": packing.packing_waste(packed),
      "perf/prompts_saved": packing.prompts_saved([x for minibatch in minibatches for x in minibatch], packed),
      "perf/compiles": this.compiled.count,
    }
    record.rl_steps, record.tokens = step + 1, record.tokens + tokens
    row |= {"perf/recompiles": tell_of_recompiles(this)} | tell_of_failed_saves(this) | watch(this, row)
    this.writer.write(step + 1, "rl", row)
    this.progress.update(step + 1, row)
    stop_if_not_finite(this, updates, placed)
    last = step + 1 == config.num_steps
    if step == 0 or last or (step + 1) % config.log.samples_every == 0:
      show_samples(this, step + 1, batch, token_scores(this, layouts, placed))
    if last or (step + 1) % config.eval.every == 0:
      record.accuracy_final = evaluate(this, step + 1)
      this.compiled.passed("eval")
    this.compiled.passed("rl")
    stop = not last and hosts.preempted()
    if pipelining.saves(config, step) or (stop and drawing is None):
      save(this)
    elif drawing is None and is_due(this):
      save(this, temporary=True)
    if stop:
      raise preempted(this)


def finish(this: Run) -> dict[str, Any]:
  """Waits for the last checkpoint; closes the files; writes the summary and the report."""
  if (error := unsaved(this)) is not None:
    summarize(this, "stopped: not saved")
    raise error
  this.progress.close()
  this.writer.close()
  this.samples.close()
  summary = summarize(this, "finished")
  write_report(this)
  return summary
