"""Rewards for an answer that is spelt like the correct one."""

import numbers
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl_llm.rewards.decoration import undecorated
from jaxrl_llm.rewards.extraction import PLACES, place, question_of, stated
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

  return _spelt("exact_match", answers, plain, field=field, require_stop=require_stop)


def final_text(*, ignore_case: bool = True, field: str = "answer", require_stop: bool = True) -> RewardFn:
  """Makes a reward that is 1 if the answer at the end is the correct text, else 0.

  An answer is stated in one of the forms of `forms.FORMS`, such as `\\boxed{Paris}`, "Answer:
  Paris" or "the answer is Paris, because". Without such a statement, the last line is the answer.
  Surrounding decoration (spaces, quotes, bold, a full stop), a lead-in and a remark do not count,
  and texts are compared in Unicode's NFKC form. Two different statements are a hedge and earn 0.

  Args:
    ignore_case: Whether to ignore case.
    field: Field of the example with the correct answer.
    require_stop: Whether a response that was cut off by the token budget earns 0 even if it shows
      the answer.

  Returns:
    The reward function; 1.0 or 0.0.

  Example:
    >>> completion = Completion(text=" paris\\n", token_ids=(), num_tokens=2, stopped=True)
    >>> final_text()(completion, {"answer": "Paris"})
    1.0
  """

  def plain(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", undecorated(text)).split())
    return text.casefold() if ignore_case else text

  return _spelt("final_text", _answers, plain, field=field, require_stop=require_stop)


def _answers(text: str, question: str | None) -> list[Iterable[str]]:
  statements = stated(text, question)
  return [statement.readings() for statement in statements] or [[undecorated(PLACES["last_line"](text,
          question))]]


def ending(text: str, question: str | None = None) -> str | None:
  """Returns the answer that a response ends with, or None if it states several or nothing at all.

  Args:
    text: Response.
    question: Question, whose boxes a response may quote; None if unknown.

  Example:
    >>> ending("The past tense is\\nwent."), ending("Answer: go\\nAnswer: went")
    ('went', None)
  """
  answers = {next(iter(each)) for each in _answers(text, question)}
  return answers.pop() or None if len(answers) == 1 else None


def _spelt(
  reward: str, find: Callable[[str, str], list[Iterable[str]]], plain: Callable[[str], str], *, field: str,
  require_stop: bool
) -> RewardFn:
  """Makes the reward `reward`, from two functions.

  `find` maps a response and its question to the readings of each of its statements, all of which
  must have the correct one. `plain` maps an answer to the spelling that is compared.
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
