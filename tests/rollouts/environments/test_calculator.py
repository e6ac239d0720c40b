"""The calculator evaluates arithmetic and nothing else, and answers calls in the policy's text."""

import random

import pytest

from jaxrl_llm.rollouts.environments import make
from jaxrl_llm.rollouts.environments.calculator import worked_out
from jaxrl_llm.text_types import Completion


def turn(text):
  return Completion(text, (), len(text), True)


def test_values_equal_those_of_python():
  draw = random.Random(0)
  for _ in range(300):
    a, b, c = (draw.randrange(-99, 1000) for _ in range(3))
    text = draw.choice(["{}+{}*{}", "({}-{})*{}", "{}*({}+{})", "-{}+{}-{}"]).format(a, b, c)
    assert worked_out(text) == str(eval(text)), text


@pytest.mark.parametrize(
  "text",
  ["", "1+", "a", "__import__('os')", "(1).__class__", "2**9", "9" * 81, "1/0", "1e308*10", "1,2", "'1'*9", "f()", "1 if 1 else 2", "1<2",
   "True+1", "1j*2", "0.1+" * 30 + "1", "(" * 40 + ")" * 40],
)  # fmt: skip
def test_anything_else_has_no_value(text):
  assert worked_out(text) is None


def test_a_call_is_answered_and_anything_else_ends_the_conversation():
  tool = make("calculator", call_reward=0.5)
  state = tool.reset({"answer": "17532"})
  assert tool.step(state, turn("so <<487*36="))[1] == ("17532>>", 0.5, False)
  assert tool.step(state, turn("<<48*36="))[1] == ("1728>>", 0.0, False)
  assert tool.step(state, turn("<<what="))[1] == ("error>>", 0.0, False)
  assert tool.step(state, turn("x ="))[1] == ("", 0.0, False)
  assert tool.step(state, turn("\n#17532"))[1] == ("", 0.0, True)


def test_unknown_names_and_settings_are_refused():
  with pytest.raises(ValueError, match=r"environment.name: found 'calculater'.*did you mean 'calculator'\?"):
    make("calculater")
  with pytest.raises(ValueError, match="environment.call_reward: found .*, because environment python does not read it"):
    make("python", call_reward=1.0, backend="off")
  with pytest.raises(ValueError, match="environment.name 'no_such_module:make': importing 'no_such_module' raised"):
    make("no_such_module:make")
  with pytest.raises(ValueError, match="it returned Fraction, expected jaxrl_llm.rollouts.environments.protocol.Environment"):
    make("fractions:Fraction")
