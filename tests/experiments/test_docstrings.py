"""Tests of the examples in the experiments' docstrings."""

import doctest
import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = [
  ".".join(path.relative_to(ROOT).with_suffix("").parts)
  for path in sorted(ROOT.glob("experiments/**/*.py"))
  if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name):
  options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
  failed, tried = doctest.testmod(importlib.import_module(name), optionflags=options)
  assert tried and not failed
