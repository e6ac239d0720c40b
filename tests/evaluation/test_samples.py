"""Samples on disk: exact round trips, and messages that name a damaged line."""

import json

import pytest

from jaxrl_llm.evaluation import SampleRow, read_samples, write_samples

ROWS = [
  SampleRow(
    "aime24/1", 0, "1+1?", "it is \ud800 \u2028\n#2", "2", "2", 1.0, {"answer": 1.0, "form": 0.5}, None, 5, True, 3, 0, "m", 10, {"a": [1]}
  ),
  SampleRow("aime24/1", 1, "1+1?", "", None, "2", None, {}, "timeout", 512, False),
]


def test_round_trip(tmp_path):
  path = tmp_path / "samples.jsonl"
  assert write_samples(path, ROWS) == 2 and read_samples(path) == ROWS
  assert [json.loads(line)["schema"] for line in path.read_text().splitlines()] == [1, 1]
  assert write_samples(path, ROWS[1:]) == 1 and read_samples(path) == ROWS[1:]
  assert [file.name for file in tmp_path.iterdir()] == ["samples.jsonl"]


def test_a_number_that_json_lacks_is_refused(tmp_path):
  write_samples(tmp_path / "samples.jsonl", ROWS)
  with pytest.raises(ValueError, match="samples: found a row of problem 'aime24/1' that JSON cannot hold"):
    write_samples(tmp_path / "samples.jsonl", [ROWS[0]._replace(score=float("nan"))])
  assert read_samples(tmp_path / "samples.jsonl") == ROWS  # The previous file stays.


@pytest.mark.parametrize("damage, message", [
  (lambda text: text[:-20], "line 2: found no JSON .*is the file cut off"),
  (lambda text: text.replace('"schema": 1', '"schema": 2'), "line 1: found no sample of schema 1"),
  (lambda text: "[]\n" + text, "line 1: found no sample of schema 1"),
  (lambda text: text.replace('"gold"', '"answer_key"'), "line 1: found the fields .*expected"),
])  # fmt: skip
def test_a_damaged_file(tmp_path, damage, message):
  path = tmp_path / "samples.jsonl"
  write_samples(path, ROWS)
  path.write_text(damage(path.read_text()))
  with pytest.raises(ValueError, match=message):
    read_samples(path)
