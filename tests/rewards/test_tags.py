"""A reward for tags that occur once each, in order."""

import pytest

from jaxrl_llm.rewards import tags
from jaxrl_llm.text_types import Completion

GOOD = "<think>a</think>\n<answer>b</answer>"


def reward(text, **settings):
  return tags(**settings)(Completion(text=text, token_ids=(), num_tokens=1, stopped=True), {})


@pytest.mark.parametrize("text, expected", [
  (GOOD, 1), ("\n" + GOOD + "\n", 1), ("<think>a < b</think><answer>\\boxed{1}</answer>", 1), ("<think>a</think>so <answer>b</answer>", 0),
  (GOOD + "!", 0), (GOOD * 2, 0), ("<answer>b</answer><think>a</think>", 0), ("<think>a<answer>b</answer></think>", 0),
  ("<think>a</think>", 0),
  ("<think></think><answer>b</answer>", 0), ("<think>a</think><answer> </answer>", 0), ("<think>a<think>b</think><answer>c</answer>", 0),
  ("<think>a</think><answer>b", 0), ("a</think><answer>b</answer>", 0), ("", 0), ("<THINK>a</THINK><answer>b</answer>", 0),
])  # fmt: skip
def test_tags(text, expected):
  assert reward(text) == expected


def test_settings():
  assert reward("well <think>a</think> so <answer>b</answer>.", alone=False) == 1
  assert reward("a</think><answer>b</answer>", opened=True) == 1 and reward(GOOD, opened=True) == 0
  assert reward("<plan>a</plan>", names=["plan"]) == 1
  for names in ("think", [], ["a", "a"], ["<a>"]):
    with pytest.raises(ValueError, match="tags: found .*expected a list of different words"):
      tags(names)
