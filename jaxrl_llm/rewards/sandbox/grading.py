"""Grading programs by tests. The verdict is made out here, from outputs; no expected value enters the sandbox in which the program runs."""

import math
import pathlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.rewards.sandbox import asker, callee, literals
from jaxrl_llm.rewards.sandbox.backends import backend_of, choose, execute
from jaxrl_llm.rewards.sandbox.comparing import extract_code, same_output, same_value
from jaxrl_llm.rewards.sandbox.program import Execution, Limits, Program, Refused, Sandbox
from jaxrl_llm.rewards.sandbox.unit_tests import AssertTests, CallTests, StdioTests, Tests, read_tests
from jaxrl_llm.text_types import Completion, RewardFn


class Grade(NamedTuple):
  """How a program did.

  Attributes:
    passed: tests that it passed before the first that it did not, or of all where all are run.
    total: tests that there are.
    detail: the first failure, in one line; empty where there is none.
  """

  passed: int
  total: int
  detail: str = ""


def grade(source: str, tests: Tests, sandbox: Sandbox, *, total_s: float = 60.0, stop_early: bool = True) -> Grade:
  """Runs a program against tests.

  A program fails a test that it does not answer rightly, or not in time, whatever else it prints or does. All it can do is say what its
  own functions return; expected values, the tests' code and the nonce of a verdict are in this process or in another sandbox.

  Args:
    source: text of the program.
    tests: what it has to pass.
    sandbox: a sandbox that works; its time limit is for one test, or for all calls of one program.
    total_s: wall time for all tests, in seconds; what is not passed by then is failed.
    stop_early: whether the first failure ends it.

  Raises:
    Refused: the sandbox could not run it, so that nothing is known.
    ValueError: no tests.
  """
  run = {StdioTests: _stdio, CallTests: _calls, AssertTests: _asserts}[type(tests)]
  passed, detail = 0, ""
  for what in run(source, tests, sandbox, time.monotonic() + total_s):
    passed += not what
    detail = detail or what
    if what and stop_early:
      break
  count = 1 if isinstance(tests, AssertTests) else len(tests.cases)
  if count == 0:
    raise ValueError("grade: found no tests, expected at least one")
  return Grade(passed, count, " ".join(detail.split())[:300])


def _stdio(source: str, tests: StdioTests, sandbox: Sandbox, until: float) -> Iterator[str]:
  for i, (given, expected) in enumerate(tests.cases):
    if time.monotonic() >= until:
      yield f"test {i}: no time is left for it"
      continue
    found = _run(execute, Program(source, given), sandbox=sandbox, until=until)
    if found.status == "failed":
      yield f"test {i}: {found.cause} {found.stderr[-200:]}"
    else:
      yield "" if same_output(found.stdout, expected, tolerance=tests.tolerance) else f"test {i}: wrong output {found.stdout[:80]!r}"


def _calls(source: str, tests: CallTests, sandbox: Sandbox, until: float) -> Iterator[str]:
  questions = "".join(f"{literals.encode((tests.function, list(arguments), {}))}\n" for arguments, _ in tests.cases)
  found = _run(execute, _callee(f"{tests.setup}\n{source}", questions), sandbox=sandbox, until=until)
  answers = found.stdout.split("\n")[:-1]  # What follows the last line break was cut off.
  for i, (_, expected) in enumerate(tests.cases):
    if i >= len(answers):
      yield f"test {i}: no answer ({found.cause}) {found.stderr[-200:]}"
      continue
    try:
      good, value = literals.decode(answers[i])
      same = good is True and same_value(value, expected)
    except (RecursionError, TypeError, ValueError):
      yield f"test {i}: an answer that is no value"
      continue
    yield "" if same else f"test {i}: {'wrong value' if good is True else 'it raised'} {str(value)[:80]}"


