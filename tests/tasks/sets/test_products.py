"""Products: right answers, a teacher who is right half of the time, and test problems that nobody was shown."""

import numpy as np

from jaxrl_llm.rollouts.environments import make
from jaxrl_llm.tasks.sets import products
from jaxrl_llm.text_types import Completion


def test_the_teacher_is_right_half_of_the_time_and_asks_three_times_in_four():
  shown = [(q, products.shown(q, seed)) for q in products.problems(2)[:1000] for seed in (0, 1)]
  right = np.mean([text.endswith(f"#{products.product(q)}") for q, text in shown])
  asks = np.mean([text.startswith("<<") for _, text in shown])
  assert abs(right - products.CALL_RATE) < 0.05 and abs(asks - products.CALL_RATE - products.MISCOPY_RATE) < 0.05


def test_what_the_calculator_says_in_a_demonstration_is_what_it_says():
  tool = make("calculator")
  for question in products.problems(1)[:200]:
    text = products.shown(question, 0)
    if text.startswith("<<"):
      call, _, rest = text.partition("=")
      reply = tool.step(tool.reset({}), Completion(call + "=", (), 1, True))[1]
      assert rest.startswith(reply.text)


def test_problems_are_distinct_and_of_their_level():
  for level, (left, right) in products.DIGITS.items():
    questions = products.problems(level)
    assert len(set(questions)) == len(questions)
    assert all([len(x) for x in question.split("*")] == [left, right] for question in questions)
