"""A reward for the letter of a multiple-choice answer."""

import functools
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rewards.exact_match import text_of
from jaxrl_llm.rewards.extraction import answer_part, stated_answers
from jaxrl_llm.text_types import Completion, RewardFn

_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|rm|bf)\b")


def choice(*, letters: str = "ABCDEFGHIJ", field: str = "answer", require_stop: bool = True) -> RewardFn:
  """Makes a reward that is 1 if the response chooses the correct option, else 0.

  A choice is stated as `\\boxed{B}`, `#### B`, "Answer: (B)" or "the answer is B". Without such a
  statement, the last line counts if it is only `B`, `(B)`, `B.` or `**B) and the option's text**`.
  Options in words are not read. Two different letters are a hedge and earn 0.

  Args:
    letters: Upper-case letters of the options. A lower-case letter counts only in brackets or if
      nothing else is stated.
    field: Field of the example with the correct letter, such as "B" or "(B)", or the option's
      index, counted from 0.
    require_stop: Whether a response that was cut off by the token budget earns 0 even if it shows
      the answer.

  Returns:
    The reward function; 1.0 or 0.0. It raises ValueError if the row's answer is not one of the
    letters.

  Raises:
    ValueError: If there are fewer than two letters, or one occurs twice or is not upper-case.

  Example:
    >>> completion = Completion(text="Both are odd, so the answer is (B).", token_ids=(), num_tokens=12, stopped=True)
    >>> choice(letters="ABCD")(completion, {"answer": "B"})
    1.0
  """
  if len(letters) < 2 or len(set(letters)) != len(letters) or not re.fullmatch("[A-Z]+", letters):
    raise ValueError(f"choice: found {letters=}, expected two or more different upper-case letters")

  def choice_reward(completion: Completion, example: Mapping[str, Any]) -> float:
    gold = _gold(text_of(example, field, "choice"), letters)
    if require_stop and not completion.stopped:
      return 0.0
    return float(chosen_letter(completion.text, letters) == gold)

  return choice_reward


def chosen_letter(text: str, letters: str) -> str | None:
  """Returns the letter that a response chooses, or None if it chooses none or several.

  Example:
    >>> chosen_letter("Both are odd, so the answer is (B).", "ABCD")
    'B'
  """
  stated = stated_answers(text)
  chosen = set().union(*(_letters_in(answer, letters) for answer in stated)) if stated else _last_line(text, letters)
  return chosen.pop() if len(chosen) == 1 else None


def _letters_in(answer: str, letters: str) -> set[str]:
  answer = _TEXT_COMMAND.sub("", answer).replace("{", " ").replace("}", " ").strip()
  if len(answer) == 1 and answer.upper() in letters:
    return {answer.upper()}
  return {(bracketed or bare).upper() for bracketed, bare in _alone(letters).findall(answer)}


@functools.cache
def _alone(letters: str) -> re.Pattern:
  """Returns a pattern for a letter that stands alone.

  An "A" followed by a word is an article: "A dog (B)".
  """
  return re.compile(
    rf"[(\[]\s*([{letters}{letters.lower()}])\s*[)\]]|(?<![\w'$\\])([{letters}])(?=[).:,;]|\s*$|\s*[*}}$]|\s+(?:or|and|[-\u2013\u2014])\b|\s+[-\u2013\u2014=])"
  )


def _last_line(text: str, letters: str) -> set[str]:
  line = answer_part(text).rstrip().rpartition("\n")[2].strip(" *_")
  match = re.match(rf"[(\[]?([{letters}])(?:[)\].:](?:\s.*)?)?$", line)
  return {match[1]} if match else set()


def _gold(text: str, letters: str) -> str:
  answer = text.strip().strip("()[].: ").upper()
  if answer.isdecimal() and int(answer) < len(letters):
    return letters[int(answer)]
  if len(answer) != 1 or answer not in letters:
    raise ValueError(f"choice: found the answer {text[:60]!r}, expected one of {', '.join(letters)} or its number from 0")
  return answer
