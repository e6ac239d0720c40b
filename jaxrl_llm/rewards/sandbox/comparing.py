"""Finding a program in a response, and comparing what it gave with what it should have."""

import math
from typing import Any

_PYTHON = ("", "py", "python", "python3")


def extract_code(text: str) -> str | None:
  """The last closed fenced block that is Python's or nobody's; None without one.

  Args:
    text: of a response.

  Returns:
    The code, without the fences.

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
    found: what a program printed.
    expected: what it should have.
    tolerance: how far words that are numbers may be off, absolutely or relatively; None compares them as texts.

  Example:
    >>> same_output("1  2 \\n3\\n\\n", "1 2\\n3"), same_output("1 2 3", "1 2\\n3")
    (True, False)
    >>> same_output("0.3333", "0.33333333", tolerance=1e-3)
    True
  """
  rows = [[line.split() for line in text.strip().splitlines()] for text in (found, expected)]
  return len(rows[0]) == len(rows[1]) and all(
    len(a) == len(b) and all(_same_word(x, y, tolerance) for x, y in zip(a, b, strict=True)) for a, b in zip(*rows, strict=True)
  )


def _same_word(found: str, expected: str, tolerance: float | None) -> bool:
  if found == expected or tolerance is None:
    return found == expected
  try:
    return math.isclose(float(found), float(expected), rel_tol=tolerance, abs_tol=tolerance)
  except (OverflowError, ValueError):
    return False


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
    return found == expected or math.isclose(_as_float(found), expected, rel_tol=1e-9)
  return found == expected and not (isinstance(found, float) and isinstance(expected, str))


def _as_float(value: float) -> float:
  try:
    return float(value)
  except OverflowError:
    return math.inf
