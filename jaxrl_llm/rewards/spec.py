"""A row of the registry of rewards, and a reward as plain data, so that another process can build it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.rewards.plain_numbers import answer_key


class RewardSpec(NamedTuple):
  """What `build` makes a reward function of: it can be pickled, written as JSON and compared, which a function cannot.

  Attributes:
    name: a key of `REWARDS`.
    settings: what that reward takes; plain numbers, text, lists and mappings.
  """

  name: str
  settings: Mapping[str, Any] = {}


class Reward(NamedTuple):
  """A row of `REWARDS`: the function, and all that other rooms must know of it.

  Attributes:
    judge: the reward function, or the function of a module that makes one of its settings.
    is_factory: whether `judge` makes the reward function.
    extract: `(text, ...) -> answer` that `judge` compares, for a majority vote: None or "" if the text states none. Further parameters are
      settings of the reward, by name. None for a reward that judges something other than an answer.
    vote: `(answer) -> key`: answers with the same key are votes for the same answer.
    is_safe: whether a call can neither hang nor crash, whatever the response. All others are called in processes that may be killed.
    imports: modules that a worker loads before its first call, so that their second does not count against the first answer's deadline.
    deadline_s: `(settings) -> seconds` that a call may take in a worker; None takes the limit of the pool.
    section: section of a config that has the reward's settings; None if `config.reward.settings` has them all.
  """

  judge: Callable[..., Any]
  is_factory: bool = True
  extract: Callable[..., str | None] | None = None
  vote: Callable[[str], str] = answer_key
  is_safe: bool = False
  imports: tuple[str, ...] = ()
  deadline_s: Callable[[Mapping[str, Any]], float] | None = None
  section: str | None = None
