"""Checkpoints that transformers saved (`record_checkpoints.py`), and a cache of them loaded: most tests only look."""

import functools
import pathlib

import pytest

CHECKPOINTS = pathlib.Path(__file__).parent / "checkpoints"


@functools.cache
def load_recorded(name, dtype="float32"):
  """A recorded checkpoint, loaded once for all tests of this process."""
  from jaxrl_llm.models.files.loading import load  # Not earlier: pytest instruments the package at its first import.

  return load(CHECKPOINTS / name, dtype=dtype)


@pytest.fixture(scope="session")
def loaded():
  """`loaded(name, dtype) -> (model, params)`; nobody may write to these or give them away."""
  return load_recorded
