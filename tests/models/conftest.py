"""The checkpoints of `record_checkpoints.py`, loaded once for the tests that only read them."""

import functools
import pathlib

import pytest

CHECKPOINTS = pathlib.Path(__file__).parent / "checkpoints"


@functools.cache
def load_recorded(name, dtype="float32"):
  """Loads a recorded checkpoint, once for all tests of this process."""
  # Not imported earlier, because pytest instruments the package at its first import.
  from jaxrl_llm.models.files.loading import load

  return load(CHECKPOINTS / name, dtype=dtype)


@pytest.fixture(scope="session")
def loaded():
  """Function `loaded(name, dtype) -> (model, params)`; tests must not change or donate these."""
  return load_recorded
