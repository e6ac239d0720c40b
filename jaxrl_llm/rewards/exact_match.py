"""A reward for an answer that is spelt like the correct one."""

import numbers
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl_llm.rewards.extraction import place, question_of, stated
from jaxrl_llm.text_types import Completion, RewardFn


def exact_match(
  *, answer_in: str = "stated", strip: bool = True, ignore_case: bool = False, nfkc: bool = True,
  field: str = "answer",
  require_stop: bool = True,
) -> RewardFn:
  """Makes a reward that is 1 if the answer is spelt like the correct one, else 0.

  Args:
    answer_in: Location of the answer: `whole`, `last_line`, `stated` (in one of the forms of
      `forms.FORMS`), `tag` (`<answer>...</answer>`), or `after ` and a marker. Several different
      answers are a hedge and earn 0.
    strip: Whether to strip surrounding whitespace and collapse runs of whitespace.
    ignore_case: Whether to ignore case.
    nfkc: Whether to compare in Unicode's NFKC form, which maps full-width letters, ligatures and
      other compatibility characters to plain ones.
    field: Field of the example with the correct answer.
    require_stop: Whether a response that was cut off by the token budget earns 0 even if it shows
      the answer.

  Returns:
    The reward function; 1.0 or 0.0.

  Raises:
    ValueError: If there is no such location.

  Example:
    >>> completion = Completion(text="It rains.\\nAnswer: Paris", token_ids=(), num_tokens=5, stopped=True)
    >>> exact_match()(completion, {"answer": "Paris"})
    1.0
  """
  find = place(answer_in)

  def answers(text: str, question: str) -> list[Iterable[str]]:
    if answer_in == "stated":
      return [statement.readings() for statement in stated(text, question)]
    answer = find(text, question)
    return [] if answer is None else [[answer]]

  def plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", text) if nfkc else text
    text = " ".join(text.split()) if strip else text
    return text.casefold() if ignore_case else text

  return spelt("exact_match", answers, plain, field=field, require_stop=require_stop)


def spelt(
  reward: str, find: Callable[[str, str], list[Iterable[str]]], plain: Callable[[str], str], *, field: str,
  require_stop: bool
) -> RewardFn:
  """Makes a reward that is 1 if a response's answer is spelt like the correct one, else 0.

  Args:
    reward: Name of the reward, for error messages.
    find: Function from a response and its question to the readings of each of its statements. Each
      statement must have the correct one.
    plain: Function from an answer to the spelling that is compared.
    field: Field of the example with the correct answer.
    require_stop: Whether a response that was cut off earns 0.
  """

  def spelt_reward(completion: Completion, example: Mapping[str, Any]) -> float:
    gold = text_of(example, field, reward)
    if require_stop and not completion.stopped:
      return 0.0
    right, statements = plain(gold), find(completion.text, question_of(example))
    return float(bool(statements) and all(right in map(plain, each) for each in statements))

  return spelt_reward


def text_of(example: Mapping[str, Any], field: str, reward: str) -> str:
  """Returns a field of a row as text; error messages begin with the name of the reward.

  Raises:
    ValueError: If the field is missing, or holds neither text nor a number.

  Example:
    >>> text_of({"answer": 5}, "answer", "maths")
    '5'
  """
  if field not in example:
    raise ValueError(f"{reward}: found a row with {sorted(map(str, example))[:12]}, expected the field {field!r}")
  value = example[field]
  if isinstance(value, str) and value and not value.isspace():
    return value
  value = value.decode("utf-8") if isinstance(value, bytes) else value
  if isinstance(value, bool) or not isinstance(value, (str, numbers.Real)) or not str(value).strip():
    raise ValueError(f"{reward}: found {str(value)[:60]!r} in the field {field!r}, expected text or a number")
  return str(value)
