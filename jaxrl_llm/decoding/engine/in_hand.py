"""State of the engine's loop: open requests, and the stretch that the device draws."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Integer, UInt32

from jaxrl_llm.decoding.engine.pool import Place
from jaxrl_llm.decoding.engine.programs import StretchTokens
from jaxrl_llm.decoding.engine.requests import Decoded, GrammarError, GrammarState, Piece, Request, Score


@dataclass(eq=False)
class OpenRequest:
  """An open request.

  Attributes:
    request: What the caller asked for.
    prompt: Ids of the prompt.
    number: Number of the request among all, in the order in which the loop took them.
    error: What the caller's own function raised; None if nothing.
    on_piece: Function that gets the tokens as they are drawn.
    future: Future of the completion.
    aborted: Whether the caller has aborted it.
    fed: Token ids to prefill before decoding continues: the prompt, and what had been drawn before
      the request last lost its row.
    place: Place in the cache; None while it waits for a row.
    copies: Whether it still has to copy a prefix from another row.
    fills: Whether tokens of `fed` but the last still have to be computed.
    tokens, logprobs: Completion so far.
    kept: Ids that each token was drawn from; None if they are not recorded.
    scores, prompt_scores: Scores so far; see `Decoded`.
    cached, computed: Numbers of tokens; see `Decoded`.
    parts: Versions of the weights that drew the tokens, each with its number of tokens.
    drawn_at: Number of the stretch that drew the last token, or draws the next one.
    grammar: Place in the request's grammar; None without one.
    mask: Ids that the grammar allows to follow, in words of `GrammarState.mask`; None without one.
  """

  request: Request
  prompt: Integer[np.ndarray, " n"]
  on_piece: Callable[[Piece], None] | None
  future: "Future[Decoded]" = field(default_factory=Future)
  aborted: bool = False
  fed: Integer[np.ndarray, " m"] | None = None
  place: Place | None = None
  copies: bool = False
  fills: bool = False
  tokens: list[int] = field(default_factory=list)
  logprobs: list[float] = field(default_factory=list)
  kept: list[list[int]] | None = None
  scores: list[Score] | None = None
  prompt_scores: list[Score] | None = None
  cached: int = 0
  computed: int = 0
  parts: list[tuple[int, int]] = field(default_factory=list)
  drawn_at: int = 0
  number: int = -1
  error: Exception | None = None
  grammar: GrammarState | None = None
  mask: UInt32[np.ndarray, " words"] | None = None

  def begin_grammar(self, num_words: int) -> None:
    """Enters the request's grammar, behind what an earlier request drew of the completion.

    Args:
      num_words: Number of words of a mask.

    Raises:
      GrammarError: If the grammar allows nothing to follow.
    """
    self.grammar, self.mask = self.request.grammar.begin(), np.zeros(num_words, np.uint32)
    self.follow(self.prompt[len(self.prompt) - self.request.drawn :].tolist())

  def follow(self, tokens: Sequence[int]) -> None:
    """Takes drawn tokens in the grammar, and the ids that it allows next.

    Raises:
      GrammarError: If it allows none, or knows more ids than the model.
    """
    for token in tokens:
      self.grammar.advance(token)
    words = self.grammar.mask()
    if len(words) > len(self.mask):
      raise GrammarError(f"grammar: found a mask of {len(words)} words, expected at most {len(self.mask)}")
    # A copy, because the device may read it later, and room for ids that the grammar does not know.
    self.mask = np.pad(words, (0, len(self.mask) - len(words)))
    if not self.mask.any():
      raise GrammarError(f"grammar: allows no token after {len(self.tokens)} of the completion, expected one or more")

  def drew(self, count: int, version: int) -> None:
    """Notes which weights drew the last tokens."""
    if self.parts and self.parts[-1][0] == version:
      self.parts[-1] = version, self.parts[-1][1] + count
    elif count:
      self.parts.append((version, count))

  def waits_for(self, version: int) -> bool:
    """Returns whether only later weights than these may draw the next token."""
    part = self.next_part()
    return self.request.oldest > version or (part is not None and part[0] > version)

  def allowed(self, version: int) -> int:
    """Returns how many tokens these weights may draw next, but for the budget."""
    part = self.next_part()
    return self.request.max_tokens if part is None else part[1] * (part[0] == version)

  def next_part(self) -> tuple[int, int] | None:
    """Returns the version that is to draw the next token, and how many; None if that is open."""
    if not self.request.parts:
      return None
    drawn = len(self.tokens)
    for version, count in self.request.parts:
      if drawn < count:
        return version, count - drawn
      drawn -= count
    return self.request.parts[-1][0], 0


class News(NamedTuple):
  """What callers have brought since the last turn of the loop.

  Attributes:
    requests: New requests, in their order.
    aborted: Numbers of open requests that are to end.
    update: New weights with their version; None if there are none. In a message, the version alone.
    calls: Names of functions that each process runs now, with their arguments.
    holds: Whether no request begins, because new weights wait for those that run.
    is_closing: Whether the loop ends.
  """

  requests: Sequence[Request]
  aborted: Sequence[int] = ()
  update: tuple[Any, int] | None = None
  calls: Sequence[tuple[str, Sequence[Any]]] = ()
  holds: bool = False
  is_closing: bool = False


@runtime_checkable
class Peers(Protocol):
  """Engines of all processes of a run, which take the same turns with the news of one."""

  leads: bool
  """Whether the callers of this process bring the news."""

  calls: dict[str, Callable[..., Any]]
  """Functions of `DecodingEngine.call` by name, with programs of all processes' devices."""

  def tell(self, news: News) -> None:
    """Sends the news of a turn to all others."""
    ...

  def hear(self) -> News | None:
    """Waits for the news of a turn, with the version alone of new weights; None for a while."""
    ...


class Stretch(NamedTuple):
  """A stretch that the device draws.

  Attributes:
    rows: Requests that it draws for.
    columns: Column of each request in the program's output.
    drawn: What it will have drawn.
    version: Version of the weights.
  """

  rows: Sequence[OpenRequest]
  columns: Sequence[int]
  drawn: StretchTokens
  version: int
