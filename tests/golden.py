"""Comparison of a checked-in table of numbers with a fresh one."""

from typing import Any

import numpy as np


def same_tree(actual: Any, expected: Any, where: str = "golden.json") -> None:
  """Asserts equality, up to the last digits of another C library's exp and log."""
  if isinstance(expected, dict):
    assert list(actual) == list(expected), where
    for key in expected:
      same_tree(actual[key], expected[key], f"{where}/{key}")
  elif isinstance(expected, list):
    assert len(actual) == len(expected), where
    for i, (a, b) in enumerate(zip(actual, expected)):
      same_tree(a, b, f"{where}/{i}")
  elif isinstance(expected, float):
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-16, err_msg=where)
  else:
    assert actual == expected, where
