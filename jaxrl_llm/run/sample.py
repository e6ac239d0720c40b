"""The sampler's part of a run: weight sync, rollouts and evaluation of the policy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from ml_collections import ConfigDict

from jaxrl_llm.devices import hosts
from jaxrl_llm.evaluation import held_out, write_samples
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts import carried_talks, conversations, dynamic_sampling, pipelining, rollout, versions
from jaxrl_llm.rollouts import partial as partial_lib
from jaxrl_llm.rollouts.gathering import drawn_of, wait_for
from jaxrl_llm.rollouts.playing import sequence_seeds
from jaxrl_llm.rollouts.weight_sync import check_version
from jaxrl_llm.run.grading import assess, curriculum_metrics, with_signal
from jaxrl_llm.run.saved_state import EVAL, ROLLOUT, TEST_SET
from jaxrl_llm.run.start import Run
from jaxrl_llm.tasks.image_prompts import prompt_text
from jaxrl_llm.types import Params


def move_weights(run: Run) -> None:
  """Moves the policy's weights to the sampler's devices, unless they are already there.

  It does nothing if sampler and learner share devices.
  """
  sync, held, version = run.experiment.sync, run.on_sampler, run.record.rl_steps
  if sync is None or (held is not None and held.version == version):
    return
  frozen, run.on_sampler = held and held.frozen, None
  # Frees their memory before the new weights arrive, unless rollouts in flight still use them.
  del held
  run.on_sampler = sync.move(run.state.params, frozen, version)


def sampler_params(run: Run) -> Params:
  """Returns the policy's weights on the sampler's devices."""
  return run.state.params if run.experiment.sync is None else run.on_sampler.params


def publish(run: Run, *, between: Callable[[], None] = lambda: None) -> None:
  """Gives the decoding engine the policy's weights, unless it has them."""
  move_weights(run)
  run.experiment.talking.queue.publish(sampler_params(run), run.record.rl_steps, between=between)


def launch(run: Run, step: int, *, draw: int = 0) -> pipelining.InFlight:
  """Begins the rollouts of an RL step with the current weights, without waiting for them.

  Steps and their draws count from 0.
  """
  experiment, section = run.experiment, run.config.rollout
  if experiment.sync is not None:
    check_version(run.on_sampler, step, staleness=section.staleness)
  key = jax.random.fold_in(jax.random.fold_in(run.key, ROLLOUT), step)
  key = jax.random.fold_in(key, draw) if draw else key
  if experiment.talking is not None:
    return pipelining.InFlight(run.record.rl_steps, on_engine(run, key, step, draw))
  ask = partial(
    rollout.dispatch,
    experiment.sampler.stream or experiment.sampler.sample,
    sampler_params(run),
    key=key,
    mesh=experiment.sampler_mesh,
    tokenizer=experiment.task.tokenizer,
    prompt_buckets=section.prompt_buckets,
    gallery=experiment.gallery,
  )
  return pipelining.InFlight(run.record.rl_steps, drawing_function(run.config)(run, ask, step))


class StaleError(RuntimeError):
  """Rollouts are older than the run allows, so nothing is learned from them."""


def wait(
  run: Run, current: pipelining.InFlight, step: int, *, between: Callable[[], None] = lambda: None
) -> tuple[rollout.Drawn, dict[str, float]]:
  """Waits for the rollouts that an RL step learns from; the others are carried into the next step.

  `between` is called whenever the host has work to do while rollouts are in flight. If it raises,
  the rollouts are given up.

  Raises:
    StaleError: If weights drew them that are older than `rollout.staleness` allows.
  """
  (drawn, metrics), section, oldest = current.arrive(between), run.config.rollout, current.version
  rollouts = drawn.rollouts._replace(logprobs=run.phases.poison("rollout", drawn.rollouts.logprobs))
  if rollouts.versions is not None:
    oldest = int(np.min(rollouts.versions[rollouts.versions >= 0], initial=step))
  elif section.staleness and not section.spare_prompts:  # Older weights drew what is carried.
    rollouts = versions.of_one_version(rollouts, current.version)
  if oldest < step - section.staleness:
    raise StaleError(f"step {step + 1}: found tokens of the weights after {oldest} steps, expected {step - section.staleness} or later")
  return drawn._replace(rollouts=rollouts), metrics | {"rollout/staleness": step - oldest}


def drawing_function(config: ConfigDict) -> Callable[..., pipelining.ArriveFn]:
  """Returns the function that draws rollouts with the sampler, `(run, ask, step) -> arrive`.

  It dispatches them at once; `arrive` then waits for them.
  """
  if config.environment.name is not None:
    return conversing
  way = streamed if config.rollout.report_every else plain
  return partial(carrying, way) if config.rollout.spare_prompts else way


def plain(run: Run, ask: Callable, step: int, examples: rollout.Examples | None = None, **asked: Any) -> pipelining.ArriveFn:
  """Draws all responses to the next prompts, or to given ones."""
  examples = examples or next(run.prompts)
  rollouts = ask(examples, **asked)
  return lambda between: (rollout.Drawn(*rollout.collect(rollouts, run.experiment.task.tokenizer), examples), {})


def streamed(run: Run, ask: Callable, step: int, examples: rollout.Examples | None = None, **asked: Any) -> pipelining.ArriveFn:
  """Draws like `plain`, and scores finished responses while the rest are drawn."""
  examples = examples or next(run.prompts)
  stream, experiment = ask(examples, **asked), run.experiment
  scoring = dict(rewards=experiment.rewards, group_size=run.config.rollout.group_size, call=run.grader)

  def arrive(between: Callable[[], None]) -> tuple[rollout.Drawn, dict[str, float]]:
    drawn, seconds = rollout.follow(stream, examples, experiment.task.tokenizer, between=between, **scoring)
    return drawn, {"perf/reward_overlap_s": seconds}

  return arrive


