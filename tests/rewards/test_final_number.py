"""The number that a solution gives as its answer, in any spelling, but no lookalike."""

import random

import pytest

from jaxrl_llm.rewards.final_number import final_number
from jaxrl_llm.text_types import Completion


def reward(text, answer="1200", stopped=True):
  return final_number(Completion(text=text, token_ids=(), num_tokens=len(text), stopped=stopped), {"answer": answer})


@pytest.mark.parametrize("text", [
  "3 * 400 = 1200\n#### 1200", "####1200", "#### $1,200.00.", "#### 1200 apples", "#### 1\n#### 1200", "#### **1200**", "#### 01200",
  r"\boxed{1200}", r"so $\boxed{\$1,200}$", r"\boxed{1200\text{ m}} for 3 people", r"\boxed{ 1200 }",
  "The answer is 1200.", "The answer is: £1200 for 3 people", "the final ANSWER IS **1200** for 3", "Answer: 1200. Since 7 is odd.",
  "The answer is 3 * 400 = 1200.", "1200", "It costs €1200", "It is 1200kg", "3x400=1200", "1200%", "(1200)", "200 - 100 = 100, 1,200",
  "The answer is 1200 (not 7)", "1200.", "1200.0000",
])  # fmt: skip
def test_right(text):
  assert reward(text) == 1.0


@pytest.mark.parametrize("text", [
  "", "####", "#### 120", "#### 12000", "#### 1200.5", "#### -1200", "#### 1200\n#### 7", "1200 or 7", "1200 7", "1,200,7", "12,00",
  "1200e1", "1.2e3", "１２００", "١٢٠٠", "1200５", "x1200", "v1.1200", "1 200", "12OO", "nan", "inf", "twelve hundred",
  "#### 1200 = 7", "#### 1200 + 7",
  "The answer is 1200 + 7 = 1207", "1_200", "0x4B0", "1201!", "__import__('os')", r"\boxed{", "answer is", "None",
])  # fmt: skip
def test_wrong(text):
  assert reward(text) == 0.0


@pytest.mark.parametrize("text, answer", [
  ("10-5", "5"), ("10 - 5", "5"), ("= -5", "-5"), ("\u22125", "-5"), ("-$5", "-5"), ("$-5", "-5"), ("#### -5", "-5"), ("-0", "0"),
  ("2047.50", "2047.5"), ("$2,047.5", "2047.5"), ("0.1", "0.1"), ("0.10000000000000000001", "0.1000"), ("9" * 400, "9" * 400), ("5", 5),
])  # fmt: skip
def test_values_not_spellings(text, answer):
  # The comparison is exact: no rounding to floats hides the difference.
  assert reward(text, answer) == float(text != "0.10000000000000000001")


def test_a_truncated_response_is_not_right():
  assert reward("#### 1200", stopped=False) == 0.0


@pytest.mark.parametrize("answer", ["", "nan", "inf", "1/2", "12 apples", None])
def test_an_answer_that_is_not_a_number_is_an_error_of_the_task(answer):
  with pytest.raises(ValueError, match="^final_number: found the answer .*expected a number such as"):
    reward("1", answer)


@pytest.mark.parametrize("text", [
  "#" * 10**6, "answer " * 10**5, "1," * 10**5, "1" * 10**6, "-" * 10**6, "$" * 10**6, r"\boxed{" * 10**5, "####" + " " * 10**6,
  "1,111" * 10**5, "answer is" + "(" * 10**6, "(-$" * 10**5, "\ud800" * 1000, "\x00" * 1000, "9^{9^{9^9}}" * 1000, "1" * 1990 + ",200",
], ids=range(15))  # fmt: skip
def test_hostile_text_is_wrong(text):
  assert reward(text) == 0.0  # This takes milliseconds; a regex that backtracks would hang here.


def test_a_number_that_was_cut_in_two_is_not_read():
  assert reward("9" * 10 + "1200" + "x" * 1996, "1200") == 0.0
  assert reward("y" * 10**5 + " 1200", "1200") == 1.0


def test_agrees_with_the_generators_own_scorer_on_plain_answers():
  reasoning_gym = pytest.importorskip("reasoning_gym")
  problems = reasoning_gym.create_dataset("gsm_symbolic", size=200, seed=3)
  rng = random.Random(0)
  for problem in problems:
    value = float(problem["answer"])
    for guess in (problem["answer"], f"{value:.2f}", str(value + rng.choice([1, -1, 0.5, 10])), f"{problem['answer']}0", "none"):
      if guess.startswith("-"):
        continue  # Its pattern requires a word boundary before the sign, so it reads -1 as 1.
      theirs = problems.score_answer(guess, problem)
      assert reward(guess, problem["answer"]) == float(theirs == 1.0), (guess, problem["answer"])
