"""Answers compared by spelling."""

import numpy as np
import pytest

from jaxrl_llm.rewards import RewardSpec, extractor, make
from jaxrl_llm.text_types import Completion


def reward(name, text, gold="Paris", **settings):
  return make(name, **settings)(Completion(text, (), 1, stopped=True), {"answer": gold, "gold": "Rome"})


@pytest.mark.parametrize("text, settings, expected", [
  ("Answer: Paris", {}, 1), ("Answer: paris", {}, 0), ("Answer: paris", {"ignore_case": True}, 1), ("Paris", {}, 0),
  ("Paris", {"answer_in": "whole"}, 1), (" Paris\n", {"answer_in": "whole"}, 1), (" Paris", {"answer_in": "whole", "strip": False}, 0),
  ("It is\nParis", {"answer_in": "last_line"}, 1), ("<answer>Paris</answer>", {"answer_in": "tag"}, 1),
  ("=> Paris", {"answer_in": "after =>"}, 1),
  ("Answer: \uff30aris", {}, 1), ("Answer: \uff30aris", {"nfkc": False}, 0), ("Answer: Paris\nAnswer: Rome", {}, 0),
  ("Answer: Rome", {"field": "gold"}, 1), ("<answer>Paris</answer><answer>Rome</answer>", {"answer_in": "tag"}, 0),
])  # fmt: skip
def test_exact_match(text, settings, expected):
  assert reward("exact_match", text, **settings) == expected


@pytest.mark.parametrize("text, settings, expected", [
  (" Paris\n", {}, 1), ("paris.", {}, 1), ("paris", {"ignore_case": False}, 0), ("It rains in\n**Paris**", {}, 1),
  ("It is Paris", {}, 0), ("Answer: Paris", {}, 1), ("The answer is Paris.\nIt rains.", {}, 1), ("Answer: Rome\nParis", {}, 0),
  ("Answer: Paris\nAnswer: Rome", {}, 0),
  ("\u0130stanbul'da ya\u011fmur.\nAnswer: Paris\n\u0130yi g\u00fcnler.", {}, 1), ("In \u0130zmir, THE ANSWER IS Paris.", {}, 1),
  ("<think>Rome</think>\nParis", {}, 1), ("\uff30aris", {}, 1), ("", {}, 0), (" \n", {}, 0),
])  # fmt: skip
def test_final_text(text, settings, expected):
  assert reward("final_text", text, **settings) == expected


@pytest.mark.parametrize("name, text, gold", [
  ("exact_match", "Answer: 5", 5), ("exact_match", "Answer: 5", np.int64(5)), ("exact_match", "Answer: caf\u00e9", b"caf\xc3\xa9"),
  ("exact_match", "Answer: caf\u00e9", "cafe\u0301"), ("final_text", "7", 7), ("final_text", "New  York", " new york "),
])  # fmt: skip
def test_right_answers_of_other_types(name, text, gold):
  assert reward(name, text, gold) == 1


@pytest.mark.parametrize("gold", [None, "", " ", True, np.True_, [5], {"a": 1}])
def test_a_row_without_an_answer(gold):
  for name in ("exact_match", "final_text"):
    with pytest.raises(ValueError, match=f"^{name}: found .* in the field 'answer', expected text or a number$"):
      reward(name, "Answer: 5", gold)


def test_the_answer_of_final_text_can_be_read():
  assert extractor(RewardSpec("final_text"))("Let me see.\nParis.") == "Paris"
