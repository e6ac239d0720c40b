"""Answers that a verifier extracts from responses, as counted in a majority vote."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.rewards import REWARDS, RewardSpec, WeightedReward, extractor, question_of
from jaxrl_llm.text_types import Completion


class Answer(NamedTuple):
  """The answer of a response.

  Attributes:
    text: Answer as stated in the response.
    vote: Key of the answer in a majority vote. Answers that count as equal have the same key.
  """

  text: str
  vote: str


AnswerFn = Callable[[Completion, Mapping[str, Any]], Answer | None]
"""`(response, problem) -> answer`, or None if the response gives no answer."""


def answer_reader(verifier: WeightedReward) -> AnswerFn | None:
  """Returns the function that reads the answers judged by a verifier.

  A response that did not end on its own has no answer, as in the verifiers. If the verifier has
  routes, each problem's answer is read by the problem's own route.

  Returns:
    The function, or None if the verifier judges something other than an answer, such as a program.

  Example:
    >>> from jaxrl_llm.rewards import final_number
    >>> completion = Completion(text="2 * 6 = 12, so\\n#### 12.0", token_ids=(), num_tokens=14, stopped=True)
    >>> answer_reader(WeightedReward("final_number", final_number))(completion, {})
    Answer(text='12', vote='12')
  """
  if verifier.routes:
    readers = {route.name: answer_reader(route) for route in verifier.routes}
    if None in readers.values():
      return None
    return lambda completion, example: readers[example["reward"]](completion, example)
  spec = verifier.spec or RewardSpec(verifier.name)
  if (extract := extractor(spec)) is None:
    return None

  def read(completion: Completion, example: Mapping[str, Any]) -> Answer | None:
    text = extract(completion.text, question=question_of(example)) if completion.stopped and not completion.failed else None
    return Answer(text, REWARDS[spec.name].vote(text)) if text else None

  return read
