"""The number that a solution gives as its answer, in any spelling, but no lookalike."""

import random
import re

import pytest

from jaxrl_llm.rewards.extraction import MAX_CHARS
from jaxrl_llm.rewards.final_number import final_number, number_text
from jaxrl_llm.rewards.written_number import EXAMPLES, canonical
from jaxrl_llm.text_types import Completion


def reward(text, answer="1200"):
  return final_number(Completion(text=text, token_ids=(), num_tokens=len(text), stopped=True),
    {"answer": answer})


@pytest.mark.parametrize("text", [
  "3 * 400 = 1200\n#### 1200", "####1200", "#### $1,200.00.", "#### 1200 apples", "#### 1\n#### 1200",
  "#### **1200**", "#### 01200",
  r"\boxed{1200}", r"so $\boxed{\$1,200}$", r"\boxed{1200\text{ m}} for 3 people", r"\boxed{ 1200 }",
  "The answer is 1200.", "The answer is: £1200 for 3 people", "the final ANSWER IS **1200** for 3",
  "Answer: 1200. Since 7 is odd.",
  "The answer is 3 * 400 = 1200.", "1200", "It costs €1200", "It is 1200kg", "3x400=1200", "1200%", "(1200)",
  "200 - 100 = 100, 1,200",
  "The answer is 1200 (not 7)", "1200.", "1200.0000", "1200 (not 7)", "#### 1200\n" + "x " * 1500,
  '{"answer": "1200", "steps": 3}', "<think>the answer is 9</think> It is **1200**.",
  "#### 1. Add\n200+1000=1200\n\nSo she has 1200.", "Answer: Let us add. 1000 + 200 = 1200",
  "The answer is found by adding: 1000 + 200 = 1200.", "The answer is clear. So 1200 are left.",
  "**Final Answer**\n\n1200", "Answer: 1000 apples + 200 apples = 1200 apples", r"\boxed{1{,}200}",
  "The answer is 1.2 thousand.", "Total: $1.2k", "A: 1200", r"\boxed{\text{1200 m}}",
  "Answer: 1200. I like 7.", "Answer: twelve hundred (1200)", "1200\n<think>or 7",
])  # fmt: skip
def test_right(text):
  assert reward(text) == 1.0


@pytest.mark.parametrize("text", [
  "the answer is 7\n<think>or 1200", "<think>1200", "<think>\\boxed{1200}", "So \\boxed{1200}. No: \\boxed{",
  "The answer is not 1200.", "Answer: none. ", "1200. The answer is unknown.",
  r"\boxed{\text{none}} of the 1200", r"\boxed{7} or \boxed{1200}", "The answer is 7. Or the answer is 1200.",
  "The answer is 7, or the answer is 1200.", r"\boxed{1200!}", "Answer: 1200! + 7", "Answer: 1200...",
  "1200/7 of them", "It takes 7 to 1200 days", "It takes 7-1200 days", "7:1200",
  "Answer: 1200 apples and 3 pears", "Answer: 1200 or 7",
  "", "####", "#### 120", "#### 12000", "#### 1200.5", "#### -1200", "#### 1200\n#### 7", "1200 or 7",
  "1200 7", "1,200,7", "12,00",
  "1200e1", "1.2e3", "１２００", "١٢٠٠", "1200５", "x1200", "v1.1200", "1 200", "12OO", "nan", "inf",
  "twelve hundred",
  "#### 1200 = 7", "#### 1200 + 7",
  "The answer is 1200 + 7 = 1207", "1_200", "0x4B0", "1201!", "__import__('os')", r"\boxed{", "answer is",
  "None",
])  # fmt: skip
def test_wrong(text):
  assert reward(text) == 0.0


@pytest.mark.parametrize("text, answer", [
  ("= -5", "-5"), ("\u22125", "-5"), ("-$5", "-5"), ("$-5", "-5"), ("#### -5", "-5"), ("-0", "0"),
  ("2047.50", "2047.5"), ("$2,047.5", "2047.5"), ("0.1", "0.1"), ("0.10000000000000000001", "0.1000"),
  ("9" * 400, "9" * 400), ("5", 5),
])  # fmt: skip
def test_values_not_spellings(text, answer):
  # The comparison is exact: no rounding to floats hides the difference.
  assert reward(text, answer) == float(text != "0.10000000000000000001")


