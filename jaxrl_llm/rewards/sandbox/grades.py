"""Grades of programs by tests.

The verdict is reached in this process, from outputs. No expected value enters the sandbox in which
the program runs.
"""

import math
import pathlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.rewards.sandbox import asker, callee, literals, prelude
from jaxrl_llm.rewards.sandbox.backends import BACKENDS, backend_of, choose, execute
from jaxrl_llm.rewards.sandbox.code_blocks import extract_code
from jaxrl_llm.rewards.sandbox.comparison import same_output, same_value
from jaxrl_llm.rewards.sandbox.program import Execution, Judge, Program, ProgramRefused, Sandbox, SandboxLimits
from jaxrl_llm.rewards.sandbox.unit_tests import AssertTests, CallTests, StdioTests, Tests, program_pattern, read_tests
from jaxrl_llm.settings.signature import Setting, settings_of
from jaxrl_llm.settings.values import ABOVE_ZERO, COUNT
from jaxrl_llm.text_types import Completion, RewardFn

_JUDGE = Judge()


class Grade(NamedTuple):
  """The result of testing a program.

  Attributes:
    passed: Number of tests passed: before the first failure, or of all if all are run.
    total: Number of tests.
    detail: First failure in one line; empty if there is none.
  """

  passed: int
  total: int
  detail: str = ""


def grade(
  source: str, tests: Tests, sandbox: Sandbox, *, judge: Judge = _JUDGE, total_s: float = 60.0, stop_early: bool = True
) -> Grade:
  """Runs a program against tests.

  A program fails a test if its answer is wrong or late, regardless of what else it prints or does.
  It can only report what its own functions return. Expected values, the code of the tests and the
  nonce of a verdict are in this process or in another sandbox.

  Args:
    source: Source of the program.
    tests: Tests of the program.
    sandbox: Working sandbox. Its time limit applies to one test, or to all calls of one program.
      The expected output raises its limit on output.
    judge: What the program has besides the language.
    total_s: Wall time for all tests, in seconds. Tests not passed by then are failed.
    stop_early: Whether to stop at the first failure.

  Raises:
    ProgramRefused: If the sandbox could not run the program, so that nothing is known.
    ValueError: If there are no tests.
  """
  failures_of = {StdioTests: _stdio_failures, CallTests: _call_failures, AssertTests: _assert_failures}[type(tests)]
  passed, detail = 0, ""
  for failure in failures_of(source, tests, sandbox, judge, time.monotonic() + total_s):
    passed += not failure
    detail = detail or failure
    if failure and stop_early:
      break
  count = 1 if isinstance(tests, AssertTests) else len(tests.cases)
  if count == 0:
    raise ValueError("grade: found no tests, expected at least one")
  return Grade(passed, count, " ".join(detail.split())[:300])


def _stdio_failures(source: str, tests: StdioTests, sandbox: Sandbox, judge: Judge, deadline: float) -> Iterator[str]:
  files = _candidate_files(source, judge)
  for i, (given, expected) in enumerate(tests.cases):
    if time.monotonic() >= deadline:
      yield f"test {i}: no time is left for it"
      continue
    program = Program(_source(prelude), given, files)
    execution = _run(execute, program, sandbox=_with_room(sandbox, len(expected.encode("utf-8", "surrogatepass"))), deadline=deadline)
    if execution.status == "failed":
      yield f"test {i}: {execution.cause} {execution.stderr[-200:]}"
    elif same_output(execution.stdout, expected, tolerance=tests.tolerance):
      yield ""
    else:
      yield f"test {i}: wrong output {execution.stdout[:80]!r}"


