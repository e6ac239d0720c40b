"""Runs inside a sandbox of its own: executes tests written as asserts, and has a candidate in another sandbox answer their calls.

The candidate's code never enters this process: its functions are stand-ins here, which send their arguments out and get plain values back.
So it can read neither the expected values nor the nonce that vouches for the verdict. Loads nothing of the package.

  main.py NONCE ENTRY_POINT
"""

import ast
import builtins
import os
import pathlib
import sys

if __name__ == "__main__":  # In the sandbox, where its neighbour lies beside it.
  sys.path.insert(0, os.getcwd())
  from literals import MAX_CHARS, Unsendable, decode, encode
else:
  from jaxrl_llm.rewards.sandbox.literals import MAX_CHARS, Unsendable, decode, encode

GIVEN, TESTS = "given.py", "tests.py"
PASSED, FAILED, UNSENDABLE = "passed", "failed", "unsendable"


def free_names(source: str) -> set[str]:
  """Names that a source reads.

  Example:
    >>> sorted(free_names("assert add(1, x) == len('ab')"))
    ['add', 'x']
  """
  nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
  return {node.id for node in nodes} - set(dir(builtins))


def stand_in(name: str, calls, answers, failures: list[str]):
  """A function that has the candidate's function of that name called; notes in `failures` arguments that cannot be sent."""

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
    raise (raised if honest else RuntimeError)(message)  # A StopIteration would end `all(map(...))` of the tests, as if all were well.

  return call


def verdict(given: str, tests: str, entry_point: str, calls, answers) -> str:
  """Whether a candidate passes: `passed`, `failed`, or `unsendable` where a call could not be sent, which is not the candidate's fault.

  Args:
    given: source that the tests may use; what it defines is not asked of the candidate, except for `entry_point`.
    tests: source of the tests.
    entry_point: name of the function under test, or empty.
    calls: file to which calls are written.
    answers: file from which their answers are read.
  """
  failures: list[str] = []
  namespace = {"__name__": "tests"}
  try:
    exec(compile(given, GIVEN, "exec"), namespace)
    for name in free_names(tests) - set(namespace) | ({entry_point} - {""}):
      namespace[name] = stand_in(name, calls, answers, failures)
    exec(compile(tests, TESTS, "exec"), namespace)
    result = PASSED
  except BaseException:  # An assert that does not hold, or a candidate that is gone.
    result = FAILED
  return UNSENDABLE if failures else result


def main() -> None:
  """Asks on standard output, hears on standard input, and writes its verdict to standard error, with the nonce in front."""
  nonce, entry_point = sys.argv[1:3]
  answers, calls, said = os.fdopen(os.dup(0), encoding="ascii"), os.fdopen(os.dup(1), "w", encoding="ascii"), os.fdopen(os.dup(2), "w")
  nothing = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1, 2):  # What tests print belongs to nobody.
    os.dup2(nothing, fd)
  given, tests = (pathlib.Path(name).read_text(encoding="utf-8") for name in (GIVEN, TESTS))
  print(f"{nonce} {verdict(given, tests, entry_point, calls, answers)}", file=said, flush=True)
  os._exit(0)


if __name__ == "__main__":
  main()
