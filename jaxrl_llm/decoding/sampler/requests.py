"""Per-sequence requests to the sampler: limits, temperatures and responses to continue."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree, UInt32

from jaxrl_llm.decoding.stops import RUNNING
from jaxrl_llm.types import Rollouts, StopReason


class Partial(NamedTuple):
  """Partial responses: returned by an earlier call of the sampler and continued by this one.

  Attributes:
    tokens: Token ids, padded on the right.
    lengths: Number of tokens that each response already has.
    logprobs: Log-probabilities under the policies that drew the tokens; returned unchanged.
    raw_logprobs: Log-probabilities under the models themselves; returned unchanged.
    reasons: `StopReason` of each response that is already complete and only passes through;
      `RUNNING` or `UNFINISHED` for the others.
    routing: Routes of the token before each one, as in `Rollouts.routing` from the prompt's last
      token on; None if not recorded.
    entropy: Entropy of the distribution that each token was drawn from; None if not recorded.
  """

  tokens: Int[Array, "N R"]
  lengths: Int[Array, " N"]
  logprobs: Float[Array, "N R"]
  raw_logprobs: Float[Array, "N R"]
  reasons: Int[Array, " N"]
  routing: Int[Array, "N R L K"] | None = None
  entropy: Float[Array, "N R"] | None = None


def to_partial(rollouts: Rollouts) -> Partial:
  """Converts rollouts of an earlier call on the same prompts to partial responses to continue."""
  size = rollouts.tokens.shape[1]
  routing = None if rollouts.routing is None else rollouts.routing[:, -size - 1 : -1]
  lengths = rollouts.mask.sum(axis=1).astype(jnp.int32)
  return Partial(
    rollouts.tokens, lengths, rollouts.logprobs, rollouts.raw_logprobs, rollouts.reasons, routing=routing, entropy=rollouts.entropy
  )


def no_partial(num_sequences: int, max_new_tokens: int, routes: tuple[int, int] | None = None) -> Partial:
  """Makes N empty responses as NumPy arrays; `routes` is (L, K) if the sampler records routes."""
  shape = (num_sequences, max_new_tokens)
  return Partial(
    tokens=np.zeros(shape, np.int32),
    lengths=np.zeros(num_sequences, np.int32),
    logprobs=np.zeros(shape, np.float32),
    raw_logprobs=np.zeros(shape, np.float32),
    reasons=np.full(num_sequences, RUNNING, np.int8),
    routing=None if routes is None else np.full((*shape, *routes), -1, np.int16),
  )


class Requests(NamedTuple):
  """Settings of single sequences, G consecutive ones per prompt; None means the sampler's own.

  Attributes:
    seeds: Seed of each response in two words, from which its draws follow; see
      `draw.sequence_keys`.
    limits: Maximum number of tokens of each response, at most the sampler's `max_new_tokens`.
    temperatures: Temperatures of at least 0; 0 is greedy.
    min_new_tokens: Length before which stop tokens cannot be drawn and stop strings do not count.
    partial: Responses to continue.
    max_steps: Maximum number of steps of the loop. Sequences not finished by then are returned as
      `StopReason.UNFINISHED`.
    enough_groups: Number of prompts with all samples complete at which the loop ends, with the same
      effect as `max_steps`.
  """

  seeds: UInt32[Array, "N 2"] | None = None
  limits: Int[Array, " N"] | None = None
  temperatures: Float[Array, " N"] | None = None
  min_new_tokens: Int[Array, " N"] | None = None
  partial: Partial | None = None
  max_steps: Int[Array, ""] | None = None
  enough_groups: Int[Array, ""] | None = None


def seeded(key: PRNGKeyArray, num_sequences: int) -> Requests:
  """Makes requests of N sequences with random seeds."""
  return Requests(jax.random.bits(key, (num_sequences, 2), jnp.uint32))


def check_requests(requests: Requests, num_sequences: int, max_new_tokens: int) -> None:
  """Checks that requests are for N sequences and responses for a budget of R tokens.

  Raises:
    ValueError: If there are no seeds, or the shape of a field is wrong.

  Example:
    >>> check_requests(Requests(jnp.zeros((8, 2), jnp.uint32), limits=jnp.array([3, 4])), 8, 16)
    Traceback (most recent call last):
    ...
    ValueError: requests.limits: found shape (2,) for 8 sequences, expected (8,); give one entry \
per sequence, G in a row for each prompt
  """
  if requests.seeds is None or requests.seeds.shape != (num_sequences, 2):
    shape = None if requests.seeds is None else requests.seeds.shape
    expected = (num_sequences, 2)
    raise ValueError(f"requests.seeds: found {shape} for {num_sequences} sequences, expected the shape {expected}, two words each")
  fields = {name: getattr(requests, name) for name in ("limits", "temperatures", "min_new_tokens")}
  if requests.partial is not None:
    fields |= {f"partial.{name}": x for name, x in requests.partial._asdict().items()}
  for name, x in fields.items():
    if x is None:
      continue
    expected = (num_sequences, max_new_tokens)[
      : 1 if name in ("partial.lengths", "partial.reasons") or "." not in name else 2
    ]
    if x.shape[:2] != expected:
      raise ValueError(
        f"requests.{name}: found shape {x.shape} for {num_sequences} sequences, expected {expected}; give one entry per sequence, "
        "G in a row for each prompt"
      )


def finished_before(requests: Requests, num_sequences: int) -> Int[Array, " N"]:
  """Returns each sequence's stop reason before the first step: `RUNNING` if it is not complete."""
  if requests.partial is None:
    return jnp.full((num_sequences,), RUNNING, jnp.int32)
  reasons = jnp.asarray(requests.partial.reasons, jnp.int32)
  return jnp.where(reasons == StopReason.UNFINISHED, RUNNING, reasons)


def split_into_shards(tree: PyTree, num_shards: int) -> PyTree:
  """Splits arrays [N ...] into [num_shards, N / num_shards + 1, ...] and keeps scalars as they are.

  The last sequence of a shard is a dummy for rows without a sequence.
  """

  def split(x: Array) -> Array:
    if not jnp.ndim(x):
      return x
    x = x.reshape(num_shards, -1, *x.shape[1:])
    return jnp.concatenate([x, jnp.zeros_like(x[:, :1])], axis=1)

  return jax.tree.map(split, tree)


def merge_shards(x: Array) -> Array:
  """Inverts `split_into_shards` for one array."""
  return x[:, :-1].reshape(-1, *x.shape[2:])