def _call_failures(source: str, tests: CallTests, sandbox: Sandbox, judge: Judge, deadline: float) -> Iterator[str]:
  questions = "".join(f"{literals.encode((tests.function, list(arguments), {}))}\n" for arguments, _ in tests.cases)
  answer_bytes = sum(len(literals.encode(expected)) for _, expected in tests.cases)
  program = _callee_program(_candidate_files(source, judge), questions)
  execution = _run(execute, program, sandbox=_with_room(sandbox, answer_bytes), deadline=deadline)
  answers = execution.stdout.split("\n")[:-1]  # An unfinished last line was cut off.
  for i, (_, expected) in enumerate(tests.cases):
    if i >= len(answers):
      yield f"test {i}: no answer ({execution.cause}) {execution.stderr[-200:]}"
      continue
    try:
      good, value = literals.decode(answers[i])
      same = good is True and same_value(value, expected, tolerance=tests.tolerance)
    except (RecursionError, TypeError, ValueError):
      yield f"test {i}: the answer is not a value"
      continue
    yield "" if same else f"test {i}: {'wrong value' if good is True else 'it raised'} {answers[i][:80]}"


def _assert_failures(source: str, tests: AssertTests, sandbox: Sandbox, judge: Judge, deadline: float) -> Iterator[str]:
  execute_pair = backend_of(sandbox).execute_pair
  if execute_pair is None:
    raise ProgramRefused(
      f"sandbox {sandbox.backend!r}: tests written as code need a back end on this machine, such as namespaces or docker"
    )
  nonce = secrets.token_hex(16)
  files = {"literals.py": _source(literals), asker.GIVEN: tests.setup, asker.TESTS: tests.code}
  asking = Program(_source(asker), files=files, argv=(nonce, tests.entry_point))
  # These tests were published with the prompt as the only source of imports.
  answering = _callee_program(_candidate_files(f"{tests.setup}\n{source}", judge._replace(imports=False)), "")
  execution = _run(execute_pair, asking, answering, sandbox=sandbox, deadline=deadline)
  reports = execution.stderr.split("\n")
  if f"{nonce} {asker.UNSENDABLE}" in reports:
    raise ProgramRefused("the tests pass an argument to the program that is not a plain value")
  yield "" if f"{nonce} {asker.PASSED}" in reports else execution.cause or "a test failed"


def _run(run_programs: Callable[..., Execution], *programs: Program, sandbox: Sandbox, deadline: float) -> Execution:
  """Runs programs in the remaining time.

  Raises:
    ProgramRefused: If the sandbox could not run them.
  """
  limits = sandbox.limits._replace(timeout_s=max(0.1, min(deadline - time.monotonic(), sandbox.limits.timeout_s)))
  execution = run_programs(*programs, sandbox._replace(limits=limits))
  if execution.status == "refused":
    raise ProgramRefused(execution.cause)
  return execution


def _with_room(sandbox: Sandbox, expected_bytes: int) -> Sandbox:
  """Raises the limit on output to twice the expected output; spaces may differ."""
  limits = sandbox.limits
  return sandbox._replace(limits=limits._replace(file_kb=max(limits.file_kb, expected_bytes >> 9)))


def _candidate_files(source: str, judge: Judge) -> dict[str, str]:
  return {prelude.CANDIDATE: source, prelude.SETTINGS: f"{int(judge.imports)} {judge.recursion_limit}"}


def _callee_program(files: Mapping[str, str], questions: str) -> Program:
  return Program(_source(callee), questions, {"literals.py": _source(literals), "prelude.py": _source(prelude), **files})


def _source(module: Any) -> str:
  return pathlib.Path(module.__file__).read_text(encoding="utf-8")


RULES = dict.fromkeys(("timeout_s", "total_s", "memory_gb", "output_mb", "time_scale"), ABOVE_ZERO) | {"recursion_limit": COUNT}
"""Legal values of the settings of `code_tests`; others have a type."""


