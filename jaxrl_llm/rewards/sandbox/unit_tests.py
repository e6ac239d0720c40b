"""Tests of programs, and their parser for the published forms of examples."""

import json
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from jaxrl_llm.messages import one_line
from jaxrl_llm.rewards.sandbox.comparison import TOLERANCE


class StdioTests(NamedTuple):
  """Tests of a program's output, as in LiveCodeBench and CodeForces.

  Attributes:
    cases: Standard input and expected standard output of each case.
    tolerance: Absolute or relative error allowed where a float is expected.
    seconds: Time limit of the problem for one case, in seconds; None if it has none.
    megabytes: Memory limit of the problem, in MiB; None if it has none.
  """

  cases: Sequence[tuple[str, str]]
  tolerance: float = TOLERANCE
  seconds: float | None = None
  megabytes: float | None = None


class CallTests(NamedTuple):
  """Tests of a function's return values, as in the functional tests of LiveCodeBench.

  Attributes:
    function: Name of the function, or of a method of `Solution` if there is no such function.
    cases: Positional arguments and expected value of each case. A tuple and a list with the same
      items are equal.
    tolerance: Absolute or relative error allowed where a float is expected.
  """

  function: str
  cases: Sequence[tuple[Sequence[Any], Any]]
  tolerance: float = TOLERANCE


class AssertTests(NamedTuple):
  """Tests written as code, as in HumanEval and MBPP.

  Attributes:
    code: Source that calls the program's functions by name and raises an exception on any error.
    entry_point: Name of the function under test; empty if `code` calls all functions by name.
    setup: Source placed in front of both the program and the tests.
  """

  code: str
  entry_point: str = ""
  setup: str = ""


Tests = StdioTests | CallTests | AssertTests
"""Tests of one program."""


def read_tests(example: Mapping[str, Any]) -> Tests:
  """Reads the tests of an example.

  The tests are in one of the forms of this package's tasks:

  - `{"kind": "stdin", "cases": [{"input": ..., "output": ...}], "seconds": ..., "megabytes": ...}`,
  - `{"kind": "call", "function": ..., "cases": ...}` with one argument in JSON per line of input,
  - `{"kind": "check", "function": ..., "prompt": ..., "code": ...}` where `code` defines
    `check(candidate)`,
  - a bare list of cases with input and output,
  - a list of asserts.

  The first two may have a `tolerance` of their own.

  Args:
    example: Row whose field `tests` holds the tests, as JSON or as decoded JSON.

  Raises:
    ValueError: If the tests have none of these forms. One line.

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
    tolerance = float(tests.get("tolerance", TOLERANCE))
    if tests["kind"] == "stdin":
      cases = [(str(case["input"]), str(case["output"])) for case in tests["cases"]]
      return StdioTests(cases, tolerance, tests.get("seconds"), tests.get("megabytes"))
    if tests["kind"] == "call":
      lines = [[_value(line) for line in case["input"].split("\n") if line.strip()] for case in tests["cases"]]
      expected = [_value(case["output"]) for case in tests["cases"]]
      return CallTests(tests["function"], list(zip(lines, expected, strict=True)), tolerance)
    if tests["kind"] == "check":
      return AssertTests(f"{tests['code']}\ncheck({tests['function']})\n", tests["function"], tests.get("prompt", ""))
    raise KeyError(tests["kind"])
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f"code_tests: cannot read `tests` of an example with {sorted(example)} ({one_line(error, limit=120)}), expected cases or asserts"
    ) from None


_READS_INPUT = re.compile(r"\binput\s*\(|[(=,]\s*input\b|\bstdin\b|\bfileinput\b|\bopen\(\s*0\b|\bos\.read\(")
_CALLED = re.compile(r"\b([^\W\d]\w*)[ \t]*\(")


def program_pattern(tests: Tests) -> re.Pattern[str]:
  """Returns a pattern of programs that tests can run, to tell them from examples of their use.

  Example:
    >>> bool(program_pattern(CallTests("f", [([], 1)])).search("class Solution:\\n  def f(self): ..."))
    True
    >>> bool(program_pattern(StdioTests([("1", "1")])).search("print(f(3))"))
    False
  """
  if isinstance(tests, StdioTests):
    return _READS_INPUT
  names = {tests.function} if isinstance(tests, CallTests) else {tests.entry_point} - {""} or set(_CALLED.findall(tests.code))
  name = "|".join(map(re.escape, sorted(names)))
  return re.compile(rf"^[ \t]*(?:(?:(?:async[ \t]+)?def|class)[ \t]+(?:{name})\b|(?:{name})[ \t]*=(?!=))", re.MULTILINE)


def _value(text: str) -> Any:
  """Reads a value in JSON, which may have integers of more digits than `int` takes."""
  try:
    return json.loads(text)
  except ValueError:
    return json.loads(text, parse_int=lambda digits: int(Decimal(digits)))
