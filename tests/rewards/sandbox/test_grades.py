"""Grading: the published forms of tests, verdicts, and errors that are not the program's fault."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxrl_llm.rewards.sandbox import (
  AssertTests,
  CallTests,
  ProgramRefused,
  Sandbox,
  SandboxLimits,
  StdioTests,
  code_tests,
  grade,
  probe,
  read_tests,
)
from jaxrl_llm.rewards.sandbox.asker import free_names, verdict
from jaxrl_llm.rewards.sandbox.callee import answer
from jaxrl_llm.rewards.sandbox.literals import Unsendable, decode, encode
from jaxrl_llm.rewards.workers import Function, WorkerJob, WorkerPool
from jaxrl_llm.text_types import Completion

_REASON = probe(Sandbox("namespaces"))
needs_namespaces = pytest.mark.skipif(_REASON is not None, reason=_REASON or "")
LOCAL = Sandbox("namespaces", SandboxLimits(timeout_s=20.0))

HUMAN_EVAL = {
  "kind": "check",
  "function": "scaled",
  "prompt": "import math\nfrom typing import List\n\ndef twice(x):\n  return 2 * x\n\ndef scaled(xs: List[float]):\n  '...'\n",
  "code": "METADATA = {}\n\ndef check(candidate):\n  assert candidate([1.5, 2.0]) == [math.floor(twice(1.5)), 4]\n",
}
CALL = {"kind": "call", "function": "add", "cases": [{"input": "[1, 2]\n3", "output": "[4, 5]"}, {"input": "[]\n1", "output": "[]"}]}
STDIN = {"kind": "stdin", "cases": [{"input": "1 2\n", "output": "3\n"}], "seconds": 2.0}

plain = st.recursive(
  st.none() | st.booleans() | st.integers() | st.integers(2**250, 2**300) | st.floats(allow_nan=False) | st.text() | st.binary(),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    | st.frozensets(st.integers() | st.text(), max_size=3)
    | st.sets(st.integers(), max_size=3)
  ),
  max_leaves=10,
)


@hypothesis.settings(max_examples=20)
@hypothesis.given(plain)
def test_plain_values_arrive_unchanged(value):
  line = encode(value)
  assert "\n" not in line and line.isascii()
  decoded = decode(line)
  assert decoded == value and type(decoded) is type(value)


@hypothesis.settings(max_examples=20)
@hypothesis.given(
  st.text()
  | st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.sampled_from("tsfdibc"), x)).map(
    json.dumps
  )
)
def test_hostile_lines_are_values_or_errors(line):
  try:
    encode(decode(line))
  except ValueError:
    return


@pytest.mark.parametrize(
  "line", ["[" * 100_000, "1" * 10_000, '{"i": "' + "f" * 10 + 'z"}', '{"s": [[]]}', "x" * (2 << 20), '{"t": 1}', ""]
)
def test_malformed_lines_are_refused(line):
  with pytest.raises(ValueError):
    decode(line)


def test_other_than_plain_values_are_not_sent():
  loop = []
  loop.append(loop)
  for value in (object(), int, lambda: 0, loop, (x for x in ()), "x" * (65 << 20)):
    with pytest.raises(Unsendable):
      encode(value)


def test_all_forms_of_tests_are_read():
  assert read_tests({"tests": json.dumps(STDIN)}) == StdioTests([("1 2\n", "3\n")], seconds=2.0)
  assert read_tests({"tests": json.dumps(CALL)}).cases == [([[1, 2], 3], [4, 5]), ([[], 1], [])]
  assert read_tests({"tests": json.dumps(HUMAN_EVAL)}).entry_point == "scaled"
  assert read_tests({"tests": STDIN["cases"]}).cases == [("1 2\n", "3\n")]
  assert read_tests({"tests": ["assert f(1) == 2", "assert f(2) == 3"]}).code.count("assert") == 2


@pytest.mark.parametrize(
  "example", [{}, {"tests": "[{"}, {"tests": {"kind": "other"}}, {"tests": [{"input": "1"}]}, {"tests": 3}, {"tests": [1]}]
)
def test_an_example_without_tests_is_refused_in_one_line(example):
  with pytest.raises(ValueError, match="cannot read `tests`") as caught:
    read_tests(example)
  assert "\n" not in str(caught.value)


def test_free_names_include_every_name_that_is_read():
  assert free_names("import math\ndef check(c):\n  assert c(x) == math.pi\ncheck(f)") == {"c", "x", "math", "check", "f"}


class Conversation:
  """A candidate without a sandbox, which answers the lines written to it from a namespace."""

  def __init__(self, source):
    self.namespace, self.lines = {"__name__": "candidate"}, []
    exec(source, self.namespace)

  def write(self, line):
    self.lines.append(answer(self.namespace, line))

  def flush(self):
    """Does nothing, since nothing is buffered."""

  def readline(self, limit):
    return self.lines.pop(0)[:limit]


@pytest.mark.parametrize(
  ("source", "tests", "expected"),
  [
    ("def f(x): return x + 1", "assert f(1) == 2", "passed"),
    ("def f(x): return x + 1", "assert f(1) == 3", "failed"),
    ("def f(x): raise KeyError('k')", "try:\n  f(1)\nexcept KeyError as e:\n  assert 'k' in str(e)\nelse:\n  assert False", "passed"),
    ("class E(ValueError): pass\ndef f(x): raise E", "try: f(1)\nexcept RuntimeError: pass", "passed"),
    ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == 2, [1]))", "failed"),
    ("def f(x): raise SystemExit", "assert f(1)", "failed"),
    ("def f(x): return (x, {x})", "assert f(1) == (1, {1}) and isinstance(f(1), tuple)", "passed"),
    ("def f(x): return f", "assert callable(f(1))", "failed"),
    ("def f(x): return x(1)", "assert f(lambda y: y) == 1", "unsendable"),
    ("def f(x): return x(1)", "try: assert f(lambda y: y) == 1\nexcept TypeError: pass", "unsendable"),
    ("def g(x): return x", "assert f(1) == 1", "failed"),
    ("def f(x, *, by=1): return x + by", "assert f(1, by=2) == 3", "passed"),
    ("def f(x): return float('nan')", "assert abs(f(1) - 1) < 1e-6", "failed"),
  ],
)
def test_verdicts_of_asserts(source, tests, expected):
  conversation = Conversation(source)
  assert verdict("", tests, "f", conversation, conversation) == expected


def test_tests_use_the_given_source_and_call_the_candidate_for_the_rest():
  conversation = Conversation("def twice(x): return -1\ndef f(x): return twice(x)")
  assert (
    verdict("def twice(x): return 2 * x\ndef f(x): 'asked for'", "assert twice(1) == 2 and f(1) == -1", "f", conversation, conversation)
    == "passed"
  )


@needs_namespaces
def test_grades():
  tests = StdioTests([("1", "2"), ("2", "4"), ("3", "7"), ("4", "8")])
  source = "print(2 * int(input()))"
  assert grade(source, tests, LOCAL)[:2] == (2, 4)
  result = grade(source, tests, LOCAL, stop_early=False)
  assert result[:2] == (3, 4) and result.detail.startswith("test 2: wrong output '6")
  assert grade("raise ValueError('no')", tests, LOCAL).detail.endswith("ValueError: no")
  assert grade(source, tests, LOCAL, total_s=1e-9).detail == "test 0: no time is left for it"
  with pytest.raises(ValueError, match="no tests"):
    grade(source, StdioTests([]), LOCAL)
  with pytest.raises(ProgramRefused, match="switched off"):
    grade(source, tests, Sandbox())
  for refused in (Sandbox(), Sandbox("piston", url="http://127.0.0.1:9")):
    with pytest.raises(ProgramRefused):
      grade(source, AssertTests("assert f(1)"), refused)


@needs_namespaces
def test_calls_may_print_and_fail_separately():
  source = "class Solution:\n  def f(self, x):\n    print('noise')\n    if x == 2: raise ValueError\n    return [x, (x,)]"
  tests = CallTests("f", [([1], [1, [1]]), ([2], [2, [2]]), ([3], [3, [3]])])
  assert grade(source, tests, LOCAL, stop_early=False)[:2] == (2, 3)
  assert grade("def f(x): return 'x' * 10**7", tests, LOCAL)[:2] == (0, 3)
  assert grade("def f(x):\n  y = []\n  y.append(y)\n  return y", tests, LOCAL)[:2] == (0, 3)


def completion(code, *, stopped=True):
  return Completion(text=f"Here it is:\n```python\n{code}\n```\n", token_ids=(1,), num_tokens=1, stopped=stopped)


@needs_namespaces
def test_code_tests_is_a_reward_function():
  reward = code_tests("namespaces", timeout_s=8.0)
  human = {"tests": json.dumps(HUMAN_EVAL)}
  assert reward(completion("def scaled(xs): return [math.floor(twice(x)) for x in xs]"), human) == 1.0
  assert reward(completion("  return [math.floor(twice(x)) for x in xs]"), human) == 1.0
  assert reward(completion("def scaled(xs): return xs"), human) == 0.0
  add = "class Solution:\n  def add(self, xs: List[int], y: int): return [x + y for x in xs]"
  assert reward(completion(add), {"tests": json.dumps(CALL)}) == 1.0
  assert reward(completion("print(sum(map(int, input().split())))"), {"tests": json.dumps(STDIN)}) == 1.0
  assert reward(completion(add, stopped=False), {"tests": json.dumps(CALL)}) == 0.0
  assert reward(Completion(text="3", token_ids=(), num_tokens=1, stopped=True), {"tests": json.dumps(CALL)}) == 0.0
  with pytest.raises(ProgramRefused, match="not a plain value"):
    reward(completion("def f(g): return 1"), {"tests": ["assert f(len) == 1"]})


@needs_namespaces
def test_passing_some_tests_may_earn_part_of_the_reward():
  reward = code_tests("namespaces", timeout_s=8.0, partial=True)
  assert reward(completion("def add(xs, y): return []"), {"tests": json.dumps(CALL)}) == 0.5


def test_a_reward_for_code_needs_a_back_end_that_works():
  with pytest.raises(ValueError, match="switched off; choose a back end"):
    code_tests("off")
  with pytest.raises(ValueError, match="found timeout_s=0"):
    code_tests("off", timeout_s=0)


@needs_namespaces
def test_code_is_graded_in_the_pool_of_workers():
  settings = {"backend": "namespaces", "timeout_s": 0.5}
  functions = {"code": Function("jaxrl_llm.rewards.sandbox:code_tests", settings, timeout_s=20.0)}
  example = {"tests": json.dumps(CALL)}
  with WorkerPool(functions, num_workers=1) as pool:
    sources = ["def add(xs, y): return [x + y for x in xs]", "def add(xs, y): return []", "while True: pass", "import os; os.kill(-1, 9)"]
    outcomes = pool.call([WorkerJob("code", completion(source), example) for source in sources])
    assert [x.value for x in outcomes] == [1.0, 0.0, 0.0, 0.0], outcomes
    (lost,) = pool.call([WorkerJob("code", completion("x"), {"tests": 3})])
    assert (lost.value, lost.cause) == (None, "raised")
    assert pool.num_replaced == 0