def settings_of_backend(backend: str) -> dict[str, Setting]:
  """Returns the settings of programs in a back end, for the section `sandbox` of a config.

  Example:
    >>> "image" in settings_of_backend("docker"), "image" in settings_of_backend("namespaces"), settings_of_backend("off")
    (True, False, {})
  """
  if backend == "off":
    return {}
  own = BACKENDS[backend].own if backend in BACKENDS else ()
  others = {name for row in BACKENDS.values() for name in row.own} - {*own}
  return {name: x for name, x in settings_of(code_tests, RULES).items() if name not in (*others, "partial")}


def code_tests(
  backend: str,
  *,
  timeout_s: float = 10.0,
  total_s: float = 60.0,
  memory_gb: float = 1.0,
  output_mb: float = 4.0,
  time_scale: float = 2.0,
  imports: bool = _JUDGE.imports,
  recursion_limit: int = _JUDGE.recursion_limit,
  partial: bool = False,
  image: str = Sandbox().image,
  url: str = "",
) -> RewardFn:
  """Makes a reward that is 1 if the program in a response passes all tests of its example, else 0.

  `extract_code` finds the program: of blocks marked Python, the last that defines the function
  under test or reads standard input. A response without a program, or one that was cut off by the
  token budget, earns 0.

  Args:
    backend: Key of `BACKENDS`, or `auto`. There is no default: it is your decision where the
      programs of a model run.
    timeout_s: Wall time of one test, in seconds, unless the problem has a limit of its own; wall
      time of all calls, if the tests are calls.
    total_s: Wall time of all tests, in seconds. The time limit of a call of the reward function
      must be longer.
    memory_gb: Address space of each process, in GiB. A larger limit of the problem takes
      precedence.
    output_mb: Output of a program, in MiB. It may always write twice as much as is expected.
    time_scale: Factor on the time limit of a problem. Such limits are set for one fast, idle
      machine.
    imports: Whether a program has the names that LiveCodeBench's judge imports, such as `heappush`
      and `inf`; see `Judge`.
    recursion_limit: Largest number of frames of a program's stack.
    partial: Whether a program earns the fraction of the tests that it passes.
    image: Image of the container, for `docker`.
    url: Address of the service, for `sandbox_fusion` and `piston`.

  Returns:
    The reward function. `read_tests` describes the examples. It raises `ProgramRefused` if the
    sandbox does not run the program: the reward is then unknown, and the sample must not be learned
    from.

  Raises:
    ValueError: If a limit is out of range, or the back end does not work on this machine. One line,
      with the fix.
  """
  amounts = dict(
    timeout_s=timeout_s, total_s=total_s, memory_gb=memory_gb, output_mb=output_mb, time_scale=time_scale, recursion_limit=recursion_limit
  )
  for name, value in amounts.items():
    if not (value > 0 and math.isfinite(value)):
      raise ValueError(f"code_tests: found {name}={value}, expected more than 0")
  limits = SandboxLimits(timeout_s=timeout_s, memory_gb=memory_gb, file_kb=math.ceil(output_mb * 1024))
  sandbox, judge = choose(Sandbox(backend, limits, image, url)), Judge(imports, recursion_limit)

  def code_reward(completion: Completion, example: Mapping[str, Any]) -> float:
    tests = read_tests(example)
    source = extract_code(completion.text, wanted=program_pattern(tests)) if completion.stopped else None
    if source is None:
      return 0.0
    limits = sandbox.limits
    if isinstance(tests, StdioTests) and tests.seconds:
      limits = limits._replace(timeout_s=time_scale * tests.seconds)
    if isinstance(tests, StdioTests) and tests.megabytes:
      limits = limits._replace(memory_gb=max(limits.memory_gb, tests.megabytes / 1024))
    result = grade(source, tests, sandbox._replace(limits=limits), judge=judge, total_s=total_s, stop_early=not partial)
    return result.passed / result.total if partial else float(result.passed == result.total)

  return code_reward


def code_deadline_s(settings: Mapping[str, Any]) -> float:
  """Returns the time limit of a call in seconds: that of all tests, plus 30 s for the rest."""
  return settings["total_s"] + 30.0
