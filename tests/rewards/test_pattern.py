"""Regular expressions as rewards."""

import pytest

from jaxrl_llm.rewards import pattern
from jaxrl_llm.text_types import Completion


def reward(text, regex, example=None, **settings):
  return pattern(regex, **settings)(Completion(text=text, token_ids=(), num_tokens=1, stopped=True), example or {})


@pytest.mark.parametrize("text, regex, settings, expected", [
  ("It is 42.", r"\d+", {}, 1), ("none", r"\d+", {}, 0), ("42", r"\d", {"how": "fullmatch"}, 0), ("42", r"\d{2}", {"how": "fullmatch"}, 1),
  ("a\nb", "a.b", {}, 1), ("YES", "yes", {}, 0), ("YES", "yes", {"ignore_case": True}, 1), ("{x}", r"\{x\}", {}, 1),
  ("42" + "x" * 10, "42", {"max_chars": 10}, 0), ("4" * 11, "4+", {"max_chars": 10, "how": "fullmatch"}, 0),
])  # fmt: skip
def test_pattern(text, regex, settings, expected):
  assert reward(text, regex, **settings) == expected


def test_fields_of_the_row_are_taken_literally():
  row = {"answer": "3.5", "unit": "km/h ("}
  assert reward("= 3.5 km/h (!", "= {answer} {unit}", row) == 1 and reward("= 3x5 km/h (!", "= {answer} {unit}", row) == 0
  assert reward("3.53.5", "(?:{answer}){2}", row) == 1
  with pytest.raises(ValueError, match=r"pattern: found a row with \['answer', 'unit'\], expected the field 'gold'"):
    reward("", "{gold}", row)


@pytest.mark.parametrize("regex, how, message", [
  ("(", "search", "found the regular expression '\\(', expected a valid one: missing \\)"),
  ("a{answer", "search", None),
  ("a", "match", "found how='match', expected one of search, fullmatch"),
])  # fmt: skip
def test_invalid_patterns_are_refused_at_once(regex, how, message):
  if message is None:
    pattern(regex, how=how)
    return
  with pytest.raises(ValueError, match=message):
    pattern(regex, how=how)
