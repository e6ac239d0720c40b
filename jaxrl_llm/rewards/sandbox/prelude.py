"""What judges of programming problems give to a program: names, deep recursion and long integers.

As a program for a sandbox, it runs a candidate that reads its input and writes its output. In its
sandbox, it imports nothing from the package.
"""

import builtins
import sys

CANDIDATE = "candidate.py"
# Whether the names of `IMPORTS` are there, 0 or 1, and the largest number of frames.
SETTINGS = "settings.txt"

IMPORTS = """
from string import *
from re import *
from datetime import *
from collections import *
from heapq import *
from bisect import *
from copy import *
from math import *
from random import *
from statistics import *
from itertools import *
from functools import *
from operator import *
from io import *
from sys import *
from json import *
from builtins import *
from typing import *
import string, re, datetime, collections, heapq, bisect, copy, math, random
import statistics, itertools, functools, operator, io, sys, json, typing
"""
"""Imports of LiveCodeBench's judge, in its order, and `typing`."""

# Names that a program gets only when it runs may be any.
_DYNAMIC = {"eval", "exec", "globals", "locals", "vars"}


def reads_unbound_names(source: bytes | str) -> bool:
  """Returns whether a program may read a global name that is neither its own nor built in.

  Example:
    >>> reads_unbound_names("from math import inf\\nx = inf"), reads_unbound_names("def f(): return inf")
    (False, True)
  """
  import symtable

  read, bound, tables = set(), set(dir(builtins)) - _DYNAMIC, [symtable.symtable(source, CANDIDATE, "exec")]
  while tables:
    table = tables.pop()
    tables += table.get_children()
    for symbol in table.get_symbols():
      if table.get_type() == "module" or symbol.is_global():
        if symbol.is_referenced():
          read.add(symbol.get_name())
        if symbol.is_assigned() or symbol.is_imported():
          bound.add(symbol.get_name())
  return any(not name.startswith("__") for name in read - bound)


def run_candidate(namespace: dict) -> None:
  """Runs the source in `CANDIDATE` in a namespace, as `SETTINGS` says.

  Lines in error messages are those of the source. The imports take some 10 ms, so they are made
  only for a program that needs one. Their names are built in, so that none of them can be taken for
  a function of the program.
  """
  with open(SETTINGS, encoding="ascii") as file:
    imports, recursion_limit = map(int, file.read().split())
  sys.setrecursionlimit(recursion_limit)
  if hasattr(sys, "set_int_max_str_digits"):  # A container may have an earlier Python.
    sys.set_int_max_str_digits(0)
  with open(CANDIDATE, "rb") as file:
    source = file.read()
  code = compile(source, CANDIDATE, "exec", dont_inherit=True)
  if imports and reads_unbound_names(source):
    names: dict = {}
    exec(IMPORTS, names)
    namespace["__builtins__"] = vars(builtins) | {
      name: value for name, value in names.items() if name != "__builtins__"
    }
  exec(code, namespace)


def main() -> None:
  """Runs the candidate as the main module of this process."""
  module, original = type(sys)("__main__"), sys.modules["__main__"]
  module.__file__, sys.modules["__main__"] = CANDIDATE, module
  run_candidate(vars(module))
  del original  # The names in this file live until here.


if __name__ == "__main__":
  main()
