"""The form of an answer, right or wrong."""

import pytest

from jaxrl_llm.rewards import make
from jaxrl_llm.text_types import Completion


@pytest.mark.parametrize(
  ("text", "stopped", "expected"),
  [
    ("3*4=12\n#### 12", True, 1.0),
    ("#### -0.5\n", True, 1.0),
    ("#### 12", False, 0.0),  # Cut off by the budget: the continuation is unknown.
    ("3*4=12", True, 0.0),
    ("#### 12\nor so", True, 0.0),
    ("#### 1\n#### 12", True, 0.0),
    ("#### twelve", True, 0.0),
    ("#### 1,200", True, 0.0),
    ("it is #### 12", True, 0.0),
    ("#### " + "9" * 5000, True, 0.0),
    ("", True, 0.0),
  ],
)
def test_answer_form(text, stopped, expected):
  assert make("answer_form")(Completion(text=text, token_ids=(), num_tokens=1, stopped=stopped), {"answer": "12"}) == expected
