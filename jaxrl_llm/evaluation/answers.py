"""The answer that a verifier reads out of a response, so that answers can be counted: what a majority votes with."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.rewards import REWARDS, RewardSpec, WeightedReward, extractor
from jaxrl_llm.text_types import Completion


class Answer(NamedTuple):
  """The answer of a response.

  Attributes:
    text: the answer as the response states it.
    vote: the same for all answers that a majority takes for one.
  """

  text: str
  vote: str


AnswerFn = Callable[[Completion, Mapping[str, Any]], Answer | None]
"""`(response, problem) -> answer`; None where the response gives none."""


def answer_reader(verifier: WeightedReward) -> AnswerFn | None:
  """The function that reads the answers that a verifier judges.

  A response that did not end by itself gives none, as for the verifiers. Of a verifier with routes, each problem has its own route's.

  Returns:
    The function; None for a verifier that judges something other than an answer, such as a program.

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
    del example
    text = extract(completion.text) if completion.stopped and not completion.failed else None
    return Answer(text, REWARDS[spec.name].vote(text)) if text else None

  return read
