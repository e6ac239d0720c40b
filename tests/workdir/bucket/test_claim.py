"""At most one process writes to a workdir in a bucket, and a dead one holds it up for a minute."""

import os
import subprocess
import sys

import pytest

from jaxrl_llm.workdir.bucket import claim as claim_lib
from jaxrl_llm.workdir.bucket import index as index_lib
from jaxrl_llm.workdir.bucket.index import Owner
from jaxrl_llm.workdir.bucket.store import Store
from jaxrl_llm.workdir.claim import WorkdirError
from tests.workdir.bucket.runs import ELSEWHERE, rewrite


def test_a_second_writer_is_refused_as_soon_as_the_first_gives_a_sign_of_life(place):
  store, told = Store(place), []
  claim_lib.take(store, ELSEWHERE)
  with pytest.raises(WorkdirError) as caught:
    claim_lib.take(store, claim_lib.this_process(), tell=told.append, sleep=lambda seconds: rewrite(store))
  assert str(caught.value) == (
    f"--workdir={place}: process 7 on another-host is writing there; wait until it ends, stop it, or choose another"
  )
  assert len(told) == 1 and "waiting up to 60 s for a sign of life" in told[0]


def test_a_silent_writer_is_replaced_and_can_then_write_nothing(place):
  store, told = Store(place), []
  index, tag = claim_lib.take(store, ELSEWHERE)
  own = claim_lib.this_process()
  taken, _ = claim_lib.take(store, own, silence=0.2, tell=told.append, sleep=lambda seconds: None)
  assert taken.owner == own and "has given no sign of life for 0 s; its claim is taken over" in told[1]
  with pytest.raises(claim_lib.ConflictError):
    store.replace(index_lib.NAME, index_lib.to_bytes(index), tag)
  assert index_lib.read(store)[0].owner == own


def test_a_dead_process_of_this_machine_is_replaced_at_once(place):
  code = "from jaxrl_llm.workdir.bucket import claim; print(*claim.this_process(), sep='|')"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  token, host, boot, pid, began = done.stdout.strip().split("|")
  dead = Owner(token, host, boot, int(pid), began)
  own, store = claim_lib.this_process(), Store(place)
  assert claim_lib.is_gone(dead) and not claim_lib.is_gone(own) and not claim_lib.is_gone(ELSEWHERE)
  # The number of a process may have been given to a later one.
  assert claim_lib.is_gone(own._replace(began="1")) and claim_lib.is_gone(own._replace(boot="before"))
  claim_lib.take(store, dead)
  assert claim_lib.take(store, own, silence=1e9)[0].owner == own and own.pid == os.getpid()


def test_a_folder_that_holds_something_else_is_refused(place):
  store = Store(place)
  store.put("notes.txt", b"")
  with pytest.raises(WorkdirError, match=r"found notes.txt but no index.json, expected no object or a run; choose another"):
    claim_lib.take(store, claim_lib.this_process())
  assert list(store.names()) == ["notes.txt"]


def test_a_damaged_index_is_named(place):
  store = Store(place)
  index, tag = claim_lib.take(store, ELSEWHERE)
  store.replace(index_lib.NAME, index_lib.to_bytes(index).replace(b"another-host", b"Another-host"), tag)
  with pytest.raises(index_lib.StorageError, match=r"index.json is not as it was written \(its SHA-256 differs\); restore"):
    claim_lib.take(store, claim_lib.this_process())


def test_a_storage_without_preconditions_is_refused(place, monkeypatch):
  store = Store(place)

  def put(name, data):
    store.put(name, data)
    return index_lib.Tag("x", None)

  monkeypatch.setattr(store, "create", put)
  with pytest.raises(index_lib.StorageError, match="the storage ignores preconditions"):
    claim_lib.take(store, claim_lib.this_process())
