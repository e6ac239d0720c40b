"""A program for a sandbox that executes tests written as asserts; a candidate answers their calls.

The candidate runs in another sandbox, and its code never enters this process. Its functions are
stand-ins here, which send out their arguments and get back plain values. The candidate can
therefore read neither the expected values nor the nonce that authenticates the verdict. In its
sandbox, this program imports nothing from the package.

  main.py NONCE ENTRY_POINT
"""

import ast
import builtins
import os
import pathlib
import sys

if __name__ == "__main__":  # In the sandbox, where `literals.py` is in the same folder.
  sys.path.insert(0, os.getcwd())
  from literals import MAX_CHARS, Unsendable, decode, encode
else:
  from jaxrl_llm.rewards.sandbox.literals import MAX_CHARS, Unsendable, decode, encode

GIVEN, TESTS = "given.py", "tests.py"
PASSED, FAILED, UNSENDABLE = "passed", "failed", "unsendable"


def free_names(source: str) -> set[str]:
  """Returns the names that a source reads, without built-in ones.

  Example:
    >>> sorted(free_names("assert add(1, x) == len('ab')"))
    ['add', 'x']
  """
  nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
  return {node.id for node in nodes} - set(dir(builtins))


def make_stand_in(name: str, calls, answers, failures: list[str]):
  """Makes a function that calls the candidate's function of the same name.

  Args:
    name: Name of the function.
    calls: File to which calls are written.
    answers: File from which answers are read.
    failures: List to which a message is appended for each call whose arguments cannot be sent.
  """

  def call(*args, **kwargs):
    try:
      line = encode((name, list(args), kwargs))
    except Unsendable as error:
      failures.append(f"{name}: {error}")
      raise
    calls.write(line + "\n")
    calls.flush()
    good, value = decode(answers.readline(MAX_CHARS + 1))
    if good:
      return value
    kind, message = value
    raised = getattr(builtins, str(kind), RuntimeError)
    honest = isinstance(raised, type) and issubclass(raised, Exception) and not issubclass(raised, StopIteration | StopAsyncIteration)
    # A StopIteration would end an `all(map(...))` in the tests as if every case held.
    raise (raised if honest else RuntimeError)(message)

  return call


def verdict(given: str, tests: str, entry_point: str, calls, answers) -> str:
  """Runs the tests of a candidate.

  Args:
    given: Source that the tests may use. Functions defined there are not called in the candidate,
      except for `entry_point`.
    tests: Source of the tests.
    entry_point: Name of the function under test, or empty.
    calls: File to which calls are written.
    answers: File from which answers are read.

  Returns:
    `passed`, `failed`, or `unsendable` if a call could not be sent, which is not the candidate's
    fault.
  """
  failures: list[str] = []
  namespace = {"__name__": "tests"}
  try:
    exec(compile(given, GIVEN, "exec"), namespace)
    for name in free_names(tests) - set(namespace) | ({entry_point} - {""}):
      namespace[name] = make_stand_in(name, calls, answers, failures)
    exec(compile(tests, TESTS, "exec"), namespace)
    result = PASSED
  except BaseException:  # An assert does not hold, or the candidate is gone.
    result = FAILED
  return UNSENDABLE if failures else result


def main() -> None:
  """Writes calls to standard output, reads answers from standard input, and reports the verdict.

  The verdict goes to standard error, with the nonce in front.
  """
  nonce, entry_point = sys.argv[1:3]
  answers, calls, report = (
    os.fdopen(os.dup(0), encoding="ascii"), os.fdopen(os.dup(1), "w", encoding="ascii"), os.fdopen(os.dup(2), "w")
  )
  nothing = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1, 2):  # Output of the tests is dropped.
    os.dup2(nothing, fd)
  sys.set_int_max_str_digits(0)  # Tests may be of long integers.
  given, tests = (pathlib.Path(name).read_text(encoding="utf-8") for name in (GIVEN, TESTS))
  print(f"{nonce} {verdict(given, tests, entry_point, calls, answers)}", file=report, flush=True)
  os._exit(0)


if __name__ == "__main__":
  main()
