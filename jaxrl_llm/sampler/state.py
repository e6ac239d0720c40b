"""What the decode loop is made of: settings, what every step reads, and what a step changes."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from jaxrl_llm.sampler import stops
from jaxrl_llm.sampler.requests import RUNNING, Begun
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
  """What a sampler is compiled for; see `decode.make_sampler`."""

  group_size: int
  max_new_tokens: int
  stop_ids: tuple[int, ...]
  pad_id: int
  temperature: float
  top_k: int
  top_p: float
  slots: int | None
  cache_dtype: str
  cache_blocks: tuple[int, ...]
  route_shape: tuple[int, int] | None
  entropy: bool
  stop_table: stops.StopTable | None


class Job(NamedTuple):
  """What every step reads and none changes. Sequences lie in d pieces, one for each device that holds rows, of M − 1 sequences each.

  Attributes:
    weights: as the model decodes with them.
    key: of this call.
    prompts_seen: True where a column of the prompts' cache holds a token; None without one.
    positions: of the last token of each sequence's prompt, the first that is decoded.
    tokens: that token.
    queue: sequences in the order in which they start; M − 1 for none.
    numbers: of each sequence among all: what its random stream is made of.
    limits: most tokens of each response.
    temperatures: None where all have the sampler's.
    min_new_tokens: None where nobody asked.
    begun: None where all start from nothing.
    max_steps: None for as many as it takes.
    enough_groups: None for all of them.
  """

  weights: PyTree
  key: PRNGKeyArray
  prompts_seen: Bool[Array, "n P"] | None
  positions: Int[Array, "d M"]
  tokens: Int[Array, "d M"]
  queue: Int[Array, "d M"]
  numbers: Int[Array, "d M"]
  limits: Int[Array, "d M"]
  temperatures: Float[Array, "d M"] | None
  min_new_tokens: Int[Array, "d M"] | None
  begun: Begun | None
  max_steps: Int[Array, ""] | None
  enough_groups: Int[Array, ""] | None


class Drawn(NamedTuple):
  """What is known of the responses so far; the last sequence of a piece is nobody's.

  Attributes:
    tokens: ids.
    logprobs: of the distribution that each token was drawn from.
    raw_logprobs: of the model itself; None where that is the same.
    entropy: None where nobody asked.
    routing: of the token that was fed to draw each; None where nobody asked.
    lengths: tokens so far.
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
    step: how many there have been.
    written: the step at which each column of the cache was last written.
    cache: the model's.
    sequences: that each row decodes, M − 1 for none.
    lengths: tokens that it has so far.
    tokens: the one to feed next.
    matching: states of the stop automata; None without.
    started: how many sequences of the queue have a row, or had one.
    drawn: the responses.
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
