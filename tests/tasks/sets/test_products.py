"""Products have distinct problems, and a teacher who is right half of the time."""

import numpy as np

from jaxrl_llm.rollouts.environments import make
from jaxrl_llm.tasks.sets import products
from jaxrl_llm.text_types import Completion


def test_the_teacher_is_right_half_of_the_time_and_calls_in_three_quarters():
  shown = [(q, products.demonstration(q, seed)) for q in products.questions_of(2)[:1000] for seed in (0, 1)]
  right = np.mean([text.endswith(f"#{products.product(q)}") for q, text in shown])
  calls = np.mean([text.startswith("<<") for _, text in shown])
  assert abs(right - products.CALL_RATE) < 0.05 and abs(calls - products.CALL_RATE - products.MISCOPY_RATE) < 0.05


def test_demonstrations_contain_the_calculators_own_replies():
  tool = make("calculator")
  for question in products.questions_of(1)[:200]:
    text = products.demonstration(question, 0)
    if text.startswith("<<"):
      call, _, rest = text.partition("=")
      reply = tool.step(tool.reset({}), Completion(call + "=", (), 1, True))[1]
      assert rest.startswith(reply.text)


def test_problems_are_distinct_and_of_their_level():
  for level, (left, right) in products.DIGITS.items():
    questions = products.questions_of(level)
    assert len(set(questions)) == len(questions)
    assert all([len(x) for x in question.split("*")] == [left, right] for question in questions)
