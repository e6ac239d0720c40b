"""Extraction of a program from a response, and comparison of its results with the expected ones."""

import itertools
import math
from typing import Any

_PYTHON = ("", "py", "python", "python3")


def extract_code(text: str) -> str | None:
  """Returns the last closed code block of a response, without its fences, or None.

  Only blocks marked as Python, or not marked at all, count.

  Example:
    >>> extract_code("So:\\n```python\\nprint(1)\\n```\\nIt prints:\\n```text\\n1\\n```")
    'print(1)'
  """
  code, lines, language = None, None, ""
  for line in text.split("\n"):
    if line.lstrip().startswith("```"):
      if lines is None:
        lines, language = [], line.strip().strip("`").strip().lower()
      else:
        code = "\n".join(lines) if language in _PYTHON else code
        lines = None
    elif lines is not None:
      lines.append(line)
  return code


def same_output(output: str, expected: str, *, tolerance: float | None = None) -> bool:
  """Returns whether two outputs agree, line for line and word for word.

  Spaces within lines and empty lines at the beginning and end do not count.

  Args:
    output: Output of the program.
    expected: Output that passes.
    tolerance: Absolute or relative error allowed for words that are numbers. None compares them as
      text.

  Example:
    >>> same_output("1  2 \\n3\\n\\n", "1 2\\n3"), same_output("1 2 3", "1 2\\n3")
    (True, False)
    >>> same_output("0.3333", "0.33333333", tolerance=1e-3)
    True
  """
  rows, expected_rows = ([line.split() for line in text.strip().splitlines()] for text in (output, expected))
  if tolerance is None or [*map(len, rows)] != [*map(len, expected_rows)]:
    return rows == expected_rows
  words = zip(itertools.chain(*rows), itertools.chain(*expected_rows), strict=True)
  return all(x == y or _is_close(x, y, rel_tol=tolerance, abs_tol=tolerance) for x, y in words)


def same_value(value: Any, expected: Any) -> bool:
  """Returns whether two plain values agree.

  Tuples and lists are the same, floats may differ by 1e-9 relatively, and True is not 1.

  Example:
    >>> same_value((1, [2.0]), [1, (2.0,)]), same_value(True, 1), same_value(1, 1.0)
    (True, False, True)
  """
  if isinstance(expected, list | tuple):
    alike = isinstance(value, list | tuple) and len(value) == len(expected)
    return alike and all(same_value(a, b) for a, b in zip(value, expected, strict=True))
  if isinstance(expected, dict):
    return (
      isinstance(value, dict)
      and value.keys() == expected.keys()
      and all(same_value(value[key], expected[key]) for key in expected)
    )
  if isinstance(expected, bool) or isinstance(value, bool):
    return value is expected
  if isinstance(expected, float) and isinstance(value, int | float):
    return value == expected or _is_close(value, expected, rel_tol=1e-9)
  return value == expected and not (isinstance(value, float) and isinstance(expected, str))


def _is_close(value: float | str, expected: float | str, **tolerances: float) -> bool:
  try:
    return math.isclose(float(value), float(expected), **tolerances)
  except (OverflowError, ValueError):  # An integer beyond float64, or a word that is not a number.
    return False
