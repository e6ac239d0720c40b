"""Types of text: completions, reward functions and tokenizers.

Standard library only: tasks, rewards and reward workers must start without JAX, which the arrays
of `types` need.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Turn(NamedTuple):
  """One turn of a conversation with an environment.

  Attributes:
    text: Text that the policy wrote.
    reply: Environment's answer; a tuple if it consists of token ids.
    reward: Reward that the environment gave for the turn.
    end: Index of the turn's last token within the response.
    state: Key of the environment's state in which the turn began; None if it has no keys.
  """

  text: str
  reply: str | tuple[int, ...]
  reward: float
  end: int
  state: str | None = None


class Completion(NamedTuple):
  """One response, as a reward function sees it.

  Attributes:
    text: Decoded response without special tokens; the last turn of a conversation.
    token_ids: Ids of the response including the stop token; those that the policy wrote in a
      conversation.
    num_tokens: Number of tokens in the response. Limits are in tokens, never in characters.
    stopped: Whether the response ended by itself.
    turns: Turns of a conversation with an environment; empty without one.
    failed: Pair (cause, one line) if the environment failed, which leaves the response without a
      reward; else None.
  """

  text: str
  token_ids: tuple[int, ...]
  num_tokens: int
  stopped: bool
  turns: tuple[Turn, ...] = ()
  failed: tuple[str, str] | None = None


RewardFn = Callable[[Completion, Mapping[str, Any]], float]
"""`(completion, example) -> reward`.

`example` is the task's row: `question`, `answer` and further columns.
"""


@runtime_checkable
class Tokenizer(Protocol):
  """A map from text to token ids and back.

  Attributes:
    vocab_size: Number of ids that a model must have.
    pad_id: Id of unused slots; never drawn or learned.
    eos_id: Id that ends a demonstration.
  """

  vocab_size: int
  pad_id: int
  eos_id: int

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end a response."""
    ...

  def encode(self, text: str) -> list[int]:
    """Encodes text and adds nothing around it."""
    ...

  def encode_prompt(self, text: str, slots: Sequence[int] = ()) -> list[int]:
    """Encodes text as a policy reads it, within a chat template if there is one.

    `slots` holds the number of image tokens of each picture.
    """
    ...

  def decode(self, ids: Iterable[Any]) -> str:
    """Decodes ids; never raises."""
    ...
