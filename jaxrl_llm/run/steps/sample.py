"""The sampler's part of a run: weight sync, rollouts and evaluation of the policy."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm.devices import hosts
from jaxrl_llm.evaluation import held_out, write_samples
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts import carried, dynamic_sampling, versions
from jaxrl_llm.rollouts.arrivals import Arrivals, DrawnBatch, drawn_of, wait_for_groups
from jaxrl_llm.rollouts.jobs import sequence_seeds
from jaxrl_llm.rollouts.weight_sync import check_version
from jaxrl_llm.rollouts.window import Lengths, window_size
from jaxrl_llm.run.setup.saved_state import EVAL, ROLLOUT, TEST_SET
from jaxrl_llm.run.setup.start import Run
from jaxrl_llm.run.steps.grading import assess, with_signal
from jaxrl_llm.tasks.image_prompts import prompt_text
from jaxrl_llm.types import Params


class InFlight(NamedTuple):
  """Rollouts that a step has begun.

  Attributes:
    version: Number of RL steps that their weights were trained for.
    step, draw: RL step that learns from them in strict order, and number of the batch among those
      of the step.
    arrivals: What is drawn, as it finishes.
    groups: Groups that the job continues or begins, with spare prompts; else None.
  """

  version: int
  step: int
  draw: int
  arrivals: Arrivals
  groups: carried.Groups | None = None


def move_weights(run: Run) -> Params:
  """Returns the policy's weights on the sampler's devices, and moves them unless they are there."""
  sync, held, version = run.experiment.drawing.sync, run.on_sampler, run.record.rl_steps
  if sync is None:
    return run.state.params
  if held is None or held.version != version:
    frozen, run.on_sampler = held and held.frozen, None
    # Frees their memory before the new weights arrive, unless rollouts in flight still use them.
    del held
    run.on_sampler = sync.move(run.state.params, frozen, version)
  return run.on_sampler.params


def publish(run: Run, *, between: Callable[[], None] = lambda: None) -> None:
  """Gives what draws the policy's weights, unless it has them."""
  run.experiment.drawing.queue.publish(move_weights(run), run.record.rl_steps, between=between)


def launch(run: Run, step: int, *, draw: int = 0) -> InFlight:
  """Begins the rollouts of an RL step with the current weights, without waiting for them.

  With spare prompts they are drawn until enough groups are complete, beginning with those carried
  over from the last step.

  Args:
    run: RL run.
    step: RL step that learns from them, from 0.
    draw: Number of the batch among those of the step, from 0.
  """
  drawing, section = run.experiment.drawing, run.config.rollout
  publish(run)
  if drawing.sync is not None:
    check_version(run.on_sampler, step, staleness=section.staleness)
  key = jax.random.fold_in(jax.random.fold_in(run.key, ROLLOUT), step)
  key = jax.random.fold_in(key, draw) if draw else key
  if section.spare_prompts:
    new = [next(run.prompts)[0] for _ in range(section.num_prompts + section.spare_prompts - len(run.carried.examples))]
    groups = carried.join(run.carried, new, sequence_seeds(key, len(new) * section.group_size), step=step)
    job = drawing.train.job(groups.examples, key, run.state.params)
    job = job._replace(seeds=groups.seeds, begun=groups.conversations, enough=section.num_prompts)
  else:
    groups, job = None, drawing.train.job(next(run.prompts), key, run.state.params)
  play = drawing.train.play if run.player is None else run.player(drawing.train.play, step, draw)
  playing = drawing.queue.begin(play, job, step, draw)
  # Several processes grade together, and at that time nothing else may use their devices.
  rewards = run.experiment.rewards if jax.process_count() == 1 else None
  return InFlight(run.record.rl_steps, step, draw, Arrivals(playing, job, rewards=rewards, call=run.grader), groups)


def window_of(config: ConfigDict) -> int:
  """Returns the number of consecutive groups that a step may choose from; 1 is strict order."""
  return window_size(config.rollout.window, staleness=config.rollout.staleness, num_prompts=config.rollout.num_prompts)


class StaleError(RuntimeError):
  """Rollouts are older than the run allows, so nothing is learned from them."""


