"""A reward for one correct answer, stated once, at the end of a response that stopped."""

import pytest

from jaxrl_llm.rewards.final_answer import final_answer
from jaxrl_llm.text_types import Completion


def reward(text, answer="10"):
  return final_answer(Completion(text=text, token_ids=(), num_tokens=len(text), stopped=True), {"answer": answer})


@pytest.mark.parametrize("text, answer", [
  ("7+8=15\n15-5=10\n#10", "10"),
  ("#10", "10"),
  ("7+8=3\n3-5=1\n#10", "10"),  # Only the answer counts.
  ("#0", "0"),
  ("3-8=-5\n#-5", "-5"),
  ("#10", 10),
  ("#" + "9" * 5000, "9" * 5000),  # Longer than int() accepts.
])
def test_right(text, answer):
  assert reward(text, answer) == 1.0


@pytest.mark.parametrize("text", [
  "", "10", "#", "#11", "#-10", "#100", "#1", "#1#10", "#10#10", "#10#11", "#9\n#10", "#10\n#10", "#10\n", "#10\n15-5=10",
  "#10 ", " #10", "# 10",
  "#+10", "#010", "#10.0", "#1e1", "#10 or #11", "#10 or 11", "15-5=10#10", "10#", "#１０", "#١٠", "#10\x00", "#10\ufffd", "#10\r", "\r#10",
  "#2*5", "#ten", "#--10", "#0xa", "#1_0", "#__import__('os')", "#" * 100_000, "(" * 3000 + "#10", "#" + "1" * 200_000, "#9^{9^{9^9}}",
])
def test_wrong(text):
  assert reward(text) == 0.0


@pytest.mark.parametrize("text, answer", [("#-0", "0"), ("#00", "0"), ("#5", "-5"), ("#-05", "-5")])
def test_each_integer_has_one_spelling(text, answer):
  assert reward(text, answer) == 0.0


def test_a_careful_teacher_earns_1():
  from jaxrl_llm.tasks.sets import arithmetic
  for question in list(arithmetic.questions_of(2))[:500]:
    assert reward(arithmetic.working(question), str(arithmetic.evaluate(question))) == 1.0
