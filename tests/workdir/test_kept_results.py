"""Results that runs share: whole or absent, in turns, and within their size."""

import hashlib
import os
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.workdir import checkpoint, kept_results
from jaxrl_llm.workdir.kept_results import DamagedError, NotKeptError, Results
from tests.workdir.damage import damage

ARRAYS = {"params": {"w": jnp.arange(3000.0), "b": jnp.ones((2, 3), jnp.bfloat16)}}
ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), ARRAYS)
RECORD = {"rows": [{"actor/loss": 0.1, "z": 2}], "tokens": 7}
KEYS = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(3)]


@pytest.fixture
def results(tmp_path):
  return Results(tmp_path / "kept", 10**9)


def entries(results):
  return sorted(path.name for path in results.folder.iterdir() if path.name != "locks")


def test_a_result_comes_back_bit_for_bit(results):
  assert kept_results.read(results, KEYS[0], ABSTRACT) is None
  kept_results.write(results, KEYS[0], ARRAYS, RECORD)
  arrays, record = kept_results.read(results, KEYS[0], ABSTRACT)
  assert record == RECORD and list(record["rows"][0]) == ["actor/loss", "z"], "the order of a row is kept"
  jax.tree.map(np.testing.assert_array_equal, arrays, ARRAYS)
  assert kept_results.read(results, KEYS[1], ABSTRACT) is None and entries(results) == [KEYS[0]]
  kept_results.write(results, KEYS[0], ARRAYS, RECORD | {"tokens": 8})
  assert kept_results.read(results, KEYS[0], ABSTRACT)[1]["tokens"] == 7 and entries(results) == [KEYS[0]], "the first of two stays"
  other = {"params": ABSTRACT["params"] | {"w": jax.ShapeDtypeStruct((2999,), jnp.float32, sharding=ARRAYS["params"]["w"].sharding)}}
  with pytest.raises(DamagedError):
    kept_results.read(results, KEYS[0], other)


@pytest.mark.parametrize("kind", ["flip", "delete", "no manifest", "nothing in it"])
def test_a_damaged_result_is_told_apart_and_can_be_replaced(results, kind):
  kept_results.write(results, KEYS[0], ARRAYS, RECORD)
  step = results.place(KEYS[0]) / "0"
  if kind == "no manifest":
    (step / "manifest.json").unlink()
  elif kind == "nothing in it":
    step.rename(results.folder / ".elsewhere")
  else:
    damage(max((path for path in (step / "arrays").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size), kind)
  with pytest.raises(DamagedError) as caught:
    kept_results.read(results, KEYS[0], ABSTRACT)
  assert "\n" not in str(caught.value) and str(caught.value)
  kept_results.delete(results, KEYS[0])
  assert kept_results.read(results, KEYS[0], ABSTRACT) is None
  kept_results.write(results, KEYS[0], ARRAYS, RECORD)
  assert kept_results.read(results, KEYS[0], ABSTRACT)[1] == RECORD


def test_the_least_recently_used_goes_first(results):
  kept_results.write(results, KEYS[0], ARRAYS, RECORD)
  size = sum(path.stat().st_size for path in results.place(KEYS[0]).rglob("*") if path.is_file())
  results = results._replace(max_bytes=int(2.5 * size))
  kept_results.write(results, KEYS[1], ARRAYS, RECORD)
  for age, key in ((200, KEYS[0]), (100, KEYS[1])):
    os.utime(results.place(key), (time.time() - age,) * 2)
  kept_results.read(results, KEYS[0], ABSTRACT)  # Now used more recently than the other.
  kept_results.write(results, KEYS[2], ARRAYS, RECORD)
  assert set(entries(results)) == {KEYS[0], KEYS[2]}


def test_too_large_a_result_is_not_kept(results):
  with pytest.raises(NotKeptError, match=r"more than 1e-06 GB"):
    kept_results.write(results._replace(max_bytes=1000), KEYS[0], ARRAYS, RECORD)
  assert not results.folder.exists()


def test_leftovers_of_killed_writers_go_after_a_day(results):
  for name, age in ((f".{KEYS[1]}.old", 25 * 3600), (f".{KEYS[1]}.new", 60)):
    (results.folder / name).mkdir(parents=True)
    os.utime(results.folder / name, (time.time() - age,) * 2)
  kept_results.write(results, KEYS[0], ARRAYS, RECORD)
  assert set(entries(results)) == {KEYS[0], f".{KEYS[1]}.new"}


def test_a_failure_keeps_nothing(results, tmp_path, monkeypatch):
  (tmp_path / "file").write_text("")
  with pytest.raises(NotKeptError, match="Not a directory|exists"):
    kept_results.write(Results(tmp_path / "file", 10**9), KEYS[0], ARRAYS, RECORD)
  monkeypatch.setattr(checkpoint.saving.manifest, "write", mock.Mock(side_effect=OSError(28, "No space left on device")))
  with pytest.raises(NotKeptError, match="No space left"):
    kept_results.write(results, KEYS[0], ARRAYS, RECORD)
  assert entries(results) == []


def test_turns_are_taken(results):
  order, waited = [], threading.Event()

  def other():
    with kept_results.turn(results, KEYS[0], waiting=waited.set):
      order.append("other")

  with kept_results.turn(results, KEYS[0], waiting=lambda: pytest.fail("it need not wait")):
    with kept_results.turn(results, KEYS[1], waiting=lambda: pytest.fail("another key")):
      pass
    thread = threading.Thread(target=other)
    thread.start()
    assert waited.wait(60)
    order.append("first")
  thread.join(60)
  assert order == ["first", "other"]


@pytest.mark.parametrize(("error", "passes"), [(TimeoutError("long"), True), (RuntimeError("stop"), False)])
def test_a_wait_can_be_ended(results, error, passes):
  refuse = mock.Mock(side_effect=error)
  with kept_results.turn(results, KEYS[0], waiting=refuse):
    if passes:
      with kept_results.turn(results, KEYS[0], waiting=refuse):
        pass
    else:
      with pytest.raises(RuntimeError, match="stop"), kept_results.turn(results, KEYS[0], waiting=refuse):
        pytest.fail("it had no turn")


def test_without_a_folder_there_are_no_turns(tmp_path):
  (tmp_path / "file").write_text("")
  with kept_results.turn(Results(tmp_path / "file", 1), KEYS[0], waiting=lambda: None):
    pass
