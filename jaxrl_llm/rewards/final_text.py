"""A reward for a short answer in words at the end of a response."""

import unicodedata
from collections.abc import Iterable

from jaxrl_llm.rewards.decoration import undecorated
from jaxrl_llm.rewards.exact_match import spelt
from jaxrl_llm.rewards.extraction import PLACES, stated
from jaxrl_llm.text_types import RewardFn


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
    >>> from jaxrl_llm.text_types import Completion
    >>> completion = Completion(text=" paris\\n", token_ids=(), num_tokens=2, stopped=True)
    >>> final_text()(completion, {"answer": "Paris"})
    1.0
  """

  def plain(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", undecorated(text)).split())
    return text.casefold() if ignore_case else text

  return spelt("final_text", _answers, plain, field=field, require_stop=require_stop)


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
