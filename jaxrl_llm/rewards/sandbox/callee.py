"""Runs inside a sandbox: executes a candidate's source and answers calls of its functions, a line for a line.

It knows arguments and no expected value, and what it answers is a claim that somebody outside compares: whatever the candidate does to this
process, it can only answer. Loads nothing of the package.
"""

import os
import sys

if __name__ == "__main__":  # In the sandbox, where its neighbour lies beside it.
  sys.path.insert(0, os.getcwd())
  from literals import Unsendable, decode, encode
else:
  from jaxrl_llm.rewards.sandbox.literals import Unsendable, decode, encode

CANDIDATE = "candidate.py"


def answer(namespace, line: str) -> str:
  """The answer to one call, encoded: `(True, value)`, or `(False, (type, message))` of what was raised.

  Args:
    namespace: of the candidate: its function is called, or a method of a new `Solution`, as LeetCode has it.
    line: name, positional and keyword arguments, encoded.

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
  """Answers calls from standard input on standard output; the candidate sees neither."""
  calls, answers = os.fdopen(os.dup(0), encoding="ascii"), os.fdopen(os.dup(1), "w", encoding="ascii")
  nothing = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1):
    os.dup2(nothing, fd)
  sys.setrecursionlimit(10_000)
  namespace = {"__name__": "candidate"}
  with open(CANDIDATE, encoding="utf-8", errors="surrogateescape") as file:
    source = file.read()
  exec(compile(source, CANDIDATE, "exec"), namespace)
  for line in calls:
    print(answer(namespace, line), file=answers, flush=True)
  os._exit(0)


if __name__ == "__main__":
  main()
