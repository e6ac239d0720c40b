"""What a client asks of the engine, what it gets, and why a request is refused. Starts no JAX."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int16, UInt32

from jaxrl_llm.models.image_slots import Pictures
from jaxrl_llm.types import Params


@runtime_checkable
class GrammarState(Protocol):
  """Place of one completion in its grammar."""

  def mask(self) -> UInt32[np.ndarray, " words"]:
    """Returns the ids that may come next: bit i of word w, from the lowest, stands for 32 w + i."""
    ...

  def advance(self, token: int) -> None:
    """Takes the next token of the completion."""
    ...


@runtime_checkable
class Grammar(Protocol):
  """A set of completions, to which draws are limited token by token."""

  def begin(self) -> GrammarState:
    """Returns the state of an empty completion."""
    ...


class Request(NamedTuple):
  """One completion to draw.

  Attributes:
    tokens: Ids of the prompt, or of the whole conversation so far.
    max_tokens: Budget of the completion, in tokens.
    temperature: Temperature of the draw; 0 takes the likeliest token.
    top_k: Number of likeliest tokens to keep; 0 keeps all.
    top_p: Probability mass of likeliest tokens to keep; 1 keeps all.
    stop_ids: Ids that end the completion. The stop token is kept.
    stops: Texts that end the completion. Their last token is kept.
    seed: Seed of the draws. Equal requests with equal seeds draw equal tokens, whatever else runs.
    salt: Text that keeps cached prefixes apart: a request reads only those of its own salt.
    owner: Text that requests of one conversation have in common. Where a prompt repeats what an
      earlier request drew, its keys and values are read only by requests of the same owner, and
      computed anew by others: what a request draws is then the same to the last bit, whatever was
      in the cache.
    drawn: Number of the last ids of `tokens` that an earlier request with this seed drew: its
      completion goes on, also within a stop string.
    order: Place among the requests that wait: those of the lowest order get rows first, and among
      equals the one that has waited for longest.
    oldest: Oldest version of the weights that may draw it; it waits for them.
    parts: Versions that draw it, with the number of tokens that each draws, as in
      `Decoded.parts`, so that an earlier draw is repeated whenever new weights come. It waits
      for each of them. Empty leaves it open.
    rereads: Whether it may read cached keys and values of tokens that earlier requests of this
      owner drew. Otherwise it computes them anew, as a prompt: its draw is then the same to the
      last bit whether they are still cached or not.
    pictures: Pictures that the first of `tokens` show; None if all of them are text.
    likeliest: Number of likeliest tokens to return with the score of each drawn token; None for no
      scores.
    prompt_likeliest: Number of likeliest tokens to return with the score of each token of the
      prompt; None for no scores. All of the prompt is then computed, whatever is cached.
    min_tokens: Number of tokens before which no stop id is drawn.
    grammar: Grammar of the completion, which allows a stop id where it may end; None for no limits.
      It is obeyed in the engine's own process: no connection to another one carries it.
  """

  tokens: Sequence[int]
  max_tokens: int
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  stop_ids: tuple[int, ...] = ()
  stops: tuple[str, ...] = ()
  seed: int = 0
  salt: str = ""
  owner: str = ""
  drawn: int = 0
  order: int = 0
  oldest: int = 0
  parts: Sequence[tuple[int, int]] = ()
  rereads: bool = True
  pictures: Pictures | None = None
  likeliest: int | None = None
  prompt_likeliest: int | None = None
  min_tokens: int = 0
  grammar: Grammar | None = None

  @property
  def cache_salt(self) -> str:
    """Text that keeps cached prefixes apart: the salt, and the digest of the pictures."""
    return self.salt if self.pictures is None else f"{self.salt} {self.pictures.key.hex()}"


class Score(NamedTuple):
  """What the policy thinks of a token.

  For a token of a prompt, and at temperature 0, that is the distribution of the model as it is;
  otherwise the one that the token was drawn from.

  Attributes:
    logprob: Log-probability of the token.
    rank: Place of the token among all, from 1.
    likeliest: Likeliest ids with their log-probabilities, in descending order.
  """

  logprob: float
  rank: int
  likeliest: list[tuple[int, float]]


class Piece(NamedTuple):
  """Tokens of a completion, in the order of their draw.

  Attributes:
    tokens: Ids.
    logprobs: Log-probability of each id under the distribution that it was drawn from.
    version: Version of the weights that drew them; None if it is not known.
    scores: Scores of the ids; None if the request asks for none.
  """

  tokens: list[int]
  logprobs: list[float]
  version: int | None = None
  scores: list[Score] | None = None


class Decoded(NamedTuple):
  """A finished completion.

  Attributes:
    tokens: Ids, with the stop token if there is one.
    logprobs: Log-probability of each id under the distribution that it was drawn from.
    reason: "stop" after a stop token or stop string, "length" at the budget, "aborted" by the
      caller.
    cached_tokens: Number of prompt tokens whose keys and values were already on the device.
    computed_tokens: Number of tokens that passed through the model for this request.
    version: Version of the weights that drew the first token.
    parts: Versions of the weights that drew the tokens, with the number of tokens that each drew,
      in the order of the draw.
    routes: Experts that each of the S tokens of prompt and completion but the last visited, -1 in
      layers without experts; None if the engine records none.
    kept: Ids that the filters left to draw each token from; None if the engine does not record
      them, or if the request has neither a filter nor a grammar.
    scores: Scores of the ids; None if the request asks for none.
    prompt_scores: Scores of the ids of the prompt but the first; None if the request asks for none.
  """

  tokens: list[int]
  logprobs: list[float]
  reason: str
  cached_tokens: int
  computed_tokens: int
  version: int
  parts: tuple[tuple[int, int], ...] = ()
  routes: Int16[np.ndarray, "S L K"] | None = None
  kept: list[list[int]] | None = None
  scores: list[Score] | None = None
  prompt_scores: list[Score] | None = None


class QueueFull(Exception):
  """The engine has as many open requests as it takes."""


class GrammarError(ValueError):
  """A grammar has failed, or allows no token to follow. One line."""


class ReplayLost(Exception):
  """A request cannot be drawn again as it was, because its weights are no longer there."""


class Pulse(NamedTuple):
  """What an engine has done since it was made.

  Attributes:
    open: Number of open requests.
    calls: Number of programs that it has run.
    idle_s: Time without any request, in seconds.
    age_s: Time since it was made, in seconds.
  """

  open: int
  calls: int
  idle_s: float
  age_s: float


@runtime_checkable
class Pulsing(Protocol):
  """An engine that reports what it has done."""

  def pulse(self) -> Pulse:
    """Returns what the engine has done so far."""
    ...


class EngineCounts(NamedTuple):
  """Requests and tokens of an engine: those that it has now, and all since it was made.

  Attributes:
    running: Number of requests that have a row.
    waiting: Number of open requests that have none.
    rows: Number of rows.
    ended: Number of requests that have ended, by the reason of `Decoded` or "error".
    prompt_tokens: Number of tokens of the prompts whose completions have begun.
    cached_tokens: Number of those whose keys and values were already on the device.
    drawn_tokens: Number of tokens drawn.
  """

  running: int
  waiting: int
  rows: int
  ended: Mapping[str, int]
  prompt_tokens: int
  cached_tokens: int
  drawn_tokens: int


@runtime_checkable
class Counting(Protocol):
  """An engine that counts requests and tokens."""

  def counts(self) -> EngineCounts:
    """Returns the counts at once, in any thread: they may be those of different moments."""
    ...


class EngineLimits(NamedTuple):
  """Limits of an engine, in tokens and requests.

  Attributes:
    context: Largest number of tokens of a prompt and its completion together.
    requests: Largest number of open requests, those that wait included.
    likeliest: Largest number of likeliest tokens in a score; 0 if the engine gives no scores.
  """

  context: int
  requests: int
  likeliest: int = 0


class Handle(NamedTuple):
  """An accepted request.

  Attributes:
    completion: Future of the completion. It raises what broke the engine.
    abort: Function that ends the request soon, with reason "aborted". Any thread may call it, and
      more than once.
  """

  completion: "Future[Decoded]"
  abort: Callable[[], None]


@runtime_checkable
class Engine(Protocol):
  """The decoding loop that all requests share. Its methods may be called from any thread."""

  limits: EngineLimits

  def submit(self, request: Request, on_piece: Callable[[Piece], None] | None = None) -> Handle:
    """Accepts a request.

    Args:
      request: Completion to draw.
      on_piece: Function that gets the tokens as they are drawn, in the engine's own thread. It must
        return at once.

    Raises:
      ValueError: If the request can never be served. One line, which names the field.
      QueueFull: If too many requests are open.
    """
    ...

  def update(self, params: Params, version: int) -> None:
    """Takes new weights, between two stretches of steps.

    Requests that arrive from now on read no keys and values of older weights. Those that are open
    go on with the new ones; what becomes of their own keys and values is a setting of the engine.

    Args:
      params: New weights, read once: they may be donated after the call.
      version: Number that no other weights have.
    """
    ...

  def close(self) -> None:
    """Aborts all requests and ends the loop."""
    ...
