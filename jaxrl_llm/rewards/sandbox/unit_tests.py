"""How programs are tested, and tests from the published forms of examples."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.messages import one_line


class StdioTests(NamedTuple):
  """Tests by what a program prints: LiveCodeBench, CodeForces.

  Attributes:
    cases: standard input and expected standard output of each.
    tolerance: how far numbers may be off, absolutely or relatively; None compares texts.
    seconds: the problem's own time limit for one case; None where it has none.
    megabytes: the problem's own memory limit; None where it has none.
  """

  cases: Sequence[tuple[str, str]]
  tolerance: float | None = None
  seconds: float | None = None
  megabytes: float | None = None


class CallTests(NamedTuple):
  """Tests by what a function returns: LiveCodeBench's functional ones.

  Attributes:
    function: its name; a method of `Solution` where there is no function of that name.
    cases: positional arguments and expected value of each. Tuples and lists that hold the same are the same.
    setup: source in front of the program's.
  """

  function: str
  cases: Sequence[tuple[Sequence[Any], Any]]
  setup: str = ""


class AssertTests(NamedTuple):
  """Tests that are code: HumanEval, MBPP.

  Attributes:
    code: raises where something is wrong, and calls the program's functions by name.
    entry_point: the function that is tested; empty where `code` says it all.
    setup: source in front of both the program's and the tests'.
  """

  code: str
  entry_point: str = ""
  setup: str = ""


Tests = StdioTests | CallTests | AssertTests
"""How a program is tested."""

_CALL_SETUP = "from typing import *\nimport collections, functools, heapq, itertools, math, re, string\n"
"""What LeetCode gives a solution without being asked, and LiveCodeBench too."""


def read_tests(example: Mapping[str, Any]) -> Tests:
  """An example's tests.

  Args:
    example: a row whose `tests` are JSON or what JSON gives, in one of the forms that this package's tasks have:
      `{"kind": "stdin", "cases": [{"input": ..., "output": ...}], "seconds": ..., "megabytes": ...}`,
      `{"kind": "call", "function": ..., "cases": ...}` with an argument in JSON per line of input, `{"kind": "check", "function": ...,
      "prompt": ..., "code": ...}` where `code` defines `check(candidate)`; or a bare list of cases, or a list of asserts.

  Raises:
    ValueError: none of these. One line.

  Example:
    >>> read_tests({"tests": [{"input": "1 2", "output": "3"}]}).cases
    [('1 2', '3')]
    >>> read_tests({"tests": '["assert add(1, 2) == 3"]'}).code
    'assert add(1, 2) == 3'
  """
  try:
    tests = example["tests"]
    tests = json.loads(tests) if isinstance(tests, str | bytes) else tests
    if isinstance(tests, list | tuple) and tests and all(isinstance(test, str) for test in tests):
      return AssertTests("\n".join(tests))
    tests = tests if isinstance(tests, Mapping) else {"kind": "stdin", "cases": tests}
    if tests["kind"] == "stdin":
      cases = [(str(case["input"]), str(case["output"])) for case in tests["cases"]]
      return StdioTests(cases, tests.get("tolerance"), tests.get("seconds"), tests.get("megabytes"))
    if tests["kind"] == "call":
      lines = [[json.loads(line) for line in case["input"].split("\n") if line.strip()] for case in tests["cases"]]
      expected = [json.loads(case["output"]) for case in tests["cases"]]
      return CallTests(tests["function"], list(zip(lines, expected, strict=True)), tests.get("setup", _CALL_SETUP))
    if tests["kind"] == "check":
      return AssertTests(f"{tests['code']}\ncheck({tests['function']})\n", tests["function"], tests.get("prompt", ""))
    raise KeyError(tests["kind"])
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"code_tests: cannot read `tests` of an example with {sorted(example)} ({one_line(error, limit=120)}), expected cases or asserts"
    ) from None
