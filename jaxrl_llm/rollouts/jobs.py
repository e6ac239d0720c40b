"""Conversations of a batch, played over the decoding engine, and the rollouts made of them.

A player is whatever holds conversations: the package with an environment's `reset` and `step`, or a
foreign program that draws its turns from the engine by itself. It hands over finished
conversations, each with the very tokens that were drawn:

  job -> play(engine, job) -> conversations, as they finish -> rollouts and completions
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int16, PRNGKeyArray

from jaxrl_llm.decoding.engine import requests
from jaxrl_llm.decoding.engine.requests import Engine, ReplayLost, Request
from jaxrl_llm.messages import one_line
from jaxrl_llm.models.image_slots import Pictures
from jaxrl_llm.rollouts.gallery import Gallery
from jaxrl_llm.tasks.image_prompts import prompt_ids
from jaxrl_llm.text_types import Completion, Tokenizer, Turn
from jaxrl_llm.types import Params, Rollouts, StopReason

PATIENCE_S = 0.1
"""Time after which a caller that waits for conversations may look around, in seconds."""


class EngineError(RuntimeError):
  """The decoding engine has failed, so nothing can be drawn. The message is one line."""


def as_engine_error(error: BaseException) -> BaseException:
  """Returns what a run raises for an error of the engine's thread.

  Errors of the device stay what they are, because a run explains those of its memory.
  """
  if isinstance(error, EngineError | ReplayLost | jax.errors.JaxRuntimeError | MemoryError) or not isinstance(error, Exception):
    return error
  return EngineError(f"the decoding engine: {one_line(error)}")


Examples = Sequence[Mapping[str, Any]]


class Draws(NamedTuple):
  """How the policy's turns are drawn.

  Attributes:
    max_new_tokens: Budget of a conversation behind its prompt, replies included.
    prompt_tokens: Largest number of tokens of a prompt.
    temperature, top_k, top_p: Settings of each turn; see `Request`.
    stop_ids: Ids that end a response.
    stops: Texts that end a response.
    routes: Number of layers and of experts per token of the routes that the engine records, (L, K),
      if rollouts are to have them; else None.
  """

  max_new_tokens: int
  prompt_tokens: int
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  stop_ids: tuple[int, ...] = ()
  stops: tuple[str, ...] = ()
  routes: tuple[int, int] | None = None


class Job(NamedTuple):
  """A batch of conversations to play: N = n·G sequences, G consecutive ones per prompt.

  Attributes:
    examples: One task row per prompt.
    group_size: Number of conversations per prompt (G).
    seeds: Seed of each sequence; see `turn_seed`.
    salt: Text that keeps the batch's cached prefixes apart from those of others; see `Request`.
    draws: Settings of the turns.
    at_once: Number of concurrent conversations, the rows of the engine's cache; None for all.
    begun: Conversations carried over from the previous step, `UNFINISHED` unless they have ended;
      empty if all are new.
    enough: Number of groups that must be complete. The others are cut then (see `cutoff`), and
      handed over as they are; None waits for all.
    pictures: Pictures of each prompt; empty if the task has none.
  """

  examples: Examples
  group_size: int
  seeds: Sequence[int]
  salt: str
  draws: Draws
  at_once: int | None = None
  begun: Sequence["Conversation"] = ()
  enough: int | None = None
  pictures: Sequence[Pictures | None] = ()


class Conversation(NamedTuple):
  """A finished conversation, or one that was cut and goes on in the next step, token by token.

  Sequences of tokens may be arrays, such as views of a sampler's batch.

  Attributes:
    sequence: Number of the sequence in its batch, from 0; its prompt is number `sequence // G`.
    prompt: Ids that the policy read before its first turn, at most `Draws.prompt_tokens`. Empty
      ids stand for those of the task's own prompt.
    tokens: Ids behind the prompt, at most `Draws.max_new_tokens`: the turns that were drawn, with
      the replies between them. The last one is the policy's.
    logprobs: Log-probability of each token under the distribution that it was drawn from; 0 for
      replies.
    written: True for tokens that the policy wrote.
    turns: The policy's turns with their replies and rewards; at least one, unless it failed before
      that. `Turn.end` is an index of `tokens`.
    reason: `TOKEN` or `STRING` if the conversation ended by itself, `LENGTH` if a turn, the budget
      or the number of turns cut it, `ABORTED` if it failed, `UNFINISHED` if it goes on.
    failed: Cause and line, as a pair, if the environment failed, which leaves the conversation
      without a reward; else None. Causes are those of `rewards.outcome.CAUSES`.
    cached_tokens: Number of prompt tokens, summed over turns, whose keys and values were already on
      the device.
    computed_tokens: Number of tokens that passed through the model.
    discarded_tokens: Number of tokens that were drawn behind the cut, and thrown away.
    routes: Experts that the first S ids of prompt and `tokens` visited when they were first fed to
      the model; None if unknown.
    versions: Version of the weights that drew each token, as the number of RL steps behind them,
      and anything for replies; empty if unknown.
    text: Text of a response that is no conversation, and has no turns, or the function that decodes
      its tokens once it is read; None for conversations.
    raw_logprobs: Log-probability of each token under the model itself, for the sampler to continue;
      empty if unknown.
  """

  sequence: int
  prompt: Sequence[int]
  tokens: Sequence[int]
  logprobs: Sequence[float]
  written: Sequence[bool]
  turns: tuple[Turn, ...]
  reason: StopReason
  failed: tuple[str, str] | None = None
  cached_tokens: int = 0
  computed_tokens: int = 0
  discarded_tokens: int = 0
  routes: Int16[np.ndarray, "S L K"] | None = None
  versions: Sequence[int] = ()
  text: str | Callable[[Sequence[int]], str] | None = None
  raw_logprobs: Sequence[float] = ()


@runtime_checkable
class Playing(Protocol):
  """Conversations that are being played by other threads, also while no caller waits for them.

  Iterating yields lists of those that have finished since the last one, in any order, until all
  have, those last that were cut. An empty list means that none has finished for a while, so that
  the caller can do other things. An error of the engine is raised; one that concerns a single
  conversation is its `failed`.
  """

  def __iter__(self) -> Iterator[list[Conversation]]:
    """Returns an iterator, each step of which takes up to about 0.1 s."""
    ...

  def wait(self) -> None:
    """Waits until nothing is drawn any more: all conversations have finished, or one error."""
    ...

  def close(self) -> None:
    """Gives up the conversations that have not finished; may be called more than once."""
    ...


def with_routes(
  earlier: Int16[np.ndarray, "S L K"] | None, later: Int16[np.ndarray, "T L K"] | None
) -> Int16[np.ndarray, "U L K"] | None:
  """Returns the routes of a conversation's first ids, those of an earlier step where it has any.

  Example:
    >>> with_routes(np.zeros((1, 1, 1), np.int16), np.ones((2, 1, 1), np.int16)).tolist()
    [[[0]], [[1]]]
  """
  if earlier is None or later is None:
    return earlier if later is None else later
  return np.concatenate([earlier, later[len(earlier) :]])


PlayFn = Callable[[Engine, Job], Playing]
"""`(engine, job) -> playing`: begins all conversations of a batch and returns at once."""


def sequence_seeds(key: PRNGKeyArray, num_sequences: int) -> list[int]:
  """Returns a 64-bit seed for each sequence of the batch with this key."""
  words = np.asarray(jax.random.key_data(key), np.uint32).tobytes()
  hashed = lambda i: hashlib.blake2b(words + i.to_bytes(8, "little"), digest_size=8).digest()
  return [int.from_bytes(hashed(i), "little") for i in range(num_sequences)]


class Plan(NamedTuple):
  """How the batches of one purpose are drawn: training rollouts, or evaluations.

  Attributes:
    play: Player of a batch.
    draws: Settings of the turns.
    group_size: Number of samples per prompt (G).
    at_once: Number of conversations that the engine keeps; None for all.
    gallery: Pictures of the problems; None if they show none.
  """

  play: PlayFn
  draws: Draws
  group_size: int
  at_once: int | None = None
  gallery: Gallery | None = None

  def job(self, examples: Examples, key: PRNGKeyArray, params: Params) -> Job:
    """Returns the batch with this key; the weights of the learner are read for pictures alone."""
    pictures = () if self.gallery is None else self.gallery.pictures(examples, params)
    seeds, salt = sequence_seeds(key, len(examples) * self.group_size), np.asarray(jax.random.key_data(key), np.uint32).tobytes().hex()
    return Job(examples, self.group_size, seeds, salt, self.draws, at_once=self.at_once, pictures=pictures)


def turn_seed(seed: int, turn: int) -> int:
  """Returns the seed of a request: turn `turn`, from 0, of the sequence with this seed.

  Example:
    >>> turn_seed(1, 0) == turn_seed(1, 0), turn_seed(1, 0) == turn_seed(1, 1)
    (True, False)
  """
  return int.from_bytes(hashlib.blake2b(seed.to_bytes(8, "little") + turn.to_bytes(8, "little"), digest_size=8).digest(), "little")


def request_of(draws: Draws, tokens: Sequence[int], max_tokens: int, **own: Any) -> Request:
  """Returns the request of a turn.

  Args:
    draws: Settings of the turns.
    tokens: Ids that it continues.
    max_tokens: Budget of the turn, in tokens.
    **own: Fields that are the turn's own, such as `seed`, `salt` and `owner`; see `Request`.
  """
  options = dict(temperature=draws.temperature, top_k=draws.top_k, top_p=draws.top_p, stop_ids=draws.stop_ids, stops=draws.stops)
  return Request(tokens, max_tokens, **options, **own)


def stop_reason(tokens: Sequence[int], draws: Draws) -> StopReason:
  """Returns what ended a turn that stopped by itself: a stop token, or a stop text."""
  return StopReason.TOKEN if tokens[-1] in draws.stop_ids else StopReason.STRING


def reason_of(drawn: requests.Decoded, draws: Draws) -> StopReason:
  """Returns why a turn has ended.

  Example:
    >>> [reason_of(requests.Decoded([7], [0.0], reason, 0, 0, 0), Draws(8, 8, stop_ids=(7,))).name for reason in ("stop", "length")]
    ['TOKEN', 'LENGTH']
  """
  if drawn.reason == "stop":
    return stop_reason(drawn.tokens, draws)
  return {"length": StopReason.LENGTH, "aborted": StopReason.ABORTED}[drawn.reason]


def to_rollouts(
  played: Sequence[Conversation], examples: Examples, tokenizer: Tokenizer, *, draws: Draws,
  prompt_buckets: Sequence[int],
) -> tuple[Rollouts, "Responses"]:  # fmt: skip
  """Makes the rollouts and completions of a batch of which all conversations have finished.

  Args:
    played: Conversations, in any order.
    examples: One task row per prompt.
    tokenizer: The task's tokenizer.
    draws: Settings of the turns.
    prompt_buckets: Numbers of prompt slots to choose from.

  Raises:
    ValueError: If a sequence is missing, or one of them does not keep to the sizes.
  """
  played = [x if len(x.tokens) or x.failed is None else _with_a_token(x, tokenizer) for x in sorted(played, key=lambda x: x.sequence)]
  sequences = [conversation.sequence for conversation in played]
  if sequences != list(range(len(played))) or len(played) % len(examples):
    raise ValueError(f"found the conversations {sequences}, expected one for each sequence of {len(examples)} prompts")
  group_size = len(played) // len(examples)
  own = [x.prompt if len(x.prompt) else prompt_ids(examples[x.sequence // group_size], tokenizer) for x in played]
  longest, fitting = max(map(len, own)), sorted(prompt_buckets)
  width = next((bucket for bucket in fitting if bucket >= longest), None)
  if width is None:
    raise ValueError(f"rollout.prompt_buckets: found a prompt of {longest} tokens, expected at most {fitting[-1]}")
  shape = (len(played), draws.max_new_tokens)
  prompts, tokens = np.full((len(played), width), tokenizer.pad_id, np.int32), np.full(shape, tokenizer.pad_id, np.int32)
  prompt_mask, written = np.zeros(prompts.shape, bool), np.zeros(shape, bool)
  logprobs = np.zeros(shape, np.float32)
  versions = np.full(shape, -1, np.int32) if any(len(conversation.versions) for conversation in played) else None
  routing = None if draws.routes is None else np.full((len(played), width + draws.max_new_tokens, *draws.routes), -1, np.int16)
  for row, (one, prompt) in enumerate(zip(played, own, strict=True)):
    size = len(one.tokens)
    is_told = bool(one.turns) or one.text is not None
    if not 0 < size <= draws.max_new_tokens or not len(one.logprobs) == len(one.written) == size or not is_told:
      raise ValueError(
        f"conversation {one.sequence}: found {size} tokens with {len(one.logprobs)} log-probabilities, {len(one.written)} marks and "
        f"{len(one.turns)} turns, expected 1 to {draws.max_new_tokens} of each"
      )
    if len(one.versions) not in (0, size):
      raise ValueError(f"conversation {one.sequence}: found {len(one.versions)} versions of {size} tokens, expected one of each, or none")
    prompts[row, width - len(prompt) :], prompt_mask[row, width - len(prompt) :] = prompt, True
    tokens[row, :size], logprobs[row, :size], written[row, :size] = one.tokens, one.logprobs, one.written
    if routing is not None and one.routes is not None:
      known = one.routes[: len(prompt) + size]
      routing[row, width - len(prompt) : width - len(prompt) + len(known)] = known
    if len(one.versions):
      versions[row, :size] = np.where(one.written, one.versions, -1)
  mask = np.arange(draws.max_new_tokens) < np.array([[len(conversation.tokens)] for conversation in played])
  reasons = np.array([conversation.reason for conversation in played], np.int8)
  stopped = (reasons == StopReason.TOKEN) | (reasons == StopReason.STRING)
  if all(conversation.text is not None for conversation in played):
    written = None  # All tokens are the policy's.
  rollouts = Rollouts(prompts, prompt_mask, tokens, mask, logprobs, stopped, routing, reasons=reasons, written=written, versions=versions)
  return rollouts, Responses(played)


def _with_a_token(conversation: Conversation, tokenizer: Tokenizer) -> Conversation:
  """Returns a conversation that failed before any token with one that the policy did not write."""
  return conversation._replace(tokens=(tokenizer.eos_id,), logprobs=(0.0,), written=(False,), turns=(Turn("", "", 0.0, 0),))


_said = attrgetter("text", "tokens", "written", "turns", "reason", "failed")


class Responses(Sequence[Completion]):
  """Conversations as the rewards see them, each made when it is first read.

  Of several processes each reads what it grades, so that none decodes the texts of all.

  Args:
    conversations: The conversations. What rewards do not see of them is not kept.
  """

  def __init__(self, conversations: Iterable[Conversation]):
    self._of: list[tuple | Completion] = [_said(conversation) for conversation in conversations]

  def __len__(self) -> int:
    """Returns their number."""
    return len(self._of)

  def __getitem__(self, index):
    """Returns a completion, or a list of those of a slice."""
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    if not isinstance(one := self._of[index], Completion):
      one = self._of[index] = _completion(*one)
    return one


def to_completion(conversation: Conversation) -> Completion:
  """Returns a conversation as the rewards see it."""
  return _completion(*_said(conversation))


def _completion(text, tokens, written, turns, reason, failed) -> Completion:
  ids = tuple(np.asarray(tokens, np.int32)[np.asarray(written, bool)].tolist())
  if text is None:
    # It has no turn if it failed before the first one.
    text = turns[-1].text if turns else ""
  else:
    text, turns = text(ids) if callable(text) else text, ()
  return Completion(text, ids, len(ids), reason in (StopReason.TOKEN, StopReason.STRING), turns, failed)
