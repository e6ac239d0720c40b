"""The command that tries clients of others, and its stored table."""

import json
import sys

import jsonschema
import pytest

from experiments.clients import __main__ as clients
from experiments.clients import programs, table
from tests.serve.fake_engine import FakeEngine
from tests.serve.test_http import serving

STORED = json.loads(table.PATH.read_text())


def test_every_client_has_a_program_a_package_and_a_stored_row_without_a_failure():
  assert set(programs.CLIENTS) == set(clients.PACKAGES) == set(STORED["clients"])
  for client, row in STORED["clients"].items():
    assert row["failed"] is None and row["features"] and set(row["features"]) <= set(table.FEATURES)
    name, _, version = row["version"].partition(" ")
    assert not version or clients.PACKAGES[client].split()[0].replace("[api]", "").replace("[openai]", "") == f"{name}=={version}"
  assert STORED["schema"]["obeyed"] == STORED["schema"]["answers"] >= 1000


def test_what_works_and_what_fails_is_told_by_feature(tmp_path, capfd):
  with serving(FakeEngine()) as service:
    features, failed = clients.tried("skyrl", sys.executable, service.url, "toy", tmp_path)
    assert list(features) == ["token ids"] and failed is None
    features, failed = clients.tried("skyrl", sys.executable, f"{service.url}/nowhere", "toy", tmp_path)
    assert features == {} and "404" in failed
  with pytest.raises(SystemExit, match="--checkpoint: found 'nowhere', which cannot be served"), clients.serving("nowhere"):
    pass
  assert "nowhere" in capfd.readouterr().err


def test_the_schema_takes_answers_of_its_kind_alone():
  city = {"name": "Bern", "people": 134_000, "climate": "mild", "is_capital": True, "rivers": ["Aare"]}
  jsonschema.validate(city, clients.SCHEMA)
  for wrong in (city | {"rivers": []}, city | {"people": -1}, {"name": "Bern"}, city | {"lakes": 0}):
    with pytest.raises(jsonschema.ValidationError):
      jsonschema.validate(wrong, clients.SCHEMA)
