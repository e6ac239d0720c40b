"""Fixtures of the tests of studies."""

import pytest

from experiments.claims import bed as beds
from experiments.studies.forecast import protocol
from experiments.studies.forecast.protocol import Cell


@pytest.fixture
def small(monkeypatch):
  """A protocol of two objectives, two draws and two seeds on a tiny bed."""
  tiny = beds.SMOKE._replace(num_prompts=1, updates=4, evaluations=2)
  monkeypatch.setattr(protocol, "sizes", lambda length: tiny._replace(digits=(length, length), error_rate=1 / length))
  monkeypatch.setattr(protocol, "LENGTHS", (4,))
  monkeypatch.setattr(protocol, "BAND", {4: 48.0})
  monkeypatch.setattr(protocol, "TUNED_AT", (4, 2))
  monkeypatch.setattr(protocol, "OBJECTIVES", ("grpo", "gspo"))
  monkeypatch.setattr(protocol, "DRAWS", 2)
  monkeypatch.setattr(protocol, "SEEDS", (600, 601))
  monkeypatch.setattr(protocol, "BLOCKS", ((Cell(4, 1), Cell(4, 2, "float8")),))
