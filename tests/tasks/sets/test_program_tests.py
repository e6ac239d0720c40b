"""Published tests are unpacked without running any code in a pickle."""

import base64
import json
import os
import pickle
import zlib

import pytest

from jaxrl_llm.tasks.files.columns import Unusable
from jaxrl_llm.tasks.sets import program_tests

CASES = [{"input": "1 2", "output": "3", "testtype": "stdin"}]


def packed(value):
  return base64.b64encode(zlib.compress(value if isinstance(value, bytes) else pickle.dumps(value))).decode()


class Canary:
  """Object that makes a folder when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return os.mkdir, (str(self.path),)


def test_both_published_forms():
  assert program_tests.unpack(json.dumps(CASES)) == program_tests.unpack(packed(json.dumps(CASES))) == CASES


def test_a_hostile_pickle_runs_nothing(tmp_path):
  for value in (Canary(tmp_path / "canary"), [Canary(tmp_path / "canary")], (json.dumps(CASES), Canary(tmp_path / "canary"))):
    with pytest.raises(Unusable, match="not safe"):
      program_tests.unpack(packed(value))
  assert not list(tmp_path.iterdir())
  pickle.loads(pickle.dumps(Canary(tmp_path / "canary")))  # The canary works.
  assert list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "text",
  ["", "{}", "[1]", "[", "zzz", "äöü", packed(b"no pickle"), packed(b""), packed([1]), packed(7), packed("{}"),
   packed(json.dumps(CASES))[:-8], base64.b64encode(zlib.compress(pickle.dumps("x" * 10_000))[:20]).decode()],
)  # fmt: skip
def test_damaged_tests(text):
  with pytest.raises(Unusable, match="tests cannot be read"):
    program_tests.unpack(text)


def test_a_compressed_flood(monkeypatch):
  monkeypatch.setattr(program_tests, "MAX_TEST_BYTES", 10**5)
  with pytest.raises(Unusable, match="tests too large"):
    program_tests.unpack(packed("x" * 10**6))


@pytest.mark.parametrize("cases", [[], [{"input": "1"}], [{"input": 1, "output": "2"}], [{"input": None, "output": ""}]])
def test_tests_that_test_nothing(cases):
  with pytest.raises(Unusable):
    program_tests.stdin_tests(cases)
