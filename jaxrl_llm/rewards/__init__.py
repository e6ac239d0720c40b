"""Reward functions, each of which maps one completion and its example to one number; no JAX.

| reward | 1 if |
| --- | --- |
| `final_answer`, `final_number` | the last line or number is correct (tasks of this package) |
| `exact_match` | the answer is spelt like the correct one |
| `final_text` | the text at the end is the correct one |
| `maths` | the answer is mathematically equal to the correct one |
| `choice` | the chosen letter is correct |
| `gym` | reasoning-gym's verifier accepts the answer |
| `pattern` | a regular expression matches |
| `running_sum` | (the share of a sum's steps that are right) |
| `code_tests` | the program in the response passes all tests |
| `answer_form`, `tags` | the response has the requested form |
| `length_target`, `cosine_length`, `soft_overlong` | (a number for the length in tokens) |
| `length_by_pass_rate` | (a number for the length among the responses to a prompt) |
| `imported` | (a Python function of your own) |

`rubric` adds judges: language models behind an endpoint.

All are cheap to import: sympy and reasoning-gym are imported on the first call that needs them.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.rewards.answer_form import answer_form
from jaxrl_llm.rewards.choice import choice, chosen_letter, right_letter
from jaxrl_llm.rewards.exact_match import ending, exact_match, final_text
from jaxrl_llm.rewards.extraction import answer_at, question_of, stated_answers
from jaxrl_llm.rewards.final_answer import final_answer, hashed_answer
from jaxrl_llm.rewards.final_number import final_number, number_text
from jaxrl_llm.rewards.gym import gym
from jaxrl_llm.rewards.imported import imported
from jaxrl_llm.rewards.maths import maths, maths_answer
from jaxrl_llm.rewards.outcome import CAUSES, CallFn, Graded, Outcome, RewardSpec, WeightedReward, call_here, failure_metrics, grade
from jaxrl_llm.rewards.pattern import pattern
from jaxrl_llm.rewards.plain_numbers import answer_key
from jaxrl_llm.rewards.running_sum import running_sum
from jaxrl_llm.rewards.sandbox.grades import code_deadline_s, code_tests
from jaxrl_llm.rewards.tags import tags
from jaxrl_llm.rewards.token_length import cosine_length, length_by_pass_rate, length_target, soft_overlong
from jaxrl_llm.text_types import RewardFn

__all__ = [
  "CAUSES", "REWARDS", "CallFn", "Graded", "Outcome", "Reward", "RewardSpec", "WeightedReward", "answer_form", "answer_key",
  "call_here", "choice", "cosine_length", "exact_match", "extractor", "failure_metrics", "final_answer", "final_number", "final_text",
  "grade", "gym", "imported", "length_by_pass_rate", "length_target", "make", "maths", "pattern", "question_of",
  "running_sum", "soft_overlong", "stated_answers", "tags", "weighted",
]  # fmt: skip


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
    states: Function `(answer) -> text` that returns a right answer of the data as a response states
      it. None if it is stated as it is.
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
  states: Callable[[str], str] | None = None
  is_safe: bool = False
  imports: tuple[str, ...] = ()
  deadline_s: Callable[[Mapping[str, Any]], float] | None = None
  section: str | None = None


REWARDS: dict[str, Reward] = {
  "answer_form": Reward(answer_form, is_factory=False, is_safe=True),
  "choice": Reward(choice, extract=chosen_letter, states=right_letter),
  "code_tests": Reward(code_tests, deadline_s=code_deadline_s, section="sandbox", imports=("markdown_it",)),
  "cosine_length": Reward(cosine_length),
  "exact_match": Reward(exact_match, extract=answer_at),
  "final_answer": Reward(final_answer, is_factory=False, extract=hashed_answer, is_safe=True),
  "final_number": Reward(final_number, is_factory=False, extract=number_text, is_safe=True),
  "final_text": Reward(final_text, extract=ending),
  "gym": Reward(gym, extract=answer_at),
  "imported": Reward(imported),
  "length_by_pass_rate": Reward(length_by_pass_rate, is_safe=True),
  "length_target": Reward(length_target),
  "maths": Reward(maths, extract=maths_answer, imports=("math_verify",)),
  "pattern": Reward(pattern),
  "running_sum": Reward(running_sum, is_factory=False, is_safe=True),
  "soft_overlong": Reward(soft_overlong, is_safe=True),
  "tags": Reward(tags),
}
"""Every reward by name. To add one, add its file and its row here, which holds all its metadata."""


def make(name: str, **settings) -> RewardFn:
  """Makes a registered reward function from its settings.

  Raises:
    ValueError: If there is no such reward, or it does not take these settings. One line, with the
      fix.

  Example:
    >>> make("final_anser")
    Traceback (most recent call last):
    ...
    ValueError: reward: found 'final_anser', expected one of ...; did you mean 'final_answer'?
  """
  if name not in REWARDS:
    raise ValueError(f"reward: found {name!r}, expected one of {', '.join(REWARDS)}{did_you_mean(name, REWARDS)}")
  reward = REWARDS[name]
  parameters = inspect.signature(reward.judge).parameters if reward.is_factory else {}
  required = {key for key, parameter in parameters.items() if parameter.default is parameter.empty}
  if not required <= set(settings) <= set(parameters):
    unknown = sorted(set(settings) - set(parameters))
    hint = did_you_mean(unknown[0], parameters) if unknown else ""
    optional = f" and perhaps {sorted(set(parameters) - required)}" if required < set(parameters) else ""
    raise ValueError(f"reward {name!r}: found settings {sorted(settings)}, expected {sorted(required)}{optional}{hint}")
  return reward.judge(**settings) if reward.is_factory else reward.judge


def extractor(spec: RewardSpec) -> Callable[..., str | None] | None:
  """Returns the function that extracts the answer from a response's text, `(text, question)`.

  Returns:
    The function, or None if the reward does not judge an answer.

  Example:
    >>> extractor(RewardSpec("exact_match", {"answer_in": "last_line"}))("It rains.\\nParis")
    'Paris'
  """
  reward = REWARDS.get(spec.name)
  if reward is None or reward.extract is None:
    return None
  extract, own = reward.extract, inspect.signature(reward.judge).parameters
  names = list(inspect.signature(extract).parameters)[1:]
  settings = {name: spec.settings.get(name, own[name].default) for name in names if name != "question"}
  if "question" not in names:
    return lambda text, question=None: extract(text, **settings)
  return functools.partial(extract, **settings)


def weighted(name: str, spec: RewardSpec, weight: float = 1.0, *, shapes: bool = False) -> WeightedReward:
  """Builds a term of the total reward that other processes can also build.

  `WeightedReward` describes the arguments. A function with an attribute `of_group` makes a term of
  all responses to a prompt, which only shapes the reward.

  Example:
    >>> weighted("form", RewardSpec("tags"), 0.1).spec.name
    'tags'
  """
  fn = make(spec.name, **spec.settings)
  of_group = getattr(fn, "of_group", None)
  return WeightedReward(name, fn, weight, spec, shapes or of_group is not None, of_group=of_group)
