"""Rewards of synthetic responses: no wrong one earns 1, and hardly a right one earns 0."""

import functools
import random

import pytest

from jaxrl_llm.rewards import make
from jaxrl_llm.text_types import Completion
from tests.rewards import choice_responses, numeric_responses, text_responses

MOST_MISSES = 0.005  # Share of right responses that may earn 0.


def at(place, right):
  return functools.partial(text_responses.at_place, place=place, right=right)


CASES = {
  "final_number": ("final_number", {}, numeric_responses.right_number, numeric_responses.wrong_number),
  "final_text": ("final_text", {}, text_responses.right_text, text_responses.wrong_text),
  "final_answer": ("final_answer", {}, numeric_responses.right_strict, numeric_responses.wrong_strict),
  "choice": ("choice", {"letters": "ABCD"}, choice_responses.right_choice, choice_responses.wrong_choice),
  "maths": ("maths", {"seconds": 60.0}, numeric_responses.right_mathematics, numeric_responses.wrong_mathematics),
  **{f"exact_match {place}": ("exact_match", {"answer_in": place}, at(place, True), at(place, False))
     for place in ("whole", "last_line", "stated", "tag", "after =>")},
}  # fmt: skip


def rewards_of(name, count):
  """Returns the wrong responses that earn 1, and the right ones that earn 0."""
  reward, settings, right, wrong = CASES[name]
  judge = make(reward, **settings)

  def graded(generate, bad):
    drawn = [generate(random.Random(seed)) for seed in range(count)]
    rewards = [judge(Completion(x.text, (), 9, x.stopped),
        {"answer": x.answer, "question": x.question}) for x in drawn]
    return [(x.answer, x.text) for x, reward in zip(drawn, rewards, strict=True) if reward == bad]

  return graded(wrong, 1.0), graded(right, 0.0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_wrong_response_is_right_and_hardly_a_right_one_wrong(name, count):
  if name == "maths":
    pytest.importorskip("math_verify")
  false_positives, false_negatives = rewards_of(name, count)
  assert not false_positives, false_positives[:5]
  assert len(false_negatives) <= MOST_MISSES * count, false_negatives[:5]
