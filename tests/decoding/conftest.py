"""Fixtures of decoding's tests."""

import pytest

from tests.decoding.engine.engines import make


@pytest.fixture
def engine_of():
  """Returns a function that makes an engine with an empty cache, from programs that are shared."""
  engines = []

  def made(*args, **options):
    engines.append(make(*args, **options))
    return engines[-1]

  yield made
  for engine in engines:
    engine.close()
