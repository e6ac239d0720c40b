"""The answer that a verifier reads out of a response, so that answers can be counted: what a majority votes with."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.rewards import WeightedReward, choice
from jaxrl_llm.rewards.extraction import place, stated_answers
from jaxrl_llm.rewards.final_number import _MAX_CHARS, _stated
from jaxrl_llm.text_types import Completion

AnswerFn = Callable[[Completion, Mapping[str, Any]], str | None]
"""`(response, problem) -> answer`; None where the response gives none."""

_LETTERS = "ABCDEFGHIJ"


def answer_reader(verifier: WeightedReward) -> AnswerFn | None:
  """What finds the answers that a verifier judges.

  A response that did not end by itself gives none, as for the verifiers. Of a verifier with routes, each problem has its own route's.

  Args:
    verifier: the first of a task's rewards.

  Returns:
    The function; None for a verifier that judges something else than an answer, such as a program.

  Example:
    >>> from jaxrl_llm.rewards import final_number
    >>> from jaxrl_llm.text_types import Completion
    >>> completion = Completion(text="2 * 6 = 12, so\\n#### 12", token_ids=(), num_tokens=14, stopped=True)
    >>> answer_reader(WeightedReward("final_number", final_number))(completion, {})
    '12'
  """
  if verifier.routes:
    readers = {route.name: answer_reader(route) for route in verifier.routes}
    if None in readers.values():
      return None
    return lambda completion, example: readers[example["reward"]](completion, example)
  settings = {} if verifier.spec is None else verifier.spec.settings
  find = _reader(verifier.name, settings)
  return find and (lambda completion, example: find(completion) if completion.stopped and not completion.failed else None)


def _reader(name: str, settings: Mapping[str, Any]) -> "Callable[[Completion], str | None] | None":
  if name == "final_answer":
    return lambda completion: _after_hash(completion.text)
  if name == "final_number":
    return lambda completion: _number(completion.text)
  if name == "maths":
    return lambda completion: ", ".join(stated_answers(completion.text)) or None
  if name == "choice":
    judge = choice(letters=_LETTERS)
    # Asked for each letter in turn: how it finds the one that is chosen is its own affair.
    return lambda completion: next((letter for letter in _LETTERS if judge(completion, {"answer": letter})), None)
  if name in ("exact_match", "gym"):
    find = place(settings.get("answer_in", "stated" if name == "exact_match" else "tag"))
    return lambda completion: find(completion.text)
  return None


def _after_hash(text: str) -> str | None:
  last_line = text.rpartition("\n")[2]
  return (last_line[1:] or None) if last_line.startswith("#") and text.count("#") == 1 else None


def _number(text: str) -> str | None:
  if len(text) > _MAX_CHARS:
    text = text[-_MAX_CHARS:].lstrip("0123456789,.")  # What may be the second half of a number.
  found = _stated(text)
  return None if found is None else format(found.normalize(), "f")