def wait(
  run: Run, step: int, *begun: InFlight, lengths: Lengths | None = None, between: Callable[[], None] = lambda: None
) -> tuple[DrawnBatch, dict[str, float]]:
  """Waits for the rollouts that an RL step learns from; the others are carried into the next step.

  Those that arrive before the others are graded meanwhile, if they are requests of the engine.
  `between` is called whenever the host has work to do while rollouts are in flight. If it raises,
  the rollouts are given up.

  Args:
    run: RL run.
    step: RL step, from 0.
    *begun: Rollouts in flight, oldest first. The step learns from the first, or through the window
      from others as well.
    lengths: Lengths of what earlier steps learned from; None without a window.
    between: The function.

  Raises:
    StaleError: If weights drew them that are older than `rollout.staleness` allows.
  """
  drawing, section, current = run.experiment.drawing, run.config.rollout, begun[0]
  window = window_of(run.config) if lengths is not None else 1
  known = drawing.queue.order(step) if window > 1 else ()
  batches = {own.step: own.arrivals for own in begun}
  numbers, job, gathered = wait_for_groups(batches, window=window, known=known, between=between)
  gathered, metrics = drawing.queue.take(gathered, step, current.draw, numbers if window > 1 else ())
  rows, oldest = np.arange(len(gathered.played)), current.version
  if current.groups is not None:
    rows, run.carried = carried.take(current.groups, gathered.played, num_groups=job.enough)
    metrics |= carried.metrics(current.groups, gathered.played, rows, step=step)
  drawn, of_drawn = drawn_of(gathered, job, drawing.tokenizer, rows, prompt_buckets=drawing.prompt_buckets)
  rollouts = drawn.rollouts._replace(logprobs=run.phases.poison("rollout", drawn.rollouts.logprobs))
  if rollouts.versions is not None:
    oldest = int(np.min(rollouts.versions[rollouts.versions >= 0], initial=step))
  elif section.staleness and not section.spare_prompts:  # Older weights drew what is carried.
    rollouts = versions.of_one_version(rollouts, current.version)
  if lengths is not None:
    metrics |= lengths.note(step, numbers, rollouts.mask.sum(axis=1))
  if oldest < step - section.staleness:
    raise StaleError(f"step {step + 1}: found tokens of the weights after {oldest} steps, expected {step - section.staleness} or later")
  return drawn._replace(rollouts=rollouts), of_drawn | metrics | {"rollout/staleness": step - oldest}


def refill(run: Run, batch: batch_lib.Batch, step: int) -> tuple[batch_lib.Batch, dict[str, float]]:
  """Draws again, with new prompts and the same weights, until enough groups carry a signal.

  It stops after `rollout.max_refills` refills.

  Returns:
    The step's batch, of the same size as the first one, and its metrics.
  """
  section, batches = run.config.rollout, [batch]
  if not section.max_refills:
    return batch, {}
  signals = [with_signal(run, batch, shaped=False)]
  while np.sum(signals) < section.num_prompts and len(batches) <= section.max_refills:
    drawn, _ = wait(run, step, launch(run, step, draw=len(batches)))
    batches.append(assess(run, drawn))
    signals.append(with_signal(run, batches[-1], shaped=False))
  batch, counters = dynamic_sampling.fill(batches, signals, num_groups=section.num_prompts)
  drawn_tokens = float(sum(np.sum(x.rollouts.mask) for x in batches))
  return batch, counters | {"group/response_tokens_drawn": drawn_tokens}


def evaluate(run: Run, step: int) -> float:
  """Measures the held-out accuracy at an RL step: avg@k at the evaluation's temperature."""
  config, experiment = run.config, run.experiment
  run.phases.begin("eval", step)
  evaluated = held_out.evaluate_policy(
    experiment.drawing.samples(move_weights(run), run.record.rl_steps),
    [experiment.task.test[i] for i in held_out.choose(len(experiment.task.test), config.eval.num_prompts, seed=TEST_SET)],
    jax.random.fold_in(jax.random.fold_in(run.key, EVAL), step),
    batch_prompts=config.eval.batch_prompts,
    verifier=experiment.verifier,
    call=run.grader,
  )
  row = held_out.eval_metrics(evaluated, config.eval.metrics)
  if config.eval.save_samples and hosts.is_main():
    folder = run.workdir / "evaluations"
    folder.mkdir(exist_ok=True)
    tokenizer, verifier = experiment.task.tokenizer, experiment.verifier.name
    rows = held_out.sample_rows(
      evaluated, verifier=verifier, decode=partial(prompt_text, tokenizer=tokenizer), seed=config.seed, model=str(run.workdir), step=step
    )
    write_samples(folder / f"step-{step}.jsonl", rows)
  run.writer.write(step, "eval", row | run.phases.end())
  # The line on the screen has room only for the accuracy's interval.
  run.progress.evaluation(step, {name: value for name, value in row.items() if not name.endswith(("/low", "/high"))})
  return row["eval/accuracy"]