def new_prompts(run: Run) -> list[Any]:
  """Returns the prompts that a step begins beside the groups that it carries on."""
  section = run.config.rollout
  return [next(run.prompts)[0] for _ in range(section.num_prompts + section.spare_prompts - len(run.carried.examples))]


def carrying(way: Callable[..., pipelining.ArriveFn], run: Run, ask: Callable, step: int) -> pipelining.ArriveFn:
  """Draws until enough groups are complete, starting with those carried over from the last step."""
  section = run.config.rollout
  groups = partial_lib.join(run.carried, new_prompts(run), step=step, group_size=section.group_size)
  arrive_all = way(run, ask, step, groups.examples, requests=partial_lib.requests(groups, num_groups=section.num_prompts))

  def arrive(between: Callable[[], None]) -> tuple[rollout.Drawn, dict[str, float]]:
    drawn, metrics = arrive_all(between)
    rows, run.carried = partial_lib.take(groups, drawn.rollouts, num_groups=section.num_prompts)
    metrics |= partial_lib.metrics(groups, drawn.rollouts, rows, step=step)
    return rollout.select(drawn, rows), metrics

  return arrive


def conversing(run: Run, ask: Callable, step: int) -> pipelining.ArriveFn:
  """Draws conversations with the environment, turn by turn."""
  section, rules, examples = run.config.rollout, run.experiment.talk, next(run.prompts)
  talks = conversations.begin_conversations(
    examples, rules, group_size=section.group_size, max_new_tokens=section.max_new_tokens
  )
  again = lambda requests: ask(examples, requests=requests)
  first, tokenizer = again(conversations.turn_requests(talks, rules)), run.experiment.task.tokenizer

  def arrive(between: Callable[[], None]) -> tuple[rollout.Drawn, dict[str, float]]:
    rollouts, responses = conversations.converse(
      first, talks, again, rules=rules, tokenizer=tokenizer, between=between
    )
    return rollout.Drawn(rollouts, responses, examples), conversations.metrics(rollouts, responses)

  return arrive


def on_engine(run: Run, key: PRNGKeyArray, step: int, draw: int) -> pipelining.ArriveFn:
  """Begins a batch over the decoding engine, each conversation or response at its own pace.

  With spare prompts it is drawn until enough groups are complete, starting with those carried over
  from the last step.
  """
  section, talks, tokenizer = run.config.rollout, run.experiment.talking, run.experiment.task.tokenizer
  groups, group_size = None, section.group_size
  publish(run)
  if section.spare_prompts:
    new = new_prompts(run)
    groups = carried_talks.join(run.carried, new, sequence_seeds(key, len(new) * group_size), step=step)
    job = talks.job(groups.examples, key, group_size=group_size, draws=talks.train)
    job = job._replace(seeds=groups.seeds, begun=groups.talks, enough=section.num_prompts)
  else:
    job = talks.job(next(run.prompts), key, group_size=group_size, draws=talks.train)
  talks.queue.begin(talks.play, job, step, draw)

  def arrive(between: Callable[[], None]) -> tuple[rollout.Drawn, dict[str, float]]:
    gathered = wait_for(talks.queue.playing(step, draw), job, between=between, **grading(run))
    gathered, rows, own = talks.queue.take(gathered, step, draw), np.arange(len(job.seeds)), talks.queue.metrics()
    if groups is not None:
      rows, run.carried = carried_talks.take(groups, gathered.played, num_groups=section.num_prompts)
      own |= carried_talks.metrics(groups, gathered.played, rows, step=step)
    drawn, metrics = drawn_of(gathered, job, tokenizer, rows, prompt_buckets=section.prompt_buckets)
    return drawn, metrics | own

  return arrive


def grading(run: Run) -> dict[str, Any]:
  """Returns what conversations are graded with as they finish; nothing if they are not."""
  return dict(rewards=run.experiment.rewards, call=run.grader) if run.config.rollout.report_every else {}


def refill(run: Run, batch: batch_lib.Batch, step: int) -> tuple[batch_lib.Batch, dict[str, float]]:
  """Draws again, with new prompts and the same weights, until enough groups carry a signal.

  It stops after `rollout.max_refills` refills.

  Returns:
    The step's batch, of the same size as the first one, and its metrics.
  """
  section, batches = run.config.rollout, [batch]
  if not section.max_refills:
    return batch, curriculum_metrics(run)
  signals = [with_signal(run, batch, shaped=False)]
  while np.sum(signals) < section.num_prompts and len(batches) <= section.max_refills:
    drawn, _ = wait(run, launch(run, step, draw=len(batches)), step)
    batches.append(assess(run, drawn))
    signals.append(with_signal(run, batches[-1], shaped=False))
  batch, counters = dynamic_sampling.fill(batches, signals, num_groups=section.num_prompts)
  drawn_tokens = float(sum(np.sum(x.rollouts.mask) for x in batches))
  return batch, counters | {"group/response_tokens_drawn": drawn_tokens} | curriculum_metrics(run)


def evaluate(run: Run, step: int) -> float:
  """Measures the held-out accuracy at an RL step: avg@k at the evaluation's temperature."""
  config, experiment = run.config, run.experiment
  run.phases.begin("eval", step)
  move_weights(run)
  evaluated = held_out.evaluate_policy(
    experiment.eval_draw(sampler_params(run), run.record.rl_steps),
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
