"""What a run has its learner do with rollouts: rows, log-probabilities, advantages, updates."""

from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_llm.advantages.estimators import ESTIMATORS
from jaxrl_llm.devices import hosts
from jaxrl_llm.devices.mesh import num_row_shards, place_tokens
from jaxrl_llm.learner import packing
from jaxrl_llm.learner.needs import needed_by_critic, needed_by_logprobs, needed_by_step
from jaxrl_llm.objectives.penalties import adapted_coef, kl_estimate
from jaxrl_llm.rollouts import batch as batch_lib
from jaxrl_llm.rollouts import trajectories
from jaxrl_llm.run.logprobs import add_logprobs, live_routes, reference_of
from jaxrl_llm.run.start import Run
from jaxrl_llm.types import Metrics, TrainBatch


def leave_out(run: Run, batch: batch_lib.Batch) -> batch_lib.Batch:
  """Without the sequences that nothing is to be learned from; they stay in the batch, and none of their tokens counts."""
  skips, whole = run.config.reward.overlong_filter, ESTIMATORS[run.config.advantage.estimator].whole_groups
  return batch._replace(counted=batch_lib.counted(batch, skips_truncated=skips, whole_groups=whole))


def arrange(run: Run, sequences: list[packing.Trajectory], **options: Any) -> packing.Layout:
  """Rows for the sequences of one update; a prompt lies there once for all of its responses."""
  learner = run.config.learner
  options = dict(row_buckets=learner.row_buckets, share_prompts=learner.share_prompts) | options
  return packing.arrange(sequences, row_tokens=learner.row_tokens, num_shards=num_row_shards(run.experiment.mesh), **options)


def with_logprobs(run: Run, batch: TrainBatch, step: int) -> tuple[TrainBatch, Metrics]:
  """The batch with what the learner says of it before its updates, and metrics of its routes."""
  return add_logprobs(
    run.experiment,
    run.config,
    batch,
    params=run.state.params,
    reference=reference_of(run.experiment, run.state.params, run.reference),
    critic=None if run.critic is None else run.critic.params,
    measures_routes=measures_routes(run, step),
  )


def measures_routes(run: Run, step: int) -> bool:
  """Whether an RL step measures how the experts change."""
  every = run.config.moe.measure_every
  return every > 0 and step % every == 0


def add_credit(
  run: Run, batch: batch_lib.Batch, layouts: list[packing.Layout], placed: list[TrainBatch]
) -> tuple[batch_lib.Batch, list[TrainBatch], dict[str, float]]:
  """Advantages and value targets, for the rollout batch and for its packed mini-batches; and what is logged of them."""
  config, experiment, needs = run.config, run.experiment, run.experiment.needs

  def lifted(read):
    """A packed array of every mini-batch, back as one array a sequence."""
    arrays = hosts.to_host([read(x) for x in placed])
    return [x for array, layout in zip(arrays, layouts, strict=True) for x in packing.lift(array, layout)]

  in_reward, coef, metrics = config.reward.kl_coef > 0, run.record.kl_coef, {}
  evidence = trajectories.evidence(
    batch,
    rewards=experiment.rewards,
    step_rewards=experiment.task.step_rewards if "step_rewards" in needs and experiment.talk is None else None,
    turn_weight=config.environment.weight if "step_rewards" in needs and experiment.talk is not None else None,
    kl=partial(kl_estimate, estimator=config.reward.kl_estimator or "k1") if in_reward else None,
    kl_coef=coef if in_reward else 0.0,
    old_logprobs=lifted(lambda x: x.old_logprobs) if in_reward else None,
    ref_logprobs=lifted(lambda x: x.ref_logprobs) if in_reward else None,
    values=lifted(lambda x: x.old_values) if run.critic is not None else None,
  )
  if in_reward:
    mean = float(np.sum(evidence.kl * evidence.mask) / max(np.sum(evidence.mask), 1))
    metrics |= {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": coef}
  credit = jax.device_get(experiment.credit(evidence))
  metrics |= {name: float(x) for name, x in credit.metrics.items()}

  def laid(responses):
    """Per-token values of the responses, in the rows of every mini-batch."""
    sequences, start = trajectories.whole_sequences(responses, batch.rollouts), 0
    for layout in layouts:
      yield place_tokens(experiment.mesh, packing.lay(sequences[start : start + len(layout.rows)], layout))
      start += len(layout.rows)

  placed = [x._replace(advantages=found) for x, found in zip(placed, laid(credit.advantages), strict=True)]
  if credit.returns is not None:
    placed = [x._replace(returns=found) for x, found in zip(placed, laid(credit.returns), strict=True)]
  return batch._replace(advantages=credit.advantages), placed, metrics


def update(run: Run, batch: TrainBatch, step: int) -> dict[str, jax.Array]:
  """One update of the policy, and of the critic where there is one; in the critic's warm-up, of the critic alone."""
  config, experiment, metrics = run.config, run.experiment, {}
  measured = None
  if measures_routes(run, step):
    measured = needed_by_logprobs(batch._replace(routing=live_routes(experiment, config, batch)))
    before = experiment.learner.logprobs(run.state.params, measured).routing
  if run.critic is not None:
    run.critic, metrics = experiment.learner.critic.step(run.critic, needed_by_critic(batch))
  if run.critic is None or step >= (config.critic.value_warmup_steps or 0):
    adaptive_kl = config.kl.target is not None
    if adaptive_kl:
      coefs = np.full(batch.tokens.shape, run.record.kl_coef, np.float32)
      batch = batch._replace(kl_coefs=place_tokens(experiment.mesh, coefs))
    batch = needed_by_step(batch, experiment.objective.needs, adaptive_kl=adaptive_kl)
    run.state, policy_metrics = experiment.learner.rl_step(run.state, batch)
    metrics |= policy_metrics
  if measured is not None:
    after = experiment.learner.logprobs(run.state.params, measured).routing
    metrics["moe/expert_change/update"] = experiment.learner.routes.compare(before, batch.segments, after)
  return metrics


def token_scores(run: Run, layouts: list[packing.Layout], placed: list[TrainBatch]) -> list[dict[str, np.ndarray]]:
  """What the policy says after a step's updates of each token of the step's sequences, for the viewer: by name, prompt included."""
  needs, found = run.experiment.objective.needs, []
  for batch in placed:
    found.append(run.experiment.learner.token_scores(run.state.params, needed_by_step(batch, needs, adaptive_kl=False)))
  rows = []
  for arrays, layout in zip(hosts.to_host(found), layouts, strict=True):
    lifted = {name: packing.lift(array, layout) for name, array in arrays._asdict().items()}
    rows += [{name: x[i] for name, x in lifted.items()} for i in range(len(layout.rows))]
  return rows


def adapt_kl(run: Run, row: dict[str, Any]) -> None:
  """Moves an adaptive coefficient towards its target, by the divergence that the step has shown."""
  config = run.config
  if config.kl.target is None:
    return
  found = row.get("actor/reward_kl_penalty" if config.reward.kl_coef else "actor/ref_kl")
  if found is None:  # The critic trained alone: the policy has not moved.
    return
  num_sequences = config.rollout.num_prompts * config.rollout.group_size
  run.record.kl_coef = adapted_coef(
    run.record.kl_coef, found, target=config.kl.target, horizon=config.kl.horizon or 10_000, num_sequences=num_sequences
  )
