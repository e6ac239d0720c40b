"""The file of judgements: append-only, readable after a kill, harmless on a full disk."""

import errno
import os
import pathlib

import pytest

from jaxrl_llm.rewards.rubric import Judgements


def test_a_file_cut_at_any_byte_loses_only_its_last_line(tmp_path):
  judgements = Judgements(tmp_path)
  for i in range(3):
    judgements.add(f"key{i}", (1.0, 0.1 * i))
  judgements.close()
  data, path = (tmp_path / "process-0.jsonl").read_bytes(), tmp_path / "cut" / "process-0.jsonl"
  path.parent.mkdir()
  for size in range(len(data) + 1):
    path.write_bytes(data[:size])
    opened = Judgements(path.parent)
    # The newline alone may be missing.
    whole = [data[: size + 1].count(b"\n") > i or data[:size].count(b"\n") > i for i in range(3)]
    assert [opened.get(f"key{i}") for i in range(3)] == [(1.0, 0.1 * i) if whole[i] else None for i in range(3)]
    opened.add("next", (0.5,))
    opened.close()
    again = Judgements(path.parent)
    assert again.get("next") == (0.5,) and [again.get(f"key{i}") is not None for i in range(3)] == whole
    again.close()


def test_lines_that_are_no_judgements_are_ignored(tmp_path):
  (tmp_path / "process-0.jsonl").write_bytes(b'\xff\n[]\n{"key": 1}\n{"key": "a", "scores": "x"}\n{"key": "b", "scores": [2]}\n\n')
  judgements = Judgements(tmp_path)
  assert judgements.get("a") is None and judgements.get("b") == (2.0,)


def test_all_processes_read_all_files_and_prefer_their_own(tmp_path):
  for process in range(2):
    judgements = Judgements(tmp_path, process=process)
    judgements._scores.clear()
    judgements.add("both", (float(process),))
    judgements.add(f"own{process}", (9.0,))
    judgements.close()
  for process in range(2):
    judgements = Judgements(tmp_path, process=process)
    assert judgements.get("both") == (float(process),) and judgements.get("own0") == judgements.get("own1") == (9.0,)


def test_the_first_judgement_of_a_question_stays(tmp_path):
  judgements = Judgements(tmp_path)
  assert judgements.add("a", (1.0,)) == judgements.add("a", (2.0,)) == (1.0,)
  judgements.close()
  assert Judgements(tmp_path).get("a") == (1.0,)


def test_a_full_disk_costs_the_file_but_no_judgement(tmp_path, monkeypatch, caplog):
  judgements, write = Judgements(tmp_path), os.write
  judgements.add("a", (1.0,))
  with monkeypatch.context() as patch:
    patch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    judgements.add("b", (2.0,))

    def full(fd, data):
      raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(os, "write", full)
    judgements.add("c", (3.0,))
  judgements.add("d", (4.0,))
  assert [judgements.get(key) for key in "abcd"] == [(1.0,), (2.0,), (3.0,), (4.0,)]
  assert len(caplog.records) == 1 and "disk is full" in caplog.text
  judgements.close()
  assert [Judgements(tmp_path).get(key) for key in "abcd"] == [(1.0,), None, None, (4.0,)]


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match="file/kept: found no folder for judgements that can be used"):
    Judgements(pathlib.Path(tmp_path, "file", "kept"))
