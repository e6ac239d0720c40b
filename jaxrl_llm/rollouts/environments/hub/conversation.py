"""One conversation of a foreign program: its requests are drawn, and its trace becomes tokens."""

import asyncio
import contextlib
import math
import time
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.decoding.engine import requests
from jaxrl_llm.messages import one_line
from jaxrl_llm.pretrained.chat_messages import Messages, following_ids, opening_ids, split_calls
from jaxrl_llm.pretrained.tool_calls import ToolCall
from jaxrl_llm.rollouts.drafts import Draft, Drafts
from jaxrl_llm.rollouts.jobs import stop_reason
from jaxrl_llm.rollouts.rules import Rules
from jaxrl_llm.text_types import Tokenizer, Turn
from jaxrl_llm.types import StopReason

_TOLERANCE = 1e-5


class TurnRefused(Exception):
  """A request that is not drawn, because the conversation is over. Its text is for the program."""


class ProgramTurn(NamedTuple):
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


class ProgramConversation:
  """A conversation in progress. All of it belongs to the thread of the event loop.

  The program is told the turns of earlier steps again, and must answer as it did.

  Attributes:
    draft: What was said.
    traces: Traces that verifiers has begun for it.
    is_cut: Whether a turn or the budget was cut.
    idle_since: Time at which the program had its last answer.
    broken: Error of the engine; None if it works.

  Args:
    draft: What was said.
    drafts: The batch that it belongs to.
    rules: Rules of the conversations.
    tokenizer: The task's tokenizer.
  """

  def __init__(self, draft: Draft, drafts: Drafts, *, rules: Rules, tokenizer: Tokenizer):
    self.draft, self._drafts, self._rules, self._tokenizer = draft, drafts, rules, tokenizer
    self.tools: Messages = ()
    self.traces: list[Any] = []
    self.reason = StopReason.LENGTH
    self.is_cut = False
    self.idle_since = time.monotonic()
    self.broken: BaseException | None = None

  def fail(self, cause: str, line: str) -> None:
    """Says why the conversation cannot be learned from; the first reason counts."""
    self.draft.failed = self.draft.failed or (cause, f"the environment: {line}")

  async def draw(self, messages: Messages, tools: Messages, known: list[int] | None, num_new: int, limit: int | None) -> ProgramTurn:
    """Draws a turn.

    Args:
      messages: All messages of the conversation, as the program sends them.
      tools: Tools that it offers.
      known: Ids of the conversation up to its last turn, as verifiers knows them; None if the
        messages do not continue it.
      num_new: Number of messages behind them.
      limit: Number of tokens that the program wants at most; None for any.

    Raises:
      TurnRefused: If the conversation is over.
    """
    draft, draws, rules = self.draft, self._drafts.job.draws, self._rules
    if draft.failed or self.is_cut or draft.is_open or self.broken or draft.ended:
      if draft.is_open:
        self.fail("rewritten", "it asked for two turns at once")
      raise TurnRefused("maximum context length: the conversation is over")
    if len(draft.turns) == rules.max_turns:
      self._cut("max_turns")
    try:
      reply = self._reply(messages, tools, known, num_new)
    except ValueError as error:
      self.fail("raised", one_line(error))
      raise TurnRefused(one_line(error)) from error
    if not draft.turns and len(draft.prompt) > draws.prompt_tokens:
      size, draft.prompt = len(draft.prompt), draft.prompt[: draws.prompt_tokens]
      self.fail("too_long", f"found a prompt of {size} tokens, expected at most {draws.prompt_tokens} (rollout.prompt_buckets)")
      raise TurnRefused("maximum context length")
    room = draws.max_new_tokens - len(draft.tokens) - len(reply)
    if room < 1:
      self._cut("max_total_tokens")
    tokens, logprobs, is_whole = self._earlier(reply)
    draft.append(reply)
    start = len(draft.tokens)
    draft.append(tokens, logprobs)
    if is_whole:
      self.reason = stop_reason(tokens, draws)
    else:
      room = min(most for most in (room, rules.max_turn_tokens, limit) if most is not None)
      self.reason = await self._ask(max(room - len(tokens), 1), len(tokens))
      tokens, logprobs = draft.tokens[start:], draft.logprobs[start:]
    stopped = self.reason != StopReason.LENGTH
    if not stopped:
      self._cut("max_output_tokens", is_refused=False)
    text = self._tokenizer.decode(tokens)
    draft.turns.append(Turn(text, "", 0.0, len(draft.tokens) - 1))
    content, calls = split_calls(text, tools, self._tokenizer)
    before = [*draft.prompt, *draft.tokens[:start]]
    return ProgramTurn(before, tokens, logprobs, content, calls if stopped else [], stopped, len(draft.turns) > 1)

  def _earlier(self, reply: list[int]) -> tuple[list[int], list[float], bool]:
    """Returns what an earlier step has drawn of the current turn, and whether that is all of it."""
    begun, start, number = self.draft.begun, len(self.draft.tokens), len(self.draft.turns)
    if start >= len(begun.tokens):
      return [], [], False
    first, is_whole = start + len(reply), number < len(begun.turns)
    stop = begun.turns[number].end + 1 if is_whole else len(begun.tokens)
    is_same = list(begun.tokens[start:first]) == reply and not any(begun.written[start:first]) and all(begun.written[first:stop])
    if not is_same or (not number and self.draft.prompt != list(begun.prompt)):
      what = f"replied to turn {number} in another way" if number else "began in another way"
      self.fail("rewritten", f"asked again, it {what}")
      raise TurnRefused("the conversation is over")
    return list(begun.tokens[first:stop]), list(begun.logprobs[first:stop]), is_whole

  def _reply(self, messages: Messages, tools: Messages, known: list[int] | None, num_new: int) -> list[int]:
    """Returns the ids behind those so far; for the first turn none, and it sets the prompt."""
    draft, tokenizer = self.draft, self._tokenizer
    if not draft.turns:
      draft.prompt, self.tools = opening_ids(messages, tools, tokenizer), tools
      return []
    new = messages[len(messages) - num_new :]
    continues = known == [*draft.prompt, *draft.tokens] and tools == self.tools
    if not continues or not new or any(message["role"] in ("assistant", "system") for message in new):
      self.fail("rewritten", f"turn {len(draft.turns) + 1} does not continue the conversation that the policy has read and written")
      raise TurnRefused("this policy continues one conversation, to which only messages of tools and of the user are added")
    text = "\n".join(str(message.get("content") or "") for message in new)
    draft.turns[-1] = draft.turns[-1]._replace(reply=text)
    return following_ids(new, tokenizer, is_ended=self.reason == StopReason.TOKEN)

  def _cut(self, condition: str, *, is_refused: bool = True) -> None:
    """Ends the conversation as verifiers' own limits do: its program may fail, and it is scored."""
    self.is_cut = True
    if is_refused:
      self.traces[-1].stop(condition)
      raise TurnRefused("maximum context length")

  async def _ask(self, room: int, own: int) -> StopReason:
    """Draws the rest of a turn, of which `own` tokens are there; returns why it ended."""
    draft, handle = self.draft, None
    try:
      while handle is None:
        try:
          handle = self._drafts.ask(draft, room, own=own)
        except requests.QueueFull:
          await asyncio.sleep(0.05)
        if draft.ended:
          raise TurnRefused("the conversation goes on later")
      with contextlib.suppress(FloatingPointError):  # `take` notes it.
        await asyncio.wrap_future(handle.completion)
      reason = self._drafts.take(draft, handle.completion)
      if reason is None:
        raise TurnRefused("the conversation goes on later")
      if reason == StopReason.ABORTED:
        raise TurnRefused(draft.failed[1])
      return reason
    except TurnRefused:
      raise
    except asyncio.CancelledError:
      if handle is not None:
        handle.abort()
      raise
    # What is wrong with the engine concerns all conversations.
    except BaseException as error:
      self.broken = error
      raise TurnRefused(one_line(error)) from error
    finally:
      draft.is_open, self.idle_since = False, time.monotonic()

  def judge(self, episode: Any) -> StopReason:
    """Takes the reward of an episode that has ended, or says why it has none; returns why it ended.

    Args:
      episode: The episode; None if it was given up.
    """
    if not self.draft.failed:
      self._judge(episode)
    return StopReason.LENGTH if self.is_cut else self.reason

  def _judge(self, episode: Any) -> None:
    turns, trace = self.draft.turns, self.traces[-1] if self.traces else None
    errors = [*episode.errors, *(trace.errors if trace else ())]
    if episode.is_timeout or (trace is not None and trace.is_timeout):
      return self.fail("timeout", "it exceeded a time limit of its own")
    if not episode.ok:
      cause = "too_long" if self.is_cut else "raised"
      last = f"{errors[-1].type}: {errors[-1].message}" if errors else "it did not finish"
      return self.fail(cause, one_line(("it failed when its conversation reached its budget; " if self.is_cut else "") + last))
    if len(self.traces) != 1 or not turns:
      return self.fail("rewritten", f"found {len(self.traces)} conversations of {len(turns)} turns, expected one of at least one turn")
    self._check_tokens(trace)
    if not math.isfinite(trace.reward):
      return self.fail("not_finite", f"found the reward {trace.reward}, expected a finite number")
    self.is_cut = self.is_cut or trace.is_truncated
    turns[-1] = turns[-1]._replace(reward=float(trace.reward))

  def _check_tokens(self, trace: Any) -> None:
    """Checks that a trace holds what was drawn, token by token."""
    draft, branches = self.draft, trace.branches
    drawn = [*draft.prompt, *draft.tokens]
    if len(branches) != 1:
      return self.fail("rewritten", f"found {len(branches)} branches of the conversation, expected one")
    ids, own = branches[0].token_ids, branches[0].sampled_mask
    mask = [False] * len(draft.prompt) + draft.written
    if ids != drawn or own != mask:
      return self.fail("rewritten", f"its trace holds {len(ids)} ids, and {len(drawn)} were read and drawn, which are not the same")
    apart = np.abs(np.subtract(branches[0].logprobs, [0.0] * len(draft.prompt) + draft.logprobs)).max(initial=0.0)
    if not apart <= _TOLERANCE:
      self.fail("rewritten", f"its trace's log-probabilities differ by {apart:.3g} from those drawn, expected at most {_TOLERANCE:g}")
