"""The interface of an environment, which reads the policy's turns and replies."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.text_types import Completion

State = Any
"""An environment's state of one conversation: plain values, never changed in place."""


class Reply(NamedTuple):
  """An environment's reply to one turn of the policy.

  Attributes:
    text: Text that the policy reads next, or its token ids, which are used unchanged.
    reward: Reward of the turn.
    done: Whether the conversation has ended. The text is then ignored.
  """

  text: str | tuple[int, ...] = ""
  reward: float = 0.0
  done: bool = False


class Environment(NamedTuple):
  """The policy's partner in multi-turn conversations.

  Both functions are pure except for the programs that they may run. A turn ends with a stop token
  or one of the texts in `stops`. After a stop token the reply is a separate message, written with
  the checkpoint's chat template if there is one. After a text of `stops` it continues the policy's
  own message, as the output of a tool.

  Attributes:
    reset: `(task row) -> state` before the first turn.
    step: `(state, turn) -> (state, reply)`; the turn is a `Completion` of this turn alone.
    stops: Texts that end a turn, in addition to those that end a response.
    replies: Regular expression whose group 1 is the environment's part of a transcript, which
      demonstrations show but the policy does not imitate; None if there is none.
    state_key: Function `state -> text`, by which estimators that compare turns know those of one
      prompt that begin in the same state. None is the whole conversation so far.
    shares_opening: Number of consecutive samples of a prompt whose first turn is the same, as those
      that try to solve one proposed problem; 1 if each sample has its own.
    concurrency: Maximum number of concurrent steps; None is no limit.
    problems: `seeds -> rows`, the environment's own problems, for the task `environment`. A row has
      `question`, which its prompt shows, its `seed`, and whatever `reset` reads. None if there are
      none.
    player: Function `(rules, tokenizer) -> play` for environments that hold their conversations by
      themselves, of which neither `reset` nor `step` is called; see `playing.PlayFn`. None for
      others.

  Example:
    >>> from jaxrl_llm.text_types import Completion
    >>> echo = Environment(reset=lambda row: 0, step=lambda n, turn: (n + 1, Reply(f"{n}: {turn.text}", done=n == 1)))
    >>> echo.step(echo.reset({}), Completion("hello", (), 1, True))
    (1, Reply(text='0: hello', reward=0.0, done=False))
  """

  reset: Callable[[Mapping[str, Any]], State]
  step: Callable[[State, Completion], tuple[State, Reply]]
  stops: tuple[str, ...] = ()
  replies: str | None = None
  state_key: Callable[[State], str] | None = None
  shares_opening: int = 1
  concurrency: int | None = None
  problems: Callable[[Sequence[int]], list[dict[str, Any]]] | None = None
  player: Callable[[Any, Any], Callable[..., Any]] | None = None
