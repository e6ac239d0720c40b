"""A row of the reward registry, and a reward as plain data that another process can build."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.rewards.plain_numbers import answer_key


class RewardSpec(NamedTuple):
  """A reward function as plain data.

  Unlike a function, it can be pickled, written as JSON and compared. `build_reward` makes the
  function.

  Attributes:
    name: Key of `REWARDS`.
    settings: Settings of the reward: plain numbers, text, lists and mappings.
  """

  name: str
  settings: Mapping[str, Any] = {}


class Reward(NamedTuple):
  """A row of `REWARDS`: the function and its metadata.

  Attributes:
    judge: Reward function, or factory that makes one from its settings.
    is_factory: Whether `judge` is a factory.
    extract: Function `(text, ...) -> answer` that returns the answer `judge` compares, for a
      majority vote. It returns None or "" if the text states no answer. Its further parameters are
      `question`, if it reads the row's question, and settings of the reward, by name. None for a
      reward that does not judge an answer.
    vote: Function `(answer) -> key`. Answers with the same key are votes for the same answer.
    is_safe: Whether a call can neither hang nor crash on any response. All other rewards are called
      in processes that may be killed.
    imports: Modules that a worker loads before its first call, so that their import time does not
      count against the first deadline.
    deadline_s: Function `(settings) -> seconds` that returns the time limit of a call in a worker.
      None uses the limit of the pool.
    section: Config section with the reward's settings. None if all are in `config.reward.settings`.
  """

  judge: Callable[..., Any]
  is_factory: bool = True
  extract: Callable[..., str | None] | None = None
  vote: Callable[[str], str] = answer_key
  is_safe: bool = False
  imports: tuple[str, ...] = ()
  deadline_s: Callable[[Mapping[str, Any]], float] | None = None
  section: str | None = None
