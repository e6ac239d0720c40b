"""The letter that a response chooses."""

import pytest

from jaxrl_llm.rewards import choice
from jaxrl_llm.rewards.choice import EXAMPLES
from jaxrl_llm.text_types import Completion


def reward(text, gold="B", **settings):
  return choice(**settings)(Completion(text, (), 1, stopped=True), {"answer": gold})


@pytest.mark.parametrize("text", [
  "B", "(B)", "B.", "**B**", "B) four", "(B) Because it is even.", "so\nB: four", "Answer: B",
  "Answer: (B) four", "**Answer:** B.",
  "Answer: b",
  "The answer is B.", "the answer is (b)", "the correct answer is **B**", r"\boxed{B}", r"\boxed{\text{B}}",
  r"\boxed{\textbf{(B)}}",
  r"\boxed{(B)}", r"\boxed{B) 4}", "#### B", "Answer: B, because A is odd", "Answer: [B]", "Answer: B - four",
  "Answer: B (not C)", "Answer: B, not C", "The answer is B; A and C are odd.",
  "The answer is B, which is the only even number among A, B and C.", "option $B$",
  "Only option (B) is correct.",
  "**B - four**", "<answer>B</answer>", '{"answer": "B"}', "\u7b54\u6848\u662fB\u3002",
  r"the answer is \(B\)", "#### B\n\nQuestion: ...", r"\boxed{\textbf{(B) }15}", "The answer is A dog (B)",
  "A and C are odd.\nThe answer is B", "<think>The answer is A</think>The answer is B", r"\boxed{\mathrm{B}}",
  "Answer: B. Four is even.",
  "so $x = \\boxed{0.088}$.\nThe answer is (B).", "Answer: 4 cm\nThe correct option is B.",
])  # fmt: skip
def test_right(text):
  assert reward(text) == 1


@pytest.mark.parametrize("text", [
  "<think>The answer is B.", r"\boxed{B}. No: \boxed{", "The answer is B. Or C.", "Answer: A) 4 or B) 5",
  "(A) (B)", "Answer: neither A nor B", "The answer is everything except (B).", "Option B is wrong.",
  "$\\boxed{4}$. The answer is B or C.", "\\boxed{C}\nThe answer is (B).",
  r"\boxed{B = C}", r"\boxed{B \text{ or } C}", "Answer: A/B", "Answer: B + C",
  "The answer is B.\nThe answer is A.", "B. or C", "Answer: vitamin B", "The answer is not B.",
  "A", "(C)", "", "Both are even", "B or C", "Answer: B or C", "Answer: (A) or (B)", "Answer: (B), (C)",
  "Answer: B and C",
  "Answer: A or B.",
  r"\boxed{B} \boxed{C}", r"\boxed{A, B}", "The answer is B. The answer is C.", "Answer: Because",
  "Answer: Bob", "The answer is a B-tree",
  "B\nI do not know", "Big", "Answer: Z", r"\boxed{ABCD}", r"\boxed{}", "Answer: B'", "(A) (B) (C) (D)", "AB",
])  # fmt: skip
def test_wrong(text):
  assert reward(text) == 0


@pytest.mark.parametrize("written, letter", EXAMPLES)
def test_what_is_written_chooses_a_letter(written, letter):
  """The letter that leads counts, in any form; letters behind it are the option's text."""
  for response in (f"The answer is {written}", f"Answer: {written}", f"\\boxed{{{written}}}",
    f"**Final Answer**\n\n{written}", f"<answer>{written}</answer>"):
    assert [other for other in "ABCDE" if reward(response, other)] == [*letter], response


@pytest.mark.parametrize("gold", ["B", "b", "(B)", "B.", "1", 1])
def test_right_answers(gold):
  assert reward("Answer: B", gold) == 1


def test_settings():
  assert reward("Answer: E", "D", letters="ABCD") == reward("Answer: E", "A", letters="ABCD") == 0
  for letters in ("A", "AA", "ab", "A1"):
    with pytest.raises(ValueError, match="choice: found letters="):
      choice(letters=letters)
  for gold in ("Paris", "Z", "12"):
    with pytest.raises(ValueError,
      match="choice: found the answer .*expected one of A, B, C, D or its number from 0"):
      reward("Answer: B", gold, letters="ABCD")
