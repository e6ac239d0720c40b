"""A program for a sandbox that executes a candidate's source and answers calls of its functions.

Each line of input is a call, and each line of output an answer. The program knows the arguments but
no expected value. Its answers are claims that are compared outside: whatever the candidate does to
this process, it can only answer. In its sandbox, the program imports nothing from the package.
"""

import os
import sys

if __name__ == "__main__":  # In the sandbox, where both modules are in the same folder.
  sys.path.insert(0, os.getcwd())
  from literals import Unsendable, decode, encode
  from prelude import run_candidate
else:
  from jaxrl_llm.rewards.sandbox.literals import Unsendable, decode, encode
  from jaxrl_llm.rewards.sandbox.prelude import run_candidate


def answer(namespace, line: str) -> str:
  """Answers one call.

  Args:
    namespace: Namespace of the candidate. Its function is called, or else a method of a new
      `Solution`, as on LeetCode.
    line: Encoded name, positional arguments and keyword arguments.

  Returns:
    The encoded answer: `(True, value)`, or `(False, (type, message))` for an exception.

  Example:
    >>> decode(answer({"f": lambda x: x + 1}, encode(("f", [1], {}))))
    (True, 2)
    >>> decode(answer({"Solution": str}, encode(("upper", [], {}))))
    (True, '')
  """
  name, args, kwargs = decode(line)
  try:
    is_method = name not in namespace and "Solution" in namespace
    function = getattr(namespace["Solution"](), name) if is_method else namespace[name]
    return encode((True, function(*args, **kwargs)))
  except BaseException as error:
    kind = "TypeError" if isinstance(error, Unsendable) else type(error).__name__
    return encode((False, (kind, str(error)[:200])))


def main() -> None:
  """Answers calls from standard input on standard output, neither of which the candidate sees."""
  calls, answers = os.fdopen(os.dup(0), encoding="ascii"), os.fdopen(os.dup(1), "w", encoding="ascii")
  nothing = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1):
    os.dup2(nothing, fd)
  namespace = {"__name__": "candidate"}
  run_candidate(namespace)
  for line in calls:
    print(answer(namespace, line), file=answers, flush=True)
  os._exit(0)


if __name__ == "__main__":
  main()
