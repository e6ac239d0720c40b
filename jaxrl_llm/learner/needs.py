"""Optional fields of a batch: which a run computes, and which each program reads.

Each program is compiled for exactly the fields it reads and is given no others.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrl_llm.advantages import estimators
from jaxrl_llm.devices import mesh as mesh_lib
from jaxrl_llm.models.image_slots import Room
from jaxrl_llm.types import Objective, TaughtRows, TrainBatch


def fields_needed(config: ConfigDict, objective: Objective) -> frozenset[str]:
  """Returns the union of what the objective, the advantages and a KL term in the reward read."""
  needs = set(objective.needs) | estimators.of_section(**config.advantage).needs
  if config.reward.kl_coef:
    needs |= {"old_logprobs", "ref_logprobs"}
  if config.teacher.opd_coef:
    needs |= {"old_logprobs"}
  if config.log.gradient_noise_every:
    needs |= {"groups"}
  return frozenset(needs)


def needed_by_step(
  batch: TrainBatch, needs: frozenset[str], *, adaptive_kl: bool, adaptive_entropy: bool = False, echoes: bool = False, taught: bool = False
) -> TrainBatch:
  """Keeps the optional arrays that the policy's update reads.

  Args:
    batch: Batch with every optional array.
    needs: Optional fields that the objective reads.
    adaptive_kl: Whether the coefficient of the KL penalty changes from step to step.
    adaptive_entropy: Whether that of the entropy bonus does.
    echoes: Whether the update imitates replies.
    taught: Whether it compares the policy with a teacher that has prompts of its own.
  """
  return batch._replace(
    ref_logprobs=batch.ref_logprobs if "ref_logprobs" in needs else None,
    kl_coefs=batch.kl_coefs if adaptive_kl and "ref_logprobs" in needs else None,
    entropy_coefs=batch.entropy_coefs if adaptive_entropy else None,
    replies=batch.replies if echoes else None,
    taught=batch.taught if taught else None,
    groups=batch.groups if "groups" in needs else None,
    old_entropy=batch.old_entropy if "old_entropy" in needs else None,
    lag=batch.lag if "lag" in needs else None,
    returns=None,
    old_values=None,
    old_score_norm=None,
  )


def needed_by_critic(batch: TrainBatch, needs: frozenset[str]) -> TrainBatch:
  """Keeps the optional arrays that the critic's update reads.

  Args:
    batch: Batch with every optional array.
    needs: Optional fields that the objective reads.
  """
  groups = batch.groups if "groups" in needs else None
  gone = ("ref_logprobs", "kl_coefs", "entropy_coefs", "sampler_logprobs", "routing", "old_entropy", "replies", "taught", "lag")
  gone += ("old_score_norm",)
  return batch._replace(**dict.fromkeys(gone), groups=groups)


def needed_by_warm_start(batch: TrainBatch) -> TrainBatch:
  """Keeps the optional arrays that imitation reads.

  No policy drew the tokens of a demonstration, and no two demonstrations share a prompt.
  """
  return needed_by_logprobs(batch)._replace(sampler_logprobs=None, routing=None, prefixes=None)


def needed_by_logprobs(batch: TrainBatch) -> TrainBatch:
  """Keeps the optional arrays for passes that only compute log-probabilities or values."""
  gone = ("ref_logprobs", "kl_coefs", "returns", "old_values", "importance", "groups", "old_entropy", "entropy_coefs", "replies", "taught")
  gone += ("lag", "old_score_norm")
  return batch._replace(**dict.fromkeys(gone))


def abstract_batch(
  mesh: Mesh, rows: int, row_tokens: int, *, routes: tuple[int, int] | None = None, shares: bool = False, room: Room | None = None
) -> TrainBatch:
  """Returns a batch with every optional array, as shapes.

  `needed_by_*` drops what a program does not read.

  Args:
    mesh: Mesh of the learner.
    rows: Number of rows (B).
    row_tokens: Number of slots of a row (T).
    routes: Number of layers and of experts per token of replayed routes; None without replay.
    shares: Whether sequences may share a prompt.
    room: Room for pictures in a row; None without any.
  """
  sharding = mesh_lib.token_sharding(mesh)
  ints = jax.ShapeDtypeStruct((rows, row_tokens), jnp.int32, sharding=sharding)
  floats = jax.ShapeDtypeStruct((rows, row_tokens), jnp.float32, sharding=sharding)
  names = ("mask", "advantages", "old_logprobs", "sampler_logprobs", "ref_logprobs", "returns", "old_values")
  names += ("kl_coefs", "old_entropy", "entropy_coefs", "replies")
  routing = None if routes is None else jax.ShapeDtypeStruct((rows, row_tokens, *routes), jnp.int16, sharding=sharding)
  batch = TrainBatch(
    tokens=ints,
    positions=ints,
    segments=ints,
    routing=routing,
    prefixes=ints if shares else None,
    groups=ints,
    lag=ints,
    taught=TaughtRows(ints, ints, ints, ints, ints if shares else None),
    **dict.fromkeys(names, floats),
  )
  if room is None:
    return batch
  placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
  positions = jax.ShapeDtypeStruct((rows, row_tokens, 3), jnp.int32, sharding=sharding)
  return batch._replace(positions=positions, images=jax.tree.map(placed, room.shapes(rows, row_tokens)))
