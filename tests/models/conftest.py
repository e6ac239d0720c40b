"""The checkpoints of `record_checkpoints.py`, loaded once for the tests that only read them."""

import functools
import json
import pathlib
import shutil

import pytest

FOLDER = pathlib.Path(__file__).parent
FOLDERS = {path.name: path for part in ("checkpoints", "pictures") for path in (FOLDER / part).iterdir()}


@functools.cache
def load_recorded(name, dtype="float32"):
  """Loads a recorded checkpoint, once for all tests of this process."""
  # Not imported earlier, because pytest instruments the package at its first import.
  from jaxrl_llm.models.files.loading import load

  return load(FOLDERS[name], dtype=dtype)


@pytest.fixture(scope="session")
def loaded():
  """Function `loaded(name, dtype) -> (model, params)`; tests must not change or donate these."""
  return load_recorded


@pytest.fixture
def copy(tmp_path):
  """Function `copy(name, **fields)` that copies a checkpoint and replaces fields of its config."""

  def make(name, **fields):
    folder = shutil.copytree(FOLDERS[name], tmp_path / f"copy{len(list(tmp_path.iterdir()))}" / name)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder

  return make
