"""A dataset folder is complete, or one line says what is wrong with it and how to fix it."""

import os
import shutil
import subprocess
import sys
import tempfile

import pytest
import tensorflow_datasets as tfds

from jaxrl_llm.tasks.files import storage, tables


class Tiny(storage.StoredDataset):
  """A dataset small enough to build for each test."""

  VERSION = tfds.core.Version("1.0.0")
  SPLITS = ("train", "test")
  columns = ("text", "level")

  def _generate_examples(self, split):
    for i in range({"train": 30, "test": 5}[split]):
      yield str(i), {"text": f"größe {i}", "level": i}


TRAIN = "tiny-train.array_record-00000-of-00001"
TEST = "tiny-test.array_record-00000-of-00001"


def load(root):
  return storage.load_splits(Tiny, data_dir=root)


def test_rows_are_text_and_ints(tmp_path):
  splits = load(tmp_path / "a" / "b")
  assert sorted(splits["train"], key=lambda row: row["level"]) == [{"text": f"größe {i}", "level": i} for i in range(30)]
  assert {type(row["level"]) for row in splits["test"]} == {int}
  assert load(tmp_path / "a" / "b") == splits


def test_a_build_leaves_no_other_files(tmp_path):
  load(tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
  assert [path.name for path in (tmp_path / "tiny").iterdir()] == ["1.0.0"]


def test_neither_a_build_nor_an_opening_leaves_a_temporary_folder(tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
  (tmp_path / "temporary").mkdir()
  read = lambda: iter([{"question": "1+1", "answer": "2", "level": 1, "response": "", "id": "", "place": "f:1"}])
  table = dict(columns=("question", "answer", "level", "response", "id", "place"), data_dir=tmp_path / "data", bad_rows="drop")
  for _ in range(2):
    tables.open_table("mine", "0" * 16, {"train": lambda tally: read()}, **table)
  assert not list((tmp_path / "temporary").iterdir())


def test_the_default_folder_is_in_the_home(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  load(None)
  assert (tmp_path / ".cache/jaxrl_llm/data/tiny/1.0.0/dataset_info.json").is_file()


def _as_file(folder):
  shutil.rmtree(folder)
  folder.write_text("something")


def _flip(folder):
  data = bytearray((folder / TRAIN).read_bytes())
  # A flip in the padding may be harmless, so the start of the first block is flipped too.
  data[len(data) // 2] ^= 0xFF
  data[40] ^= 0xFF
  (folder / TRAIN).write_bytes(data)


def _edit_info(old, new):
  def edit(folder):
    text = (folder / "dataset_info.json").read_text()
    assert old in text
    (folder / "dataset_info.json").write_text(text.replace(old, new))
  return edit


DAMAGE = {
  "record file cut short": lambda folder: os.truncate(folder / TRAIN, (folder / TRAIN).stat().st_size // 2),
  "record file empty": lambda folder: os.truncate(folder / TRAIN, 0),
  "record file missing": lambda folder: (folder / TRAIN).unlink(),
  "record file is text": lambda folder: (folder / TRAIN).write_text("hello\n" * 20000),
  "record file of another split": lambda folder: shutil.copy(folder / TRAIN, folder / TEST),
  "bits flipped": _flip,
  "fewer records than promised": lambda folder: shutil.copy(folder / TEST, folder / TRAIN),
  "no dataset_info.json": lambda folder: (folder / "dataset_info.json").unlink(),
  "dataset_info.json empty": lambda folder: (folder / "dataset_info.json").write_text(""),
  "dataset_info.json without content": lambda folder: (folder / "dataset_info.json").write_text("{}"),
  "another version": _edit_info("1.0.0", "2.0.0"),
  "other splits": _edit_info('"test"', '"validation"'),
  "folder empty": lambda folder: [path.unlink() for path in folder.iterdir()],
  "folder of foreign files": lambda folder: [path.unlink() for path in folder.iterdir()] and (folder / "notes.txt").write_text("hello"),
  "a file instead of the folder": _as_file,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  root = tmp_path_factory.mktemp("whole")
  load(root)
  return root


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_line_with_the_fix(whole, tmp_path, damage):
  root = tmp_path / "data"
  shutil.copytree(whole, root)
  folder = root / "tiny" / "1.0.0"
  DAMAGE[damage](folder)
  with pytest.raises(ValueError) as caught:
    load(root)
  message = str(caught.value)
  assert message.startswith(f"{folder}: found ") and "\n" not in message and len(message) < 800
  assert "expected tiny 1.0.0 with splits train, test" in message
  assert message.endswith(f"delete {folder} and run again")
  assert ("no dataset_info.json" in message) == (not (folder / "dataset_info.json").is_file())
  shutil.rmtree(folder, ignore_errors=True)
  folder.unlink(missing_ok=True)
  assert load(root) == load(whole)  # The fix works.


def test_rows_of_other_columns_are_refused(tmp_path):
  class Renamed(Tiny, skip_registration=True):
    name = "tiny"
    columns = ("text", "title")

    def _generate_examples(self, split):
      for key, row in super()._generate_examples(split):
        yield key, {"text": row["text"], "title": ""}

  storage.load_splits(Renamed, data_dir=tmp_path)
  with pytest.raises(ValueError, match=r"tiny/1.0.0: found a dataset that cannot be used .*; delete .* and run again"):
    load(tmp_path)


@pytest.mark.parametrize("where", ["file/data", "file"])
def test_a_folder_that_cannot_be_written(tmp_path, where):
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match=r"^task.data_dir: .*file.*expected a folder that can be written.*set task.data_dir to one$"):
    load(tmp_path / where)


def test_a_full_disk(tmp_path, monkeypatch):
  def full(*args, **kwargs):
    raise OSError(28, "No space left on device")
  monkeypatch.setattr(Tiny, "_generate_examples", full)
  with pytest.raises(ValueError, match="task.data_dir: .*No space left"):
    load(tmp_path)
  assert list(tmp_path.iterdir()) == []


def test_a_remote_folder_is_refused():
  with pytest.raises(ValueError, match="local folder"):
    load("gs://bucket/data")


def test_the_loser_of_a_race_uses_the_winners_copy(whole, tmp_path, monkeypatch):
  real_rename = os.rename

  def rename_too_late(source, target):
    if str(target).startswith(str(tmp_path / "tiny")):
      shutil.copytree(whole / "tiny" / "1.0.0", target)
    real_rename(source, target)

  monkeypatch.setattr(os, "rename", rename_too_late)
  assert load(tmp_path) == load(whole)
  assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_processes_may_build_at_once(whole, tmp_path):
  """All with one seed of `random`, from which TFDS would name its scratch folder."""
  program = f"""
import random, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_storage
random.seed(0)
print(len(test_storage.load(sys.argv[1])["train"]))
"""
  command, pipe = [sys.executable, "-c", program, str(tmp_path)], subprocess.PIPE
  processes = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
  outputs = [process.communicate(timeout=60) for process in processes]
  assert [out for out, _ in outputs] == ["30\n"] * 3, outputs
  assert load(tmp_path) == load(whole)
  assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
