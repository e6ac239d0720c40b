"""Checks of the tables of golden numbers: that they are fresh, and that their READMEs work."""

import json
import pathlib
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.marks import few


def each_case(entries: dict[str, Any]) -> pytest.MarkDecorator:
  """Parametrizes a test by `name` and `index` of the cases; all but the first of each are slow."""
  cases = [(name, index) for name, entry in entries.items() for index in range(len(entry["cases"]))]

  def identity(name: str, index: int) -> str:
    case = entries[name]["cases"][index]
    return f"{name}-{'-'.join(f'{key}={x}' for key, x in case['settings'].items()) or 'paper'}-{case['inputs']}-{index}"

  first = [i for i, (_, index) in enumerate(cases) if index == 0]
  return pytest.mark.parametrize(("name", "index"), few(cases, *first, rest="slow"), ids=[identity(*case) for case in cases])


def check_file(reference: ModuleType, *, largest: int) -> None:
  """Asserts that a table is what its reference computes, in its format, and not too long."""
  text = reference.GOLDEN.read_text(encoding="utf-8")
  same_tree(json.loads(text), json.loads(reference.dumps(reference.table())))
  assert reference.dumps(json.loads(text)) == text, f"the formatting differs; run python -m {reference.__name__}"
  assert len(text) < largest


def run_snippets(room: ModuleType, read: str, changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
  """Runs both snippets of the README beside a table, and sees that each compares numbers.

  Args:
    room: Subpackage with the table.
    read: Expression by which a snippet reads a number of a case.
    changed: The same with another number, which it must not accept.
    monkeypatch: Pytest's fixture.
  """
  folder = pathlib.Path(room.__file__).parent
  monkeypatch.chdir(folder.parents[1])
  snippets = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
  assert len(snippets) == 2
  for snippet in snippets:
    scope: dict = {}
    exec(snippet, scope)
    assert scope["num_compared"] > 1
    with pytest.raises(AssertionError):
      exec(snippet.replace(read, changed), {})


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
