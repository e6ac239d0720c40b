"""Finding a program in a response, and comparing what it gave with what it should have."""

import itertools
import math
from typing import Any

_PYTHON = ("", "py", "python", "python3")


def extract_code(text: str) -> str | None:
  """The last closed fenced block of a response that is marked as Python or not at all, without its fences; None without one.

  Example:
    >>> extract_code("So:\\n```python\\nprint(1)\\n```\\nIt prints:\\n```text\\n1\\n```")
    'print(1)'
  """
  found, lines, language = None, None, ""
  for line in text.split("\n"):
    if line.lstrip().startswith("```"):
      if lines is None:
        lines, language = [], line.strip().strip("`").strip().lower()
      else:
        found = "\n".join(lines) if language in _PYTHON else found
        lines = None
    elif lines is not None:
      lines.append(line)
  return found


def same_output(found: str, expected: str, *, tolerance: float | None = None) -> bool:
  """Whether two outputs agree, line for line and word for word; spaces within lines and empty lines around do not count.

  Args:
    found: output of the program.
    expected: output that passes.
    tolerance: how far words that are numbers may be off, absolutely or relatively; None compares them as text.

  Example:
    >>> same_output("1  2 \\n3\\n\\n", "1 2\\n3"), same_output("1 2 3", "1 2\\n3")
    (True, False)
    >>> same_output("0.3333", "0.33333333", tolerance=1e-3)
    True
  """
  rows, expected_rows = ([line.split() for line in text.strip().splitlines()] for text in (found, expected))
  if tolerance is None or [*map(len, rows)] != [*map(len, expected_rows)]:
    return rows == expected_rows
  words = zip(itertools.chain(*rows), itertools.chain(*expected_rows), strict=True)
  return all(x == y or _is_close(x, y, rel_tol=tolerance, abs_tol=tolerance) for x, y in words)


def same_value(found: Any, expected: Any) -> bool:
  """Whether two plain values agree; tuples and lists are the same, floats may be off by 1e-9 relatively, True is not 1.

  Example:
    >>> same_value((1, [2.0]), [1, (2.0,)]), same_value(True, 1), same_value(1, 1.0)
    (True, False, True)
  """
  if isinstance(expected, list | tuple):
    alike = isinstance(found, list | tuple) and len(found) == len(expected)
    return alike and all(same_value(a, b) for a, b in zip(found, expected, strict=True))
  if isinstance(expected, dict):
    return isinstance(found, dict) and found.keys() == expected.keys() and all(same_value(found[key], expected[key]) for key in expected)
  if isinstance(expected, bool) or isinstance(found, bool):
    return found is expected
  if isinstance(expected, float) and isinstance(found, int | float):
    return found == expected or _is_close(found, expected, rel_tol=1e-9)
  return found == expected and not (isinstance(found, float) and isinstance(expected, str))


def _is_close(found: float | str, expected: float | str, **tolerances: float) -> bool:
  try:
    return math.isclose(float(found), float(expected), **tolerances)
  except (OverflowError, ValueError):  # An integer beyond float64, or a word that is no number.
    return False