@pytest.mark.parametrize("written, number", EXAMPLES)
def test_what_is_written_is_read_whole(written, number):
  """A number that is a part of something else is no answer, in any form of statement."""
  parts = [part for part in re.findall(r"[0-9]+(?:\.[0-9]+)?",
      written.replace(",", "")) if canonical(part) != number]
  for response in (f"The answer is {written}.", f"Answer: {written}", f"#### {written}",
    f"\\boxed{{{written}}}", f"**Final Answer**\n\n{written}", f'{{"answer": "{written}"}}'):
    if "{" in response and "\\" in written and response[0] == "{":
      continue  # Such a backslash is an escape of JSON.
    assert all(reward(response, part) == 0.0 for part in parts), response
    assert not number or reward(response, number) == 1.0, response


@pytest.mark.parametrize("text, wrong", [
  ("10-5", "5"), ("10 - 5", "5"), ("It is 5 or 6.", "6"), ("So 3/4", "4"), ("So 2^3", "3"),
  ("It is 5:30", "30"), ("2 hours and 30 minutes", "30"), ("on 2024-01-05", "5"), ("x > 5", "5"),
  ("3 + 4", "4"), ("x1200", "1200"), ("It is 12 (base 7)", "7"), ("5 feet 3 inches", "3"), ("1 200", "200"),
  ("between 3 and 5", "5"), ("21 = 7 x 4 = 28 x 2", "2"), ("6.02 x 10^23", "23"),
])  # fmt: skip
def test_a_last_number_that_is_a_part_is_no_answer(text, wrong):
  assert reward(text, wrong) == 0.0


def test_long_numbers_are_not_rounded():
  assert number_text("9" * 40) == "9" * 40 and number_text("9" * 39 + "8") != number_text("9" * 40)
  assert number_text("0." + "3" * 40 + "0") == "0." + "3" * 40
  assert number_text("-0.50") == "-0.5" and number_text("1.5 million") == "1500000"


def test_boxes_of_the_question():
  example = {"answer": "7", "question": r"What is $\boxed{3} + \boxed{4}$?"}
  completion = Completion(text=r"$\boxed{3} + \boxed{4}$ is 7.", token_ids=(), num_tokens=9, stopped=True)
  assert final_number(completion, example) == 1.0


@pytest.mark.parametrize("answer", ["", "nan", "inf", "1/2", "12 apples", None])
def test_an_answer_that_is_not_a_number_is_an_error_of_the_task(answer):
  with pytest.raises(ValueError, match="^final_number: found the answer .*expected a number such as"):
    reward("1", answer)


@pytest.mark.parametrize("text", [
  "#" * 10**6, "answer " * 10**5, "1," * 10**5, "1" * 10**6, "-" * 10**6, "$" * 10**6, r"\boxed{" * 10**5,
  "####" + " " * 10**6,
  "1,111" * 10**5, "answer is" + "(" * 10**6, "(-$" * 10**5, "\ud800" * 1000, "\x00" * 1000,
  "9^{9^{9^9}}" * 1000, "1" * 1990 + ",200",
], ids=range(15))  # fmt: skip
def test_hostile_text_is_wrong(text):
  assert reward(text) == 0.0  # This takes milliseconds; a regex that backtracks would hang here.


def test_a_number_that_was_cut_in_two_is_not_read():
  assert reward("9" * 300 + "1200", "1200") == reward("9" * 10 + "1200" + "x" * (MAX_CHARS - 4),
    "1200") == 0.0
  assert reward("y" * 10**5 + " 1200", "1200") == 1.0


def test_agrees_with_the_generators_own_scorer_on_plain_answers():
  reasoning_gym = pytest.importorskip("reasoning_gym")
  problems = reasoning_gym.create_dataset("gsm_symbolic", size=200, seed=3)
  rng = random.Random(0)
  for problem in problems:
    value = float(problem["answer"])
    for guess in (problem["answer"], f"{value:.2f}", str(value + rng.choice([1, -1, 0.5, 10])),
      f"{problem['answer']}0", "none"):
      if guess.startswith("-"):
        continue  # Its pattern requires a word boundary before the sign, so it reads -1 as 1.
      theirs = problems.score_answer(guess, problem)
      assert reward(guess, problem["answer"]) == float(theirs == 1.0), (guess, problem["answer"])
