"""Answers compared by spelling."""

import numpy as np
import pytest

from jaxrl_llm.rewards import exact_match
from jaxrl_llm.text_types import Completion


def reward(text, gold="Paris", stopped=True, **settings):
  return exact_match(**settings)(Completion(text=text, token_ids=(), num_tokens=1, stopped=stopped), {"answer": gold, "gold": "Rome"})


@pytest.mark.parametrize("text, settings, expected", [
  ("Answer: Paris", {}, 1), ("Answer: paris", {}, 0), ("Answer: paris", {"ignore_case": True}, 1), ("Paris", {}, 0),
  ("Paris", {"answer_in": "whole"}, 1), (" Paris\n", {"answer_in": "whole"}, 1), (" Paris", {"answer_in": "whole", "strip": False}, 0),
  ("It is\nParis", {"answer_in": "last_line"}, 1), ("<answer>Paris</answer>", {"answer_in": "tag"}, 1),
  ("=> Paris", {"answer_in": "after =>"}, 1),
  ("Answer: \uff30aris", {}, 1), ("Answer: \uff30aris", {"nfkc": False}, 0), ("Answer: Paris\nAnswer: Rome", {}, 0),
  ("Answer: Rome", {"field": "gold"}, 1), ("<answer>Paris</answer><answer>Rome</answer>", {"answer_in": "tag"}, 0),
])  # fmt: skip
def test_exact_match(text, settings, expected):
  assert reward(text, **settings) == expected


def test_a_truncated_response():
  assert reward("Answer: Paris", stopped=False) == 0 and reward("Answer: Paris", stopped=False, require_stop=False) == 1


@pytest.mark.parametrize("gold, text", [
  (5, "Answer: 5"), (np.int64(5), "Answer: 5"), (b"caf\xc3\xa9", "Answer: caf\u00e9"), ("cafe\u0301", "Answer: caf\u00e9"),
])  # fmt: skip
def test_right_answers_of_other_types(gold, text):
  assert reward(text, gold) == 1


@pytest.mark.parametrize("gold", [None, "", " ", True, np.True_, [5], {"a": 1}])
def test_a_row_without_an_answer(gold):
  with pytest.raises(ValueError, match="^exact_match: found .* in the field 'answer', expected text or a number$"):
    reward("Answer: 5", gold)
