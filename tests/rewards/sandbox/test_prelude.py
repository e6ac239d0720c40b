"""The environment of a program: names, recursion, long integers, output, values of NumPy."""

import json

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.rewards.sandbox import CallTests, Judge, SandboxLimits, StdioTests, code_tests, grade, read_tests
from jaxrl_llm.rewards.sandbox.prelude import IMPORTS, reads_unbound_names
from jaxrl_llm.text_types import Completion
from tests.rewards.sandbox.test_grades import LOCAL, needs_namespaces
from tests.runs import ROOT

# Expressions of solutions that were published without their imports.
PROVIDED = """
defaultdict(int), Counter("a"), deque(), OrderedDict(), collections.Counter()
heappush([], 1), heapq.heapify([]), heappop([1]), nlargest(1, [1])
inf, sqrt(4), gcd(4, 6), comb(3, 2), math.pi, floor(1.5)
lru_cache(None), cache(abs), reduce(add, [1]), functools.partial(abs)
bisect.bisect([1], 1), bisect_left([1], 1), insort([1], 1)
accumulate([1]), permutations([1]), product([1]), itertools.count()
sys.maxsize, sys.stdin, stdin, random.random(), randint(1, 2), choice([1])
List[int], Optional[int], typing.List, Tuple[int, str]
re.sub("a", "b", "c"), json.dumps(1), loads("1"), string.digits, ascii_lowercase
datetime.datetime, timedelta(1), deepcopy([1]), copy.copy(1), operator.add, itemgetter(0)
StringIO(), io.StringIO(), statistics.mean([1]), median([1])
"""


def passed(source, tests, sandbox=LOCAL):
  return grade(source, tests, sandbox).passed


@needs_namespaces
def test_names_that_judges_import():
  """All at once, because each program takes a tenth of a second."""
  source = f"from __future__ import annotations\nfirst = [\n{','.join(PROVIDED.strip().splitlines())}\n]\n"
  printed = grade(f"{source}print(1)", StdioTests([("", "1")]), LOCAL)
  assert printed.passed == 1, printed
  assert passed(f"{source}\nclass Solution:\n  def f(self, x: List[int]): return x", CallTests("f", [([1], 1)])) == 1
  alone = grade("print(inf)", StdioTests([("", "inf")]), LOCAL, judge=Judge(imports=False))
  assert "NameError: name 'inf'" in alone.detail


@needs_namespaces
@pytest.mark.parametrize("name", ["add", "gcd"])
def test_an_imported_name_is_no_function_of_the_program(name):
  tests = CallTests(name, [([2, 3], 6)])
  assert passed(f"class Solution:\n  def {name}(self, x: List[int], y): return x * y", tests) == 1
  imported = tests._replace(cases=[([4, 4], {"add": 8}.get(name, 4))])
  assert passed("def other(x: List[int], y): return x * y", imported) == 0


@pytest.mark.parametrize(
  ("source", "reads"),
  [
    ("import sys\nfor x in sys.stdin: print(x)", False),
    ("from heapq import heappush\nclass A:\n  def f(self): return heappush([], self.x)", False),
    ("def f():\n  global inf\n  inf = 1\nf()\nprint(inf)", False),
    ("if __name__ == '__main__': print(__file__)", False),
    ("try:\n  x = 1\nexcept ValueError as e: print(e)\nprint([y for y in [x]], lambda z: z)", False),
    ("print(inf)", True),
    ("def f():\n  inf = 1\n  return inf\nprint(inf)", True),
    ("class A:\n  def f(self, x: List[int]): return x", True),
    ("from math import *\nprint(pi)", True),
    ("print(eval('inf'))", True),
  ],
)
def test_unbound_names(source, reads):
  assert reads_unbound_names(source) is reads


def test_the_imports_override_no_built_in_function():
  names: dict = {}
  exec(IMPORTS, names)
  builtins = names.pop("__builtins__")
  assert not [name for name in names if name in builtins and names[name] is not builtins[name]]


