"""The share of a sum's steps that are right."""

import pytest

from jaxrl_llm.rewards import make
from jaxrl_llm.tasks.sets.drills import steps
from jaxrl_llm.text_types import Completion


def reward(text, question="47 + 8 + 5 ="):
  return make("running_sum")(Completion(text=text, token_ids=(), num_tokens=9, stopped=False), {"question": question})


@pytest.mark.parametrize("text, expected", [
  (" 47 + 8 = 55, 55 + 5 = 60\n", 1), ("47+8=55,55+5=60", 1), (" 47 + 8 = 55, 55 + 5 = 61", 0.5), (" 47 + 8 = 55", 0.5), ("", 0),
  (" 47 + 8 = 54, 54 + 5 = 59", 0), (" 47 + 5 = 52, 52 + 8 = 60", 0), (" 60", 0), (" 1 + 1 = 2, 47 + 8 = 55", 0),
  (" 47 + 8 = 55, 1 + 1 = 2, 55 + 5 = 60", 0.5), (" 147 + 8 = 55", 0), (" 47 + 8 = 55, 55 + 5 = 60, 60 + 1 = 61", 1),
])  # fmt: skip
def test_running_sum(text, expected):
  assert reward(text) == expected


def test_a_whole_working_earns_all():
  assert reward(f" {steps([81, 9, 5, 3])}", "81 + 9 + 5 + 3 =") == 1


def test_a_question_without_a_sum_is_refused():
  with pytest.raises(ValueError, match="running_sum: found the question 'How many[?]', expected a sum of two or more whole numbers"):
    reward("7", "How many?")


def test_hostile_text_costs_little():
  assert reward("1 + " * 200_000) == 0 and reward("9" * 500_000) == 0