def _asserts(source: str, tests: AssertTests, sandbox: Sandbox, until: float) -> Iterator[str]:
  converse = backend_of(sandbox).converse
  if converse is None:
    raise Refused(f"sandbox {sandbox.backend!r}: tests that are code need a back end on this machine, such as namespaces or docker")
  nonce = secrets.token_hex(16)
  files = {"literals.py": _source(literals), asker.GIVEN: tests.setup, asker.TESTS: tests.code}
  asking = Program(_source(asker), files=files, argv=(nonce, tests.entry_point))
  found = _run(converse, asking, _callee(f"{tests.setup}\n{source}", ""), sandbox=sandbox, until=until)
  said = found.stderr.split("\n")
  if f"{nonce} {asker.UNSENDABLE}" in said:
    raise Refused("tests pass something to the program that is no plain value")
  yield "" if f"{nonce} {asker.PASSED}" in said else found.cause or "a test failed"


def _run(run: Callable[..., Execution], *programs: Program, sandbox: Sandbox, until: float) -> Execution:
  """Runs programs in the time that is left."""
  limits = sandbox.limits._replace(timeout_s=max(0.1, min(until - time.monotonic(), sandbox.limits.timeout_s)))
  found = run(*programs, sandbox._replace(limits=limits))
  if found.status == "refused":
    raise Refused(found.cause)
  return found


def _callee(source: str, questions: str) -> Program:
  return Program(_source(callee), questions, {"literals.py": _source(literals), callee.CANDIDATE: source})


def _source(module: Any) -> str:
  return pathlib.Path(module.__file__).read_text(encoding="utf-8")


def code_tests(
  backend: str,
  *,
  timeout_s: float = 10.0,
  total_s: float = 60.0,
  memory_gb: float = 1.0,
  time_scale: float = 2.0,
  partial: bool = False,
  image: str = Sandbox().image,
  url: str = "",
) -> RewardFn:
  """A reward function: 1 where the program in a response passes all tests of its example, else 0.

  The program is the last fenced block. A response without one, or one that ran into the token budget, is worth 0. The reward function
  raises `Refused` where the sandbox does not run it: nothing is known then, and the sample is not to be learned from.

  Args:
    backend: a key of `BACKENDS`, or `auto`. There is no default: where the programs of a model run is for you to say.
    timeout_s: wall time of one test, in seconds, where its problem names none; of all calls, where tests are calls.
    total_s: wall time of all tests, in seconds. The deadline of whoever calls this has to be longer.
    memory_gb: address space of each process, in GiB; more where the problem allows more.
    time_scale: how many times a problem's own time limit a program is given: problems are set for one fast machine with nothing else to do.
    partial: whether a program earns the fraction of the tests that it passes.
    image: of the container, for `docker`.
    url: of the service, for `sandbox_fusion` and `piston`.

  Returns:
    The reward function, of a completion and an example as `read_tests` reads it.

  Raises:
    ValueError: a limit out of range, or a back end that does not work here, with what to do.
  """
  for name, value in dict(timeout_s=timeout_s, total_s=total_s, memory_gb=memory_gb, time_scale=time_scale).items():
    if not (value > 0 and math.isfinite(value)):
      raise ValueError(f"code_tests: found {name}={value}, expected more than 0")
  sandbox = choose(Sandbox(backend, Limits(timeout_s=timeout_s, memory_gb=memory_gb), image, url))

  def code_reward(completion: Completion, example: Mapping[str, Any]) -> float:
    tests = read_tests(example)
    source = extract_code(completion.text) if completion.stopped else None
    if source is None:
      return 0.0
    limits = sandbox.limits
    if isinstance(tests, StdioTests) and tests.seconds:
      limits = limits._replace(timeout_s=time_scale * tests.seconds)
    if isinstance(tests, StdioTests) and tests.megabytes:
      limits = limits._replace(memory_gb=max(limits.memory_gb, tests.megabytes / 1024))
    found = grade(source, tests, sandbox._replace(limits=limits), total_s=total_s, stop_early=not partial)
    return found.passed / found.total if partial else float(found.passed == found.total)

  return code_reward


def code_deadline_s(settings: Mapping[str, Any]) -> float:
  """Wall time of a call of the reward function, in seconds: that of all tests, and some for what surrounds them."""
  return settings["total_s"] + 30.0