@needs_namespaces
@pytest.mark.parametrize(
  ("source", "given", "expected"),
  [
    ("def f(n): return n and 1 + f(n - 1)\nprint(f(int(input())))", "45000", "45000"),
    # Twice as many frames, with frames of C between them.
    ("@cache\ndef f(n): return n and 1 + f(n - 1)\nprint(f(int(input())))", "20000", "20000"),
    ("print(10 ** 5000)", "", "1" + "0" * 5000),
    ("print(int(input()) + 1)", "1" + "0" * 4999 + "1", "1" + "0" * 4999 + "2"),
    ("import __main__\nclass A: pass\nif __name__ == '__main__': print(__main__.A is A)", "", "True"),
  ],
)
def test_programs_that_judges_accept(source, given, expected):
  result = grade(source, StdioTests([(given, expected)]), LOCAL)
  assert result.passed == 1, result.detail


@needs_namespaces
def test_errors_name_the_lines_of_the_program():
  detail = grade("import sys\n\nprint(inf)\nraise ValueError('no')", StdioTests([("", "")]), LOCAL).detail
  assert 'File "candidate.py", line 4' in detail and detail.endswith("ValueError: no")


@needs_namespaces
@pytest.mark.parametrize(
  "count, file_kb", [(20_000, 16), pytest.param(700_000, SandboxLimits().file_kb, marks=pytest.mark.slow)]
)
def test_an_output_above_the_limit(count, file_kb):
  """The expected output raises the limit: 700,000 numbers have 4.8 MB."""
  expected, program = "\n".join(map(str, range(count))), f"print('\\n'.join(map(str, range({count}))))"
  box = LOCAL._replace(limits=LOCAL.limits._replace(file_kb=file_kb))
  assert passed(program, StdioTests([("", expected)]), box) == 1
  assert grade(program, StdioTests([("", "0")]), box).detail.startswith("test 0: output")
  assert passed("def f(n): return [*range(n)]", CallTests("f", [([count], [*range(count)])]), box) == 1


@needs_namespaces
def test_an_argument_of_a_megabyte():
  assert passed("def f(xs): return len(xs)", CallTests("f", [([[10**9] * 100_000], 100_000)])) == 1


@needs_namespaces
def test_long_integers_of_calls():
  digits = "1" + "0" * 4999 + "1"
  cases = [{"input": digits, "output": digits}, {"input": "[1]", "output": f"[{digits}]"}]
  tests = read_tests({"tests": json.dumps({"kind": "call", "function": "f", "cases": cases})})
  assert passed("def f(x): return x if x != [1] else [10 ** 5000 + 1]", tests) == 2
  assert grade("def f(x): return 10 ** 5000", tests, LOCAL).detail.startswith("test 0: wrong value")


@needs_namespaces
def test_returned_scalars_and_arrays_of_numpy():
  """The sandbox may have no NumPy, so that a class has its interface."""
  source = "class Array:\n  def __init__(self, x): self.x = x\n  def tolist(self): return self.x\n"
  tests = CallTests("f", [([], [3, 0.5, True, [1, 2]])])
  assert passed(f"{source}def f(): return Array(3), Array(0.5), Array(True), Array([1, 2])", tests) == 1
  assert passed(f"{source}def f(): return Array(f)", tests) == 0


@needs_namespaces
def test_published_rows(tmp_path):
  """Rows of LiveCodeBench, as a run reads and judges them."""
  task = tasks.make("livecodebench", source=ROOT / "tests/tasks/fixtures/livecodebench", data_dir=tmp_path)
  reward = code_tests("namespaces", timeout_s=20.0)
  programs = (
    "a, b = map(int, input().split())\nprint(a + b)",
    "class Solution:\n  def double(self, n: int) -> int:\n    return 2 * n",
  )
  behind = ("It prints:\n```\n3\n```", "Use it:\n```python\nprint(Solution().double(4))\n```")
  for row, program, text in zip(task.test, programs, behind, strict=True):
    floats, wrong = (
      program.replace("2 *", f"{a} *").replace("a +", f"a {b} +") for a, b in (("2.0", "+ 0.0"), ("3", "- 1"))
    )
    for code, value in ((program, 1.0), (floats, 1.0), (wrong, 0.0)):
      assert reward(Completion(f"```python\n{code}\n```\n{text}", (), 9, True), row) == value
