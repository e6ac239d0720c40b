"""Right or wrong, by the spelling of the answer."""

import numbers
import unicodedata
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rewards.extraction import place
from jaxrl_llm.text_types import Completion, RewardFn


def exact_match(
  *, answer_in: str = "stated", strip: bool = True, ignore_case: bool = False, nfkc: bool = True, field: str = "answer",
  require_stop: bool = True,
) -> RewardFn:
  """1 where the answer is spelt like the right one, else 0.

  Args:
    answer_in: where the answer stands: `whole`, `last_line`, `stated` (in a box, after `####`, "Answer:"), `tag` (`<answer>...</answer>`),
      or `after ` and a marker. Several different ones are a hedge and earn 0.
    strip: spaces around either do not count, and runs of spaces are one.
    ignore_case: upper and lower case are the same.
    nfkc: compare in Unicode's form NFKC, in which full-width letters, ligatures and other compatibility forms are the plain ones.
    field: of the example, with the right answer.
    require_stop: a response that ran into the token budget earns 0 even if it shows the answer.

  Returns:
    The reward function; 1.0 or 0.0.

  Raises:
    ValueError: no such place.

  Example:
    >>> completion = Completion(text="It rains.\\nAnswer: Paris", token_ids=(), num_tokens=5, stopped=True)
    >>> exact_match()(completion, {"answer": "Paris"})
    1.0
  """
  find = place(answer_in)

  def plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", text) if nfkc else text
    text = " ".join(text.split()) if strip else text
    return text.casefold() if ignore_case else text

  def exact_match_reward(completion: Completion, example: Mapping[str, Any]) -> float:
    gold = text_of(example, field, "exact_match")
    if require_stop and not completion.stopped:
      return 0.0
    answer = find(completion.text)
    return float(answer is not None and plain(answer) == plain(gold))

  return exact_match_reward


def text_of(example: Mapping[str, Any], field: str, reward: str) -> str:
  """A field of a row as text; messages begin with the name of the reward that asks.

  Raises:
    ValueError: no such field, or neither text nor a number in it.

  Example:
    >>> text_of({"answer": 5}, "answer", "maths")
    '5'
  """
  if field not in example:
    raise ValueError(f"{reward}: found a row with {sorted(map(str, example))[:12]}, expected the field {field!r}")
  value = example[field]
  value = value.decode("utf-8") if isinstance(value, bytes) else value
  if isinstance(value, bool) or not isinstance(value, str | numbers.Real) or not str(value).strip():
    raise ValueError(f"{reward}: found {str(value)[:60]!r} in the field {field!r}, expected text or a number")
  return str(value)
