"""Which optional fields of a batch a run computes, and which each program reads: it is compiled for exactly these, and given no others."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm.advantages.estimators import ESTIMATORS
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.types import Objective, TrainBatch


def fields_needed(config: ConfigDict, objective: Objective) -> frozenset[str]:
  """The union of what the objective, the advantages and a divergence in the reward read."""
  needs = set(objective.needs) | ESTIMATORS[config.advantage.estimator].needs
  if config.reward.kl_coef:
    needs |= {"old_logprobs", "ref_logprobs"}
  return frozenset(needs)


def needed_by_step(batch: TrainBatch, needs: frozenset[str], *, adaptive_kl: bool) -> TrainBatch:
  """The batch with the optional arrays that the policy's update reads, given the needs of the objective.

  With `adaptive_kl` the coefficient of its KL penalty changes from step to step.
  """
  return batch._replace(
    ref_logprobs=batch.ref_logprobs if "ref_logprobs" in needs else None,
    kl_coefs=batch.kl_coefs if adaptive_kl and "ref_logprobs" in needs else None,
    returns=None,
    old_values=None,
  )


def needed_by_critic(batch: TrainBatch) -> TrainBatch:
  """As `needed_by_step`, for the critic's update."""
  return batch._replace(ref_logprobs=None, kl_coefs=None, sampler_logprobs=None, routing=None)


def needed_by_warm_start(batch: TrainBatch) -> TrainBatch:
  """As `needed_by_step`, for imitation: no policy drew these tokens, and no two share a prompt."""
  return needed_by_logprobs(batch)._replace(sampler_logprobs=None, routing=None, prefixes=None)


def needed_by_logprobs(batch: TrainBatch) -> TrainBatch:
  """As `needed_by_step`, for passes that only compute log-probabilities or values."""
  return batch._replace(ref_logprobs=None, kl_coefs=None, returns=None, old_values=None)


def abstract_batch(mesh: Mesh, rows: int, row_tokens: int, *, routes: tuple[int, int] | None = None, shares: bool = False) -> TrainBatch:
  """A batch with every optional array, as shapes; `needed_by_*` takes off what a program does not read.

  `routes` are the layers and the experts a token of replayed routes, and None where none are; with `shares` sequences may share a prompt.
  """
  sharding = mesh_lib.token_sharding(mesh)
  ints = jax.ShapeDtypeStruct((rows, row_tokens), jnp.int32, sharding=sharding)
  floats = jax.ShapeDtypeStruct((rows, row_tokens), jnp.float32, sharding=sharding)
  names = ("mask", "advantages", "old_logprobs", "sampler_logprobs", "ref_logprobs", "returns", "old_values", "kl_coefs")
  routing = None if routes is None else jax.ShapeDtypeStruct((rows, row_tokens, *routes), jnp.int16, sharding=sharding)
  prefixes = ints if shares else None
  return TrainBatch(tokens=ints, positions=ints, segments=ints, routing=routing, prefixes=prefixes, **dict.fromkeys(names, floats))
