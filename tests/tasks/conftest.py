"""The arithmetic dataset, built once for all tests of a session."""

import pytest

from jaxrl_llm import tasks


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
  return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def task(data_dir):
  return tasks.make("arithmetic", data_dir=data_dir)
