"""One conversation of a foreign program: its requests are drawn, and its trace becomes tokens."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.decoding.engine import requests
from jaxrl_llm.decoding.engine.requests import Engine, Piece
from jaxrl_llm.messages import one_line
from jaxrl_llm.pretrained.chat_messages import Messages, following_ids, opening_ids, split_calls
from jaxrl_llm.pretrained.tool_calls import ToolCall
from jaxrl_llm.rollouts.cutting import Cutting
from jaxrl_llm.rollouts.playing import Conversation, Draws, reason_of, request_of, stop_reason, turn_seed, with_routes
from jaxrl_llm.text_types import Tokenizer, Turn
from jaxrl_llm.types import StopReason

_TOLERANCE = 1e-5


class Refused(Exception):
  """A request that is not drawn, because the conversation is over. Its text is for the program."""


class Drawn(NamedTuple):
  """What the program is told of a turn.

  Attributes:
    prompt: Ids that the policy read.
    tokens, logprobs: Ids that it drew, with their log-probabilities.
    text: Text of the turn without calls of tools.
    calls: Calls of tools.
    stopped: Whether it ended its turn by itself.
    is_bridged: Whether it read exactly the ids so far, and then the new messages.
  """

  prompt: list[int]
  tokens: list[int]
  logprobs: list[float]
  text: str
  calls: list[ToolCall]
  stopped: bool
  is_bridged: bool


class Table(NamedTuple):
  """What the conversations of a batch share.

  Attributes:
    engine: Engine that draws.
    draws: Settings of the draws.
    salt: Salt of the requests.
    tokenizer: The task's tokenizer.
    max_turns: Largest number of the policy's turns.
    max_turn_tokens: Largest number of tokens of a turn; None for the rest of the budget.
  """

  engine: Engine
  draws: Draws
  salt: str
  tokenizer: Tokenizer
  max_turns: int
  max_turn_tokens: int | None = None


class Talk:
  """A conversation in progress. All of it belongs to the thread of the event loop.

  Attributes:
    traces: Traces that verifiers has begun for it.
    failed: Cause and line, as a pair, if it cannot be learned from; else None.
    is_cut: Whether a turn or the budget was cut.
    is_open: Whether a turn is being drawn.
    idle_since: Time at which the program had its last answer.
    broken: Error of the engine; None if it works.
    drawn: Number of tokens that were drawn in this step.
    flying: Number of tokens of the turn in progress that have been drawn.
    is_parked: Whether the cut of the batch leaves nothing to do.

  Args:
    sequence: Number of the sequence in its batch.
    seed: Seed of the sequence.
    table: What the conversations share.
    begun: The conversation as far as an earlier step has got with it; None for a new one. The
      program is told its turns again, and must answer as it did.
    cutting: Cut of the batch; None if there is none.
    parked: Function that is told when the cut leaves nothing to do.
  """

  def __init__(
    self,
    sequence: int,
    seed: int,
    table: Table,
    *,
    begun: Conversation | None = None,
    cutting: Cutting | None = None,
    parked: Callable[["Talk"], None] = lambda talk: None,
  ):
    self.sequence, self.seed, self.table = sequence, seed, table
    self.begun, self._cutting, self._parked = begun, cutting, parked
    self.drawn = self.flying = 0
    self.is_parked, self.routes = False, None
    self.prompt: list[int] = []
    self.tokens: list[int] = []
    self.logprobs: list[float] = []
    self.written: list[bool] = []
    self.turns: list[Turn] = []
    self.tools: Messages = ()
    self.traces: list[Any] = []
    self.reason = StopReason.LENGTH
    self.failed: tuple[str, str] | None = None
    self.is_cut = self.is_open = False
    self.cached = self.computed = 0
    self.idle_since = time.monotonic()
    self.broken: BaseException | None = None

  def fail(self, cause: str, line: str) -> None:
    """Says why the conversation cannot be learned from; the first reason counts."""
    self.failed = self.failed or (cause, f"the environment: {line}")

  async def draw(self, messages: Messages, tools: Messages, known: list[int] | None, num_new: int, limit: int | None) -> Drawn:
    """Draws a turn.

    Args:
      messages: All messages of the conversation, as the program sends them.
      tools: Tools that it offers.
      known: Ids of the conversation up to its last turn, as verifiers knows them; None if the
        messages do not continue it.
      num_new: Number of messages behind them.
      limit: Number of tokens that the program wants at most; None for any.

    Raises:
      Refused: If the conversation is over.
    """
    if self.failed or self.is_cut or self.is_open or self.broken or self.is_parked:
      if self.is_open:
        self.fail("rewritten", "it asked for two turns at once")
      raise Refused("maximum context length: the conversation is over")
    if len(self.turns) == self.table.max_turns:
      self._cut("max_turns")
    draws, tokenizer = self.table.draws, self.table.tokenizer
    try:
      reply = self._reply(messages, tools, known, num_new)
    except ValueError as error:
      self.fail("raised", one_line(error))
      raise Refused(one_line(error)) from error
    if not self.turns and len(self.prompt) > draws.prompt_tokens:
      self.fail("too_long", f"found a prompt of {len(self.prompt)} tokens, expected at most {draws.prompt_tokens} (rollout.prompt_buckets)")
      raise Refused("maximum context length")
    room = draws.max_new_tokens - len(self.tokens) - len(reply)
    if room < 1:
      self._cut("max_total_tokens")
    tokens, logprobs, is_whole = self._earlier(reply)
    self._append(reply, [0.0] * len(reply), False)
    before = [*self.prompt, *self.tokens]
    self._append(tokens, logprobs, True)
    stopped = is_whole
    if is_whole:
      self.reason = stop_reason(tokens, draws)
    else:
      for most in (self.table.max_turn_tokens, limit):
        room = room if most is None else min(room, most)
      self.reason = await self._ask(max(room - len(tokens), 1), len(tokens))
      stopped = self.reason != StopReason.LENGTH
      tokens, logprobs = self.tokens[len(before) - len(self.prompt) :], self.logprobs[len(before) - len(self.prompt) :]
    if not stopped:
      self._cut("max_output_tokens", is_refused=False)
    text = tokenizer.decode(tokens)
    self.turns.append(Turn(text, "", 0.0, len(self.tokens) - 1))
    content, calls = split_calls(text, tools, tokenizer)
    return Drawn(before, list(tokens), list(logprobs), content, calls if stopped else [], stopped, len(self.turns) > 1)

  def _earlier(self, reply: list[int]) -> tuple[list[int], list[float], bool]:
    """Returns what an earlier step has drawn of the current turn, and whether that is all of it."""
    begun, start, number = self.begun, len(self.tokens), len(self.turns)
    if begun is None or start >= len(begun.tokens):
      return [], [], False
    first, is_whole = start + len(reply), number < len(begun.turns)
    stop = begun.turns[number].end + 1 if is_whole else len(begun.tokens)
    is_same = list(begun.tokens[start:first]) == reply and not any(begun.written[start:first]) and all(begun.written[first:stop])
    if not is_same or (not number and self.prompt != list(begun.prompt)):
      what = f"replied to turn {number} in another way" if number else "began in another way"
      self.fail("rewritten", f"asked again, it {what}")
      raise Refused("the conversation is over")
    return list(begun.tokens[first:stop]), list(begun.logprobs[first:stop]), is_whole

  def park(self) -> None:
    """Notes that the cut of the batch leaves nothing to do."""
    self.is_parked = True
    self._parked(self)

  def _reply(self, messages: Messages, tools: Messages, known: list[int] | None, num_new: int) -> list[int]:
    """Returns the ids behind those so far; for the first turn none, and it sets the prompt."""
    if not self.turns:
      self.prompt, self.tools = opening_ids(messages, tools, self.table.tokenizer), tools
      return []
    new = messages[len(messages) - num_new :]
    continues = known == [*self.prompt, *self.tokens] and tools == self.tools
    if not continues or not new or any(message["role"] in ("assistant", "system") for message in new):
      self.fail("rewritten", f"turn {len(self.turns) + 1} does not continue the conversation that the policy has read and written")
      raise Refused("this policy continues one conversation, to which only messages of tools and of the user are added")
    text = "\n".join(str(message.get("content") or "") for message in new)
    self.turns[-1] = self.turns[-1]._replace(reply=text)
    return following_ids(new, self.table.tokenizer, is_ended=self.reason == StopReason.TOKEN)

  def _cut(self, condition: str, *, is_refused: bool = True) -> None:
    """Ends the conversation as verifiers' own limits do: its program may fail, and it is scored."""
    self.is_cut = True
    if is_refused:
      self.traces[-1].stop(condition)
      raise Refused("maximum context length")

  def _append(self, ids: Sequence[int], logprobs: Sequence[float], is_own: bool) -> None:
    self.tokens += ids
    self.logprobs += logprobs
    self.written += [is_own] * len(ids)

  async def _ask(self, room: int, own: int) -> StopReason:
    """Draws the rest of a turn, of which `own` tokens are there; returns why it ended."""
    draws = self.table.draws
    if self._bound() is not None and self.drawn >= self._bound():
      self.park()
      raise Refused("the conversation goes on later")
    turn = dict(seed=turn_seed(self.seed, len(self.turns)), salt=self.table.salt, owner=str(self.seed), drawn=own)
    request = request_of(draws, [*self.prompt, *self.tokens], room, **turn)
    self.is_open, handle, self.flying = True, None, 0

    def note(piece: Piece) -> None:
      self.flying += len(piece.tokens)
      if self._bound() is not None and self.drawn + self.flying >= self._bound() and handle is not None:
        handle.abort()

    try:
      while handle is None:
        try:
          handle = self.table.engine.submit(request, note)
        except requests.QueueFull:
          await asyncio.sleep(0.05)
      drawn = await asyncio.wrap_future(handle.completion)
      self._append(drawn.tokens, drawn.logprobs, True)
      self.cached, self.computed = self.cached + drawn.cached_tokens, self.computed + drawn.computed_tokens
      self.drawn, self.flying = self.drawn + len(drawn.tokens), 0
      if drawn.tokens and draws.routes is not None:
        self.routes = drawn.routes
      if self._bound() is not None and self.drawn >= self._bound() + (drawn.reason != "aborted"):
        self.park()  # Behind the cut.
        raise Refused("the conversation goes on later")
      if drawn.reason == "aborted":
        raise RuntimeError("the decoding engine was closed while conversations were drawn")
      return reason_of(drawn, draws)
    except Refused:
      raise
    except asyncio.CancelledError:
      if handle is not None:
        handle.abort()
      raise
    except FloatingPointError as error:
      self.drawn, self.flying = self.drawn + self.flying, 0  # The clock has seen them.
      self.failed = self.failed or ("not_finite", f"the policy: {one_line(error)}")
      raise Refused(one_line(error)) from error
    # What is wrong with the engine concerns all conversations.
    except BaseException as error:
      self.broken = error
      raise Refused(one_line(error)) from error
    finally:
      self.is_open, self.idle_since = False, time.monotonic()

  def _bound(self) -> int | None:
    return None if self._cutting is None else self._cutting.bound

  def finished(self, episode: Any) -> Conversation:
    """Returns the conversation of an episode that has ended, or of None if it was given up."""
    if not self.failed:
      self._judge(episode)
    if self.tokens and not self.written[-1]:  # A reply behind which nothing was drawn.
      keep = self.turns[-1].end + 1
      self.tokens, self.logprobs, self.written = self.tokens[:keep], self.logprobs[:keep], self.written[:keep]
    return self.conversation(StopReason.ABORTED if self.failed else StopReason.LENGTH if self.is_cut else self.reason)

  def conversation(self, reason: StopReason) -> Conversation:
    """Returns the conversation as it is."""
    prompt = self.prompt[: self.table.draws.prompt_tokens]
    parts = map(list, (self.tokens, self.logprobs, self.written))
    routes = with_routes(None if self.begun is None else self.begun.routes, self.routes)
    counts = dict(cached_tokens=self.cached, computed_tokens=self.computed, routes=routes)
    return Conversation(self.sequence, prompt, *parts, tuple(self.turns), reason, self.failed, **counts)

  def _judge(self, episode: Any) -> None:
    """Takes the reward of an episode, or says why it has none."""
    trace = self.traces[-1] if self.traces else None
    errors = [*episode.errors, *(trace.errors if trace else ())]
    if episode.is_timeout or (trace is not None and trace.is_timeout):
      return self.fail("timeout", "it exceeded a time limit of its own")
    if not episode.ok:
      cause = "too_long" if self.is_cut else "raised"
      last = f"{errors[-1].type}: {errors[-1].message}" if errors else "it did not finish"
      return self.fail(cause, one_line(("it failed when its conversation reached its budget; " if self.is_cut else "") + last))
    if len(self.traces) != 1 or not self.turns:
      return self.fail("rewritten", f"found {len(self.traces)} conversations of {len(self.turns)} turns, expected one of at least one turn")
    self._check_tokens(trace)
    if not math.isfinite(trace.reward):
      return self.fail("not_finite", f"found the reward {trace.reward}, expected a finite number")
    self.is_cut = self.is_cut or trace.is_truncated
    self.turns[-1] = self.turns[-1]._replace(reward=float(trace.reward))

  def _check_tokens(self, trace: Any) -> None:
    """Checks that a trace holds what was drawn, token by token."""
    drawn, branches = [*self.prompt, *self.tokens], trace.branches
    if len(branches) != 1:
      return self.fail("rewritten", f"found {len(branches)} branches of the conversation, expected one")
    ids, own = branches[0].token_ids, branches[0].sampled_mask
    mask = [False] * len(self.prompt) + self.written
    if ids != drawn or own != mask:
      return self.fail("rewritten", f"its trace holds {len(ids)} ids, and {len(drawn)} were read and drawn, which are not the same")
    apart = np.abs(np.subtract(branches[0].logprobs, [0.0] * len(self.prompt) + self.logprobs)).max(initial=0.0)
    if not apart <= _TOLERANCE:
      self.fail("rewritten", f"its trace's log-probabilities differ by {apart:.3g} from those drawn, expected at most {_TOLERANCE:g}")
