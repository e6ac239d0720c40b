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
| `imported` | (a Python function of your own) |

`rubric` adds judges: language models behind an endpoint.

All are cheap to import: sympy and reasoning-gym are imported on the first call that needs them.
"""

import functools
import inspect
from collections.abc import Callable

from jaxrl_llm.messages import did_you_mean
from jaxrl_llm.rewards.answer_form import answer_form
from jaxrl_llm.rewards.choice import choice, chosen_letter
from jaxrl_llm.rewards.exact_match import exact_match
from jaxrl_llm.rewards.extraction import answer_at, question_of, stated_answers
from jaxrl_llm.rewards.final_answer import final_answer, hashed_answer
from jaxrl_llm.rewards.final_number import final_number, number_text
from jaxrl_llm.rewards.final_text import ending, final_text
from jaxrl_llm.rewards.gym import gym
from jaxrl_llm.rewards.imported import imported
from jaxrl_llm.rewards.maths import maths, maths_answer
from jaxrl_llm.rewards.outcome import CAUSES, CallFn, Graded, Outcome, WeightedReward, attempt, call_here, failure_metrics, grade
from jaxrl_llm.rewards.pattern import pattern
from jaxrl_llm.rewards.plain_numbers import answer_key
from jaxrl_llm.rewards.running_sum import running_sum
from jaxrl_llm.rewards.sandbox.grades import code_deadline_s, code_tests
from jaxrl_llm.rewards.soft_overlong import soft_overlong
from jaxrl_llm.rewards.spec import Reward, RewardSpec
from jaxrl_llm.rewards.tags import tags
from jaxrl_llm.rewards.token_length import cosine_length, length_target
from jaxrl_llm.text_types import RewardFn

__all__ = [
  "CAUSES", "REWARDS", "CallFn", "Graded", "Outcome", "Reward", "RewardSpec", "WeightedReward", "answer_form", "answer_key", "attempt",
  "build_reward", "call_here", "choice", "cosine_length", "exact_match", "extractor", "failure_metrics", "final_answer",
  "final_number", "final_text", "grade", "gym", "imported", "length_target", "make", "maths", "pattern", "question_of",
  "running_sum", "soft_overlong", "stated_answers", "tags", "weighted",
]  # fmt: skip

REWARDS: dict[str, Reward] = {
  "answer_form": Reward(answer_form, is_factory=False, is_safe=True),
  "choice": Reward(choice, extract=chosen_letter),
  "code_tests": Reward(code_tests, deadline_s=code_deadline_s, section="sandbox", imports=("markdown_it",)),
  "cosine_length": Reward(cosine_length),
  "exact_match": Reward(exact_match, extract=answer_at),
  "final_answer": Reward(final_answer, is_factory=False, extract=hashed_answer, is_safe=True),
  "final_number": Reward(final_number, is_factory=False, extract=number_text, is_safe=True),
  "final_text": Reward(final_text, extract=ending),
  "gym": Reward(gym, extract=answer_at),
  "imported": Reward(imported),
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


def build_reward(spec: RewardSpec) -> RewardFn:
  """Makes the reward function of a spec, in any process. Raises the same errors as `make`.

  Example:
    >>> build_reward(RewardSpec("soft_overlong", {"max_tokens": 8, "buffer_tokens": 4})).__name__
    'soft_overlong_penalty'
  """
  return make(spec.name, **spec.settings)


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

  `WeightedReward` describes the arguments.

  Example:
    >>> weighted("form", RewardSpec("tags"), 0.1).spec.name
    'tags'
  """
  return WeightedReward(name, build_reward(spec), weight, spec, shapes)
