"""What the learner says of a packed batch before its updates: log π_old, log π_ref, values, and the routes that updates are to replay."""

import jax
from ml_collections import ConfigDict

from jaxrl_llm import models
from jaxrl_llm.learner.needs import needed_by_logprobs
from jaxrl_llm.run.experiment import Experiment
from jaxrl_llm.types import Metrics, Params, TrainBatch


def add_logprobs(
  experiment: Experiment,
  config: ConfigDict,
  batch: TrainBatch,
  *,
  params: Params,
  reference: Params | None,
  critic: Params | None,
  measures_routes: bool,
) -> tuple[TrainBatch, Metrics]:
  """Adds what somebody reads, and nothing else.

  Args:
    experiment: its programs.
    config: checked.
    batch: packed and placed; `routing` is the sampler's, where it recorded any.
    params: of the learner before the step's updates; they sampled, unless the sampler lags.
    reference: of π_ref; None where nobody reads it.
    critic: the critic's weights; None without one.
    measures_routes: whether to look at the routes although nobody replays them.

  Returns:
    The batch, with `routing` the routes that updates replay; and metrics of the routes, empty for a dense model.
  """
  needs, replay, sampled = experiment.needs, config.moe.replay, batch.routing
  batch = batch._replace(routing=sampled if replay == "R3" else None)
  bare = needed_by_logprobs(batch)
  metrics: Metrics = {}
  # With one update per rollout the ratio starts and ends at 1, and in float32 the sampler is exact: the pass would buy nothing.
  of_sampler = config.model.sampler_dtype or config.model.dtype
  in_float32 = {config.model.dtype, of_sampler, config.rollout.cache_dtype or of_sampler} == {"float32"}
  is_current = config.rollout.staleness == 0 and config.rollout.spare_prompts == 0
  exact = config.learner.updates_per_rollout == 1 and is_current and in_float32 and "sampler_logprobs" not in needs
  recomputed = config.learner.old_logprobs == "learner" and "old_logprobs" in needs and not exact
  if recomputed or replay == "R2" or measures_routes:
    own = experiment.learner.logprobs(params, bare)
    if recomputed:
      batch = batch._replace(old_logprobs=own.logprobs)
    if replay == "R2":
      batch = batch._replace(routing=own.routing)
    if experiment.learner.routes is not None:
      metrics = experiment.learner.routes.describe(own.routing, batch.segments, sampled, batch.routing)
  if reference is not None:
    bare = bare._replace(routing=live_routes(experiment, config, batch))
    batch = batch._replace(ref_logprobs=experiment.learner.logprobs(reference, bare).logprobs)
  if critic is not None:
    batch = batch._replace(old_values=experiment.learner.critic.values(critic, bare._replace(routing=None)))
  return batch, metrics


def reference_of(experiment: Experiment, params: Params, frozen: Params | None) -> Params | None:
  """The weights of π_ref: the frozen copy, or the base under the adapters; None where nobody reads it.

  Args:
    experiment: whose model it is.
    params: of the policy.
    frozen: the copy, where there is one.
  """
  if "ref_logprobs" in experiment.needs and experiment.learner.model.config.lora is not None:
    return models.reference(params)
  return frozen


def live_routes(experiment: Experiment, config: ConfigDict, batch: TrainBatch) -> jax.Array | None:
  """No recorded routes, for a pass that was compiled to replay the sampler's (R3); None where it never replays."""
  return experiment.learner.routes.live(batch.tokens, batch.segments) if config.moe.replay == "R3" else None
