"""What the learner says of a packed batch before its updates: log π_old, log π_ref, values, and the routes that updates are to replay."""

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm import models
from jaxrl_llm.experiment import Experiment
from jaxrl_llm.mesh import place_rows
from jaxrl_llm.needs import needed_by_score
from jaxrl_llm.routing import LIVE
from jaxrl_llm.types import Metrics, Params, TrainBatch


def add_scores(
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
    params: the weights that sampled.
    reference: of π_ref; None where nobody reads it.
    critic: the critic's weights; None without one.
    measures_routes: whether to look at the routes although nobody replays them.

  Returns:
    The batch, with `routing` the routes that updates replay; and metrics of the routes, empty for a dense model.
  """
  needs, replay, sampled = experiment.needs, config.moe.replay, batch.routing
  batch = batch._replace(routing=sampled if replay == "R3" else None)
  bare = needed_by_score(batch._replace(routing=sampled if replay == "R3" else live_routes(experiment, config, batch)))
  metrics: Metrics = {}
  # With one update per rollout the ratio starts and ends at 1, and in float32 the sampler is exact: the pass would buy nothing.
  in_float32 = {config.model.dtype, config.model.sampler_dtype or config.model.dtype} == {"float32"}
  exact = config.learner.updates_per_rollout == 1 and in_float32 and "sampler_logprobs" not in needs
  rescored = config.learner.old_logprobs == "learner" and "old_logprobs" in needs and not exact
  if rescored or replay == "R2" or measures_routes:
    scores = experiment.score(params, bare)
    if rescored:
      batch = batch._replace(old_logprobs=scores.logprobs)
    if replay == "R2":
      batch = batch._replace(routing=scores.routing)
    if experiment.routes is not None:
      metrics = experiment.routes.describe(scores.routing, batch.segments, sampled, batch.routing)
  if reference is not None:
    bare = bare._replace(routing=live_routes(experiment, config, batch))
    batch = batch._replace(ref_logprobs=experiment.score(reference, bare).logprobs)
  if critic is not None:
    batch = batch._replace(old_values=experiment.critic.score(critic, bare._replace(routing=None)))
  return batch, metrics


def reference_of(experiment: Experiment, params: Params, frozen: Params | None) -> Params | None:
  """The weights of π_ref: the frozen copy, or the base under the adapters; None where nobody reads it.

  Args:
    experiment: whose model it is.
    params: of the policy.
    frozen: the copy, where there is one.
  """
  if "ref_logprobs" in experiment.needs and experiment.model.config.lora is not None:
    return models.reference(params)
  return frozen


def live_routes(experiment: Experiment, config: ConfigDict, batch: TrainBatch) -> jax.Array | None:
  """No recorded routes, in the shape that programs which replay were compiled for; None where nothing is ever replayed."""
  shape = experiment.model.config
  if shape.experts is None or config.moe.replay is None:
    return None
  routes = np.full((*batch.tokens.shape, shape.num_layers, shape.experts.top_k), LIVE, np.int16)
  return place_rows(experiment.mesh, routes)
