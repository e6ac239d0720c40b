"""The data of the decode loop: settings, what every step reads, and what a step changes."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxrl_llm.sampler import stops
from jaxrl_llm.sampler.requests import RUNNING, Requests
from jaxrl_llm.types import Params

NEVER = -(2**30)
"""The step at which a column was written that nobody has written: older than any response."""


@runtime_checkable
class Decoder(Protocol):
  """What the sampler needs of a model; see `models.Model`."""

  mesh: Mesh | None
  prefill: Callable[..., tuple[PyTree, Any]]
  grow: Callable[..., PyTree]
  decoding_weights: Callable[[Params], PyTree]
  resume: Callable[..., PyTree]
  decode: Callable[..., tuple[Float[Array, "B V"], PyTree, Any]]


class Settings(NamedTuple):
  """What a sampler is compiled for: the arguments of `sampler.make_sampler`, as `make_settings` completes them."""

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
  stop_table: stops.StopTable | None = None


class Job(NamedTuple):
  """What every step reads and none changes. Sequences lie in d pieces, one for each device that holds rows, of M − 1 sequences each.

  Attributes:
    weights: Weights in the layout that the model decodes with.
    key: The call's random key.
    prompts_seen: True where a column of the prompts' cache holds a token; None without one.
    positions: Position of the last token of each sequence's prompt, the first that is decoded.
    tokens: That token.
    queue: Sequences in the order in which they start; M − 1 for none.
    numbers: Number of each sequence among all: the seed of its random stream.
    requests: What the caller asked of single sequences, in pieces, with a limit for each.
  """

  weights: PyTree
  key: PRNGKeyArray
  prompts_seen: Bool[Array, "n P"] | None
  positions: Int[Array, "d M"]
  tokens: Int[Array, "d M"]
  queue: Int[Array, "d M"]
  numbers: Int[Array, "d M"]
  requests: Requests


class Drawn(NamedTuple):
  """What is known of the responses so far; the last sequence of a piece is nobody's.

  Attributes:
    logprobs: Log-probabilities under the distribution that each token was drawn from.
    raw_logprobs: Log-probabilities under the model itself; None if these are the same.
    entropy: Entropy of that distribution; None if not asked for.
    routing: Experts visited by the token that was fed to draw each; None if not asked for.
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
  """What a step changes.

  Attributes:
    step: Number of steps so far.
    written: Step at which each column of the cache was last written.
    sequences: Sequence that each row decodes, M − 1 for none.
    lengths: Number of its tokens so far.
    tokens: Token to feed next.
    matching: States of the stop automata; None without any.
    started: Number of sequences of the queue that have or had a row.
  """

  step: Int[Array, ""]
  written: Int[Array, " S"]
  cache: PyTree
  sequences: Int[Array, "d b"]
  lengths: Int[Array, "d b"]
  tokens: Int[Array, "d b"]
  matching: Int[Array, "d b A"] | None
  started: Int[Array, " d"]
  drawn: Drawn


def at(x: Array, index: Int[Array, "d b"]) -> Array:
  """Entries of each piece."""
  return jax.vmap(lambda piece, i: piece[i])(x, index)


def put(x: Array, index: Int[Array, "d b"], value: Array) -> Array:
  """Each piece with other entries."""
  return jax.vmap(lambda piece, i, v: piece.at[i].set(v))(x, index, value)


def is_active(loop: Loop) -> Bool[Array, "d b"]:
  """Which rows have a sequence that is not done."""
  return at(loop.drawn.reasons, loop.sequences) == RUNNING


def hands_over(loop: Loop) -> bool:
  """Whether there are more sequences than rows."""
  return loop.sequences.shape[1] + 1 < loop.drawn.reasons.shape[1]


def num_blocks(settings: Settings, loop: Loop) -> int:
  """How many of the declared blocks the cache has by now."""
  return next(i for i in range(len(settings.cache_blocks) + 1) if sum(settings.cache_blocks[:i]) == len(loop.written))
