"""A short answer in words, stated or at the end."""

import pytest

from jaxrl_llm.rewards import RewardSpec, extractor, make
from jaxrl_llm.text_types import Completion


def reward(text, gold="Paris", stopped=True, **settings):
  return make("final_text", **settings)(Completion(text=text, token_ids=(), num_tokens=1, stopped=stopped), {"answer": gold})


@pytest.mark.parametrize("text, settings, expected", [
  (" Paris\n", {}, 1), ("paris.", {}, 1), ("paris", {"ignore_case": False}, 0), ("It rains in\n**Paris**", {}, 1),
  ("It is Paris", {}, 0), ("Answer: Paris", {}, 1), ("The answer is Paris.\nIt rains.", {}, 1), ("Answer: Rome\nParis", {}, 0),
  ("Answer: Paris\nAnswer: Rome", {}, 0),
  ("\u0130stanbul'da ya\u011fmur.\nAnswer: Paris\n\u0130yi g\u00fcnler.", {}, 1), ("In \u0130zmir, THE ANSWER IS Paris.", {}, 1),
  ("<think>Rome</think>\nParis", {}, 1), ("\uff30aris", {}, 1), ("", {}, 0), (" \n", {}, 0),
])  # fmt: skip
def test_final_text(text, settings, expected):
  assert reward(text, **settings) == expected


def test_a_truncated_response():
  assert reward("Paris", stopped=False) == 0 and reward("Paris", stopped=False, require_stop=False) == 1


def test_numbers_and_spaces_of_the_answer():
  assert reward("7", 7) == 1 and reward("New  York", " new york ") == 1
  with pytest.raises(ValueError, match="final_text: found 'None' in the field 'answer', expected text or a number"):
    reward("Paris", None)


def test_its_answer_can_be_read():
  assert extractor(RewardSpec("final_text"))("Let me see.\nParis.") == "Paris"
