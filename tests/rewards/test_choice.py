"""The letter that a response chooses."""

import pytest

from jaxrl_llm.rewards import choice
from jaxrl_llm.text_types import Completion


def reward(text, gold="B", stopped=True, **settings):
  return choice(**settings)(Completion(text=text, token_ids=(), num_tokens=1, stopped=stopped), {"answer": gold})


@pytest.mark.parametrize("text", [
  "B", "(B)", "B.", "**B**", "B) four", "(B) Because it is even.", "so\nB: four", "Answer: B", "Answer: (B) four", "**Answer:** B.",
  "Answer: b",
  "The answer is B.", "the answer is (b)", "the correct answer is **B**", r"\boxed{B}", r"\boxed{\text{B}}", r"\boxed{\textbf{(B)}}",
  r"\boxed{(B)}", r"\boxed{B) 4}", "#### B", "Answer: B, because A is odd", "Answer: [B]", "Answer: B - four",
  "A and C are odd.\nThe answer is B", "<think>The answer is A</think>The answer is B", r"\boxed{\mathrm{B}}", "Answer: B. Four is even.",
])  # fmt: skip
def test_right(text):
  assert reward(text) == 1


@pytest.mark.parametrize("text", [
  "A", "(C)", "", "Both are even", "B or C", "Answer: B or C", "Answer: (A) or (B)", "Answer: (B), (C)", "Answer: B and C",
  "Answer: A or B.",
  r"\boxed{B} \boxed{C}", r"\boxed{A, B}", "The answer is B. The answer is C.", "Answer: Because", "Answer: Bob", "The answer is a B-tree",
  "B\nI do not know", "Big", "Answer: Z", r"\boxed{ABCD}", r"\boxed{}", "Answer: B'", "(A) (B) (C) (D)", "AB",
])  # fmt: skip
def test_wrong(text):
  assert reward(text) == 0


@pytest.mark.parametrize("gold", ["B", "b", "(B)", "B.", "1", 1])
def test_right_answers(gold):
  assert reward("Answer: B", gold) == 1


def test_settings():
  assert reward("Answer: B", stopped=False) == 0 and reward("Answer: B", stopped=False, require_stop=False) == 1
  assert reward("Answer: E", "D", letters="ABCD") == reward("Answer: E", "A", letters="ABCD") == 0
  for letters in ("A", "AA", "ab", "A1"):
    with pytest.raises(ValueError, match="choice: found letters="):
      choice(letters=letters)
  for gold in ("Paris", "Z", "12"):
    with pytest.raises(ValueError, match="choice: found the answer .*expected one of A, B, C, D or its number from 0"):
      reward("Answer: B", gold, letters="ABCD")
