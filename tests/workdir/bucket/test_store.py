"""Objects have preconditions in both emulated storages, and errors are one line."""

import io
from unittest import mock

import pytest

from jaxrl_llm.workdir.bucket import store as store_lib
from jaxrl_llm.workdir.bucket.address import parse
from jaxrl_llm.workdir.bucket.store import ConflictError, StorageError, Store, Tag


def test_an_object_is_created_once_and_replaced_only_in_its_known_state(place):
  store = Store(place)
  first = store.create("a", b"1")
  with pytest.raises(ConflictError):
    store.create("a", b"2")
  second = store.replace("a", b"2", first)
  for stale in (first, Tag('"none"', "12")):
    with pytest.raises(ConflictError):
      store.replace("a", b"3", stale)
  assert store.get("a") == (b"2", second) and store.get("b") is None


def test_objects_are_listed_downloaded_in_pieces_and_deleted(place, tmp_path, monkeypatch):
  monkeypatch.setattr(store_lib, "_PIECE", 1000)
  store = Store(place)
  (tmp_path / "file").write_bytes(bytes(range(256)) * 10)
  store.put("b/c", tmp_path / "file")
  store.put("b/d", b"")
  assert sorted(store.names()) == sorted(store.names("b")) == ["b/c", "b/d"] and store.folders() == ["b"]
  file = io.BytesIO()
  assert store.download("b/c", file)[0] == 2560 and file.getvalue() == bytes(range(256)) * 10
  assert store.download("b/d", io.BytesIO())[0] == 0
  with pytest.raises(FileNotFoundError):
    store.download("b/e", io.BytesIO())
  store.delete(["b/c", "missing"])
  assert list(store.names()) == ["b/d"]


@pytest.mark.parametrize(
  "weather, text, lasting",
  [
    ({"status": 429}, "429 Too Many Requests", False),
    ({"status": 500}, "500 Internal Server Error", False),
    ({"status": 403}, "access denied, expected credentials that may read and write there", True),
    ({"gone": True}, "HTTP error", False),
    ({"seconds": 1.5}, "HTTP error", False),
  ],
)
def test_a_storage_that_fails_gives_one_line(storage, place, weather, text, lasting):
  store = Store(place, seconds=0.5)
  for name, value in weather.items():
    setattr(storage.weather, name, value)
  with pytest.raises(StorageError) as caught:
    store.get("a")
  line = str(caught.value)
  assert text in line and str(place) in line and "\n" not in line and len(line) < 300 and caught.value.lasting == lasting


def test_a_missing_bucket_is_named(place):
  with pytest.raises(StorageError, match=r"found no bucket 'no-bucket', expected an existing one; make it, or correct the name") as caught:
    Store(place._replace(bucket="no-bucket")).create("a", b"")
  assert caught.value.lasting


def test_missing_credentials_are_named():
  assert store_lib.lacks_credentials("Error performing PUT http://169.254.169.254/latest/api/token in 6 ms")
  assert store_lib.lacks_credentials("Generic GCS error: Error performing token request: ...")
  assert not store_lib.lacks_credentials("Server returned non-2xx status code: 500 Internal Server Error")


def test_patience_ends_and_is_not_spent_on_lasting_errors():
  for lasting in (True, False):
    fails = mock.Mock(side_effect=StorageError("no", lasting=lasting))
    with pytest.raises(StorageError):
      store_lib.patiently(fails, seconds=0.3, sleep=lambda seconds: None)
    assert (fails.call_count == 1) == lasting
  answer = mock.Mock(side_effect=[StorageError("no"), StorageError("no"), 7])
  assert store_lib.patiently(answer, sleep=lambda seconds: None) == 7


@pytest.mark.parametrize("text", ["ftp://bucket/run", "gs://bucket", "s3:///run", "s3://bucket/../run", "gs://bucket/a//b"])
def test_an_address_without_bucket_or_path_is_refused(text):
  with pytest.raises(ValueError, match=r"^found .*, expected a folder, or gs://BUCKET/RUN or s3://BUCKET/RUN"):
    parse(text)
