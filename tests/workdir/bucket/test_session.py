"""A run in a bucket resumes on any machine, survives bad storage, and stops when it is replaced."""

import contextlib
import shutil
import signal
import time
from unittest import mock

import pytest

from jaxrl_llm.workdir import checkpoint
from jaxrl_llm.workdir.bucket import index as index_lib
from jaxrl_llm.workdir.bucket.address import mirror_of
from jaxrl_llm.workdir.bucket.copies import give_back, localize
from jaxrl_llm.workdir.bucket.store import ConflictError, StorageError, Store
from jaxrl_llm.workdir.claim import WorkdirError
from tests.runs import wait_for
from tests.workdir.bucket.runs import ELSEWHERE, lose_machine, rewrite, running


def index_of(place):
  return index_lib.read(Store(place))[0]


def test_a_new_machine_continues_with_the_rows_and_the_newest_checkpoint(place):
  with running(place) as run:
    run.advance(5)
  index = index_of(place)
  assert sorted(index.steps) == [4, 5] and index.owner is None, "retention holds in the bucket as well"
  listed = {name.split("/")[1] for name in Store(place).names("checkpoints")}
  assert listed == {step.at.split("/")[1] for step in index.steps.values()}, "what retention drops is deleted"
  lose_machine(place)
  with running(place) as run:
    assert run.step == 5 and run.rows() == [1, 2, 3, 4, 5]
    assert checkpoint.whole_steps(run.workdir / "checkpoints") == [5], "one checkpoint is enough"
    run.advance()
  assert sorted(index_of(place).steps) == [5, 6]


def test_what_was_written_after_the_last_checkpoint_is_done_again(place):
  with running(place) as run:
    run.advance(2)
    run.writer.write(3, "rl", {"x": -1})
  lose_machine(place)
  with running(place) as run:
    assert run.step == 2 and run.rows() == [1, 2]
    run.advance()
  assert run.rows() == [1, 2, 3]
  copy = localize(str(place))
  assert (copy / "metrics.jsonl").read_bytes() == (run.workdir / "metrics.jsonl").read_bytes()


def test_the_same_mirror_goes_on_without_the_bucket_being_read(place):
  with running(place) as run:
    run.advance(3)
  with running(place) as run:
    assert run.step == 3 and checkpoint.whole_steps(run.workdir / "checkpoints") == [2, 3]


def test_the_bucket_wins_over_an_outdated_mirror(place, tmp_path, monkeypatch):
  told = []
  with running(place) as run:
    run.advance(2)
  monkeypatch.setenv("JAXRL_LLM_MIRRORS", str(tmp_path / "second"))
  with running(place) as run:
    run.advance(2)
  monkeypatch.setenv("JAXRL_LLM_MIRRORS", str(tmp_path / "mirrors"))
  mirror = mirror_of(place)
  with running(place, told=told) as run:
    assert run.step == 4 and run.rows() == [1, 2, 3, 4]
  assert not any("moved" in line for line in told), "all of the old mirror was sent"
  # Now the first machine has something that was never sent.
  (mirror.state / "clean").unlink()
  monkeypatch.setenv("JAXRL_LLM_MIRRORS", str(tmp_path / "second"))
  with running(place) as run:
    run.advance()
  monkeypatch.setenv("JAXRL_LLM_MIRRORS", str(tmp_path / "mirrors"))
  with running(place, told=told) as run:
    assert run.step == 5
  assert sum("another machine has continued the run since" in line for line in told) == 1
  assert next(mirror.state.parent.glob("run.aside-1/*/metrics.jsonl")).exists()


def test_a_storage_that_is_gone_stops_nothing_and_loses_nothing(storage, place):
  told = []
  with running(place, told=told) as run:
    run.advance()
    wait_for(lambda: 1 in index_of(place).steps)
    run.session._publisher._failing = time.monotonic() - 100  # As if it had failed for long.
    storage.weather.gone = True
    run.advance(3)
    wait_for(lambda: any("does not answer" in line for line in told))
    assert run.rows() == [1, 2, 3, 4] and run.session._publisher.unsent()
    storage.weather.gone = False
    wait_for(lambda: any("answers again" in line for line in told))
  assert sorted(index_of(place).steps) == [3, 4] and run.session.status(0) == 0


def test_what_is_unsent_at_the_end_is_named_and_sent_by_the_next_command(storage, place, capsys):
  with running(place, patience=0.5) as run:
    run.advance()
    wait_for(lambda: 1 in index_of(place).steps)
    storage.weather.status = 500
    run.advance()
    run.writer.close()
  assert run.session.status(0) == 1 and run.session.status(42) == 42
  line = capsys.readouterr().err.splitlines()[0]
  assert "checkpoints/2" in line and f"not in {place} yet" in line and "the same command on this machine sends it" in line
  storage.weather.status = None
  with running(place, silence=0.1) as run:  # This process has not ended.
    assert run.step == 2
  assert sorted(index_of(place).steps) == [1, 2] and run.session.status(0) == 0


