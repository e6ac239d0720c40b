"""Data of the decode loop: its settings, the inputs of every step and the state it updates."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt32

from jaxrl_llm.decoding.sampler.requests import Requests
from jaxrl_llm.decoding.stops import RUNNING, Matching, StopTable
from jaxrl_llm.types import Params

NEVER = -(2**30)
"""Write step of a column that was never written: older than any response."""


@runtime_checkable
class Decoder(Protocol):
  """The interface that the sampler needs from a model; implemented by `models.Model`."""

  mesh: Mesh | None
  prefill: Callable[..., tuple[PyTree, Any]]
  grow: Callable[..., PyTree]
  decoding_weights: Callable[[Params], PyTree]
  resume: Callable[..., PyTree]
  map_prompts: Callable[..., PyTree]
  decode: Callable[..., tuple[Float[Array, "B V"], PyTree, Any]]
  whole_rows: Callable[[Array], Array]


class Settings(NamedTuple):
  """Settings that a sampler is compiled for: `make_sampler`'s, completed by `make_settings`."""

  group_size: int
  max_new_tokens: int
  stop_ids: tuple[int, ...]
  pad_id: int
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  slots: int | None = None
  cache_dtype: str | None = None
  cache_blocks: tuple[int, ...] | None = None
  route_shape: tuple[int, int] | None = None
  entropy: bool = False
  stop_table: StopTable | None = None


class Inputs(NamedTuple):
  """Inputs that every step reads and none changes.

  Sequences are split into d shards, one per device that holds rows, of M − 1 sequences each. What
  belongs to sequences or prompts changes between steps if shards exchange them; see `exchange`.

  Attributes:
    weights: Weights in the layout that the model decodes with.
    prompts_seen: True where a column of the prompts' cache holds a token; None without a cache.
    positions: Position of the last token of each sequence's prompt, the first to be decoded.
    tokens: Last token of each sequence's prompt.
    queue: Sequences in the order in which they start; M − 1 for none.
    numbers: Index of each sequence among all N.
    keys: Data of each sequence's key; see `draw.sequence_keys`.
    requests: Requests of the caller, in shards, with a limit for each sequence. Of partial
      responses only tokens and lengths are kept, and no seeds.
  """

  weights: PyTree
  prompts_seen: Bool[Array, "n P"] | None
  positions: Int[Array, "d M"]
  tokens: Int[Array, "d M"]
  queue: Int[Array, "d M"]
  numbers: Int[Array, "d M"]
  keys: UInt32[Array, "d M W"]
  requests: Requests


class Outputs(NamedTuple):
  """Responses so far, in shards; the last sequence of a shard is a dummy.

  Attributes:
    tokens: Token ids, padded on the right.
    logprobs: Log-probabilities under the distribution that each token was drawn from.
    raw_logprobs: Log-probabilities under the model itself; None if these are the same.
    entropy: Entropy of the distribution that each token was drawn from; None if not recorded.
    routing: Experts visited by the token that was fed to draw each one; None if not recorded.
    lengths: Number of tokens of each response.
    reasons: `RUNNING`, or a `StopReason`.
  """

  tokens: Int[Array, "d M R"]
  logprobs: Float[Array, "d M R"]
  raw_logprobs: Float[Array, "d M R"] | None
  entropy: Float[Array, "d M R"] | None
  routing: Int[Array, "d M R L K"] | None
  lengths: Int[Array, "d M"]
  reasons: Int[Array, "d M"]


class Loop(NamedTuple):
  """State that a step updates.

  Attributes:
    step: Number of steps so far.
    written: Step at which each column of the cache was last written.
    cache: Keys and values of the prompts and of the rows' responses.
    sequences: Sequence that each row decodes; M − 1 for none.
    lengths: Number of tokens of each row's sequence so far.
    tokens: Token that each row feeds next.
    matching: Bits of the stop strings that the rows' responses end with; see `stops`.
    started: Number of sequences at the head of each queue that have or had a row.
    outputs: Responses so far.
  """

  step: Int[Array, ""]
  written: Int[Array, " S"]
  cache: PyTree
  sequences: Int[Array, "d b"]
  lengths: Int[Array, "d b"]
  tokens: Int[Array, "d b"]
  matching: Matching
  started: Int[Array, " d"]
  outputs: Outputs


def gather(x: Array, index: Int[Array, "d b"]) -> Array:
  """Gathers entries of each shard."""
  return jax.vmap(lambda shard, i: shard[i])(x, index)


def scatter(x: Array, index: Int[Array, "d b"], value: Array) -> Array:
  """Replaces entries of each shard."""
  return jax.vmap(lambda shard, i, v: shard.at[i].set(v))(x, index, value)


def is_active(loop: Loop) -> Bool[Array, "d b"]:
  """Returns which rows have a sequence that is not done."""
  return gather(loop.outputs.reasons, loop.sequences) == RUNNING


def refills(loop: Loop) -> bool:
  """Returns whether rows are refilled, because there are more sequences than rows."""
  return loop.sequences.shape[1] + 1 < loop.outputs.reasons.shape[1]


def exchanges(loop: Loop) -> bool:
  """Returns whether shards exchange sequences: there are several, and some sequences wait."""
  return loop.sequences.shape[0] > 1 and refills(loop)


def num_blocks(settings: Settings, loop: Loop) -> int:
  """Returns the number of declared blocks that the cache has so far."""
  return next(i for i in range(len(settings.cache_blocks) + 1) if sum(settings.cache_blocks[:i]) == len(loop.written))
