"""A calculator in the policy's text: the policy writes `<<487*36=` and reads `17532>>`."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.rollouts.environments.protocol import Environment, Reply
from jaxrl_llm.text_types import Completion

_CALL = re.compile(r"<<([^<>=]*)=\Z")
_MOST_CHARS, _MOST_DIGITS = 80, 40
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.FloorDiv: operator.floordiv,
  ast.Mod: operator.mod,
}


def calculator(*, call_reward: float = 0.0) -> Environment:
  """Makes the calculator of GSM8K's annotations, called while the policy writes.

  A turn without a call ends the conversation. A call that cannot be evaluated is answered with
  `error>>`.

  Args:
    call_reward: Reward of a turn whose result is the correct answer, the task row's `answer`; 0
      rewards the last turn alone.

  Example:
    >>> from jaxrl_llm.text_types import Completion
    >>> tool = calculator(call_reward=0.5)
    >>> tool.step(tool.reset({"answer": "6"}), Completion("<<2*3=", (), 6, True))[1]
    Reply(text='6>>', reward=0.5, done=False)

  References:
    Training Verifiers to Solve Math Word Problems, arXiv:2110.14168, 2021, appendix C.
  """

  def reset(row: Mapping[str, Any]) -> str:
    return str(row.get("answer", "")).strip()

  def step(answer: str, turn: Completion) -> tuple[str, Reply]:
    call = _CALL.search(turn.text)
    if call is None:
      # "=" ends a turn anywhere: outside a call the policy simply continues. Any other end is the
      # policy's own.
      return answer, Reply(done=not turn.text.endswith("="))
    value = worked_out(call[1])
    return answer, Reply(f"{'error' if value is None else value}>>", reward=call_reward * (value is not None and value == answer))

  return Environment(reset, step, stops=("=",), replies=r"<<[^<>=]*=([^<>=]*>>)")


def worked_out(expression: str) -> str | None:
  """Returns the value of an expression of numbers with + - * / // % and brackets, else None.

  Whole numbers have no decimal point. Only arithmetic is evaluated, and nothing that could take
  long.

  Example:
    >>> worked_out("(2+4)*7"), worked_out("1/8"), worked_out("9**9"), worked_out("1/0")
    ('42', '0.125', None, None)
  """
  if len(expression) > _MOST_CHARS:
    return None
  try:
    value = _value(ast.parse(expression.strip(), mode="eval").body)
  except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
    return None
  if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
    value = int(value)
  text = repr(value)
  return text if len(text) <= _MOST_DIGITS and text not in ("inf", "-inf", "nan") else None


def _value(node: ast.expr) -> int | float:
  if isinstance(node, ast.Constant) and type(node.value) in (int, float):
    return node.value
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
    return -_value(node.operand)
  if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
    return _BINARY[type(node.op)](_value(node.left), _value(node.right))
  raise ValueError("not arithmetic")
