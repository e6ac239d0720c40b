"""Programs that examine the routes of a mixture of experts."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from jaxrl_llm.devices.compilation import compiled_for
from jaxrl_llm.devices.mesh import token_sharding
from jaxrl_llm.learner.needs import abstract_batch
from jaxrl_llm.models import Model, routing
from jaxrl_llm.types import Metrics


class RoutePrograms(NamedTuple):
  """Additional programs of a run with a mixture of experts.

  Attributes:
    describe: `(routing, segments, sampled, replayed) -> metrics`: use of the experts, distance of
      the routes from the sampler's, and cost of replaying. `sampled` and `replayed` are None if
      there are none.
    compare: `(routing, segments, other) -> fraction of experts that differ`.
    live: `(tokens, segments) -> routing` that selects the live router everywhere, for programs that
      were compiled for replay.
  """

  describe: Callable[..., Metrics]
  compare: Callable[..., Float[Array, ""]]
  live: Callable[..., Int[Array, "B T L K"]]


def make_route_programs(mesh: Mesh, model: Model, learner: ConfigDict, *, replays: bool, records: bool) -> RoutePrograms:
  """Makes the programs that examine the routes, compiled for all declared shapes at once.

  Args:
    mesh: Mesh of the learner.
    model: Model with experts.
    learner: Learner section of the config.
    replays: Whether updates replay routes.
    records: Whether the sampler records routes.
  """
  shape, sparse = model.config, model.config.sparse_layers

  def describe(used, segments, sampled, replayed) -> Metrics:
    metrics = routing.usage(
      used, routing.travelled(segments), num_experts=shape.experts.num_experts, sparse_layers=sparse
    )
    if sampled is not None:
      metrics["moe/expert_change/sampler"] = routing.comparison(used, sampled, segments)
    if replayed is not None:
      metrics |= routing.replay_metrics(replayed, segments, sparse_layers=sparse)
    return metrics

  def compare(before, segments, after) -> Float[Array, ""]:
    return routing.comparison(before, after, segments)

  def live(tokens, segments) -> Int[Array, "B T L K"]:
    del tokens
    return jnp.full((*segments.shape, shape.num_layers, shape.experts.top_k), routing.LIVE, jnp.int16)

  batches = [abstract_batch(mesh, rows, learner.row_tokens, routes=(shape.num_layers, shape.experts.top_k)) for rows in learner.row_buckets]
  given = lambda batch, is_given: batch.routing if is_given else None
  return RoutePrograms(
    describe=compiled_for(jax.jit(describe), [(x.routing, x.segments, given(x, records), given(x, replays)) for x in batches]),
    compare=compiled_for(jax.jit(compare), [(x.routing, x.segments, x.routing) for x in batches]),
    live=compiled_for(jax.jit(live, out_shardings=token_sharding(mesh)), [(x.tokens, x.segments) for x in batches]),
  )