def test_a_checkpoint_that_can_never_be_sent_ends_the_wait_and_sends_no_file_twice(place, monkeypatch):
  put, sent = Store.put, []

  def fails(self, name, data):
    if name.endswith("manifest.ocdbt"):
      raise StorageError("no")
    sent.append(name)
    put(self, name, data)

  monkeypatch.setattr(Store, "put", fails)
  with running(place, patience=1.5) as run:
    run.advance()
  assert run.session.status(0) == 1 and index_of(place).steps == {}
  files = [name for name in sent if name.startswith("checkpoints/")]
  assert files and len(set(files)) == len(files)


def test_ctrl_c_while_the_rest_is_sent_is_no_traceback(place, monkeypatch, capsys):
  with running(place) as run:
    run.advance()
    monkeypatch.setattr(run.session._publisher, "close", mock.Mock(side_effect=KeyboardInterrupt))
  assert run.session.status(0) == 1 and "(interrupted)" in capsys.readouterr().err


def test_a_replaced_writer_stops_and_sends_nothing_more(place, monkeypatch):
  told, signals = [], []
  monkeypatch.setattr("jaxrl_llm.workdir.bucket.session.os.kill", lambda pid, number: signals.append(number))
  with running(place, told=told) as run:
    run.advance()
    wait_for(lambda: 1 in index_of(place).steps)
    store = Store(place)
    wait_for(lambda: replaced(store))
    run.advance()
    wait_for(lambda: signals)
  assert signals == [signal.SIGTERM] and run.session.status(42) == 1
  assert any("was taken over by process 7 on another-host" in line and "its own steps stay in" in line for line in told)
  assert sorted(index_of(place).steps) == [1] and index_of(place).owner == ELSEWHERE


def replaced(store):
  with contextlib.suppress(ConflictError):
    rewrite(store, owner=ELSEWHERE)
    return True
  return False


def test_a_lost_answer_to_a_write_of_the_index_is_no_takeover(place, monkeypatch):
  with running(place) as run:
    replace, lost = Store.replace, []

    def loses(self, *arguments):
      tag = replace(self, *arguments)
      if not lost:
        lost.append(tag)
        raise index_lib.StorageError("the answer was lost")
      return tag

    monkeypatch.setattr(Store, "replace", loses)
    run.advance(2)
    wait_for(lambda: lost and 2 in index_of(place).steps)
  assert run.session.status(0) == 0 and sorted(index_of(place).steps) == [1, 2]


def test_objects_of_a_killed_writer_are_removed_and_those_of_others_are_not(place):
  with running(place) as run:
    run.advance()
  store = Store(place)
  for name in ("checkpoints/9-dead-1/arrays/x", "files/metrics.jsonl/dead-2", "evaluations/a/eval.json"):
    store.put(name, b"x")
  with running(place) as run:
    assert run.step == 1
  assert [name for name in store.names() if "dead" in name or "evaluations" in name] == ["evaluations/a/eval.json"]


def test_a_second_run_on_this_machine_is_refused(place):
  with running(place), pytest.raises(WorkdirError, match=f"--workdir={place}: process .* is writing there"), running(place):
    pass


def test_a_start_that_fails_leaves_nothing(place):
  from jaxrl_llm.workdir.bucket import session

  with pytest.raises(KeyError), session.opened(place, retention={}, tell=print):
    raise KeyError
  assert list(Store(place).names()) == []


def test_readers_bring_what_they_need_and_give_pages_back(place):
  with running(place) as run:
    run.advance(3)
  copy = localize(str(place), checkpoints=False)
  assert copy != run.workdir and copy.name == place.path.rpartition("/")[2] and not (copy / "checkpoints").exists()
  assert checkpoint.whole_steps(localize(str(place), step=2) / "checkpoints") == [2]
  assert checkpoint.whole_steps(localize(str(place)) / "checkpoints") == [2, 3]
  with pytest.raises(ValueError, match="found no checkpoint 1, expected one of 2, 3"):
    localize(str(place), step=1)
  with running(place) as run:
    run.advance()
  assert checkpoint.whole_steps(localize(str(place)) / "checkpoints") == [3, 4]
  assert (copy / "metrics.jsonl").read_bytes() == (run.workdir / "metrics.jsonl").read_bytes()
  page = copy / "evaluations" / "a" / "eval.json"
  page.parent.mkdir(parents=True)
  page.write_text("{}")
  assert give_back(str(place), copy, [page]) == f"{place}/evaluations/a/eval.json"
  assert give_back(copy, copy, [page]) is None
  shutil.rmtree(copy)
  assert (localize(str(place)) / "evaluations" / "a" / "eval.json").read_text() == "{}"


def test_a_folder_of_runs_is_brought_as_a_folder(place):
  for name in ("a", "b"):
    with running(place._replace(path=f"{place.path}/{name}")) as run:
      run.advance()
  copy = localize(str(place), checkpoints=False)
  assert sorted(path.name for path in copy.iterdir()) == ["a", "b"] and (copy / "b" / "metrics.jsonl").exists()
  with pytest.raises(ValueError, match="found no run, expected the --workdir of one, or a folder of them"):
    localize(f"{place}/none")
