"""Claims, locks and config changes of a run's folder."""

import json
import subprocess
import sys

import pytest

from jaxrl_llm.config import command_line
from jaxrl_llm.workdir import claim

CONFIG = {"seed": 0, "learner": {"row_buckets": (8, 16), "b1": 0.9}, "objective": {"clip_low": None}}


def test_a_new_folder_is_claimed_and_found_again(tmp_path):
  workdir = tmp_path / "deep" / "run"
  assert claim.claim(workdir, CONFIG)
  assert [path.name for path in workdir.iterdir()] == ["config.json"]
  assert not claim.claim(workdir, CONFIG), "a tuple that came back as a list is no change"
  assert json.loads((workdir / "config.json").read_text())["learner"]["row_buckets"] == [8, 16]


def test_a_check_changes_nothing_and_accepts_a_half_written_claim(tmp_path):
  claim.check_claim(tmp_path / "run", CONFIG)
  assert not (tmp_path / "run").exists()
  (tmp_path / "config.tmp").write_text("{")
  claim.check_claim(tmp_path, CONFIG)
  assert claim.claim(tmp_path, CONFIG) and not claim.claim(tmp_path, CONFIG)
  claim.expect(tmp_path)
  with pytest.raises(
    claim.WorkdirError, match="does not see the run of process 0; expected a folder that all processes share"
  ):
    claim.expect(tmp_path / "elsewhere", seconds=0.0)


def test_release_undoes_a_claim_and_nothing_else(tmp_path):
  claim.claim(tmp_path / "run", CONFIG)
  claim.release(tmp_path / "run")
  assert not (tmp_path / "run").exists()
  (tmp_path / "notes.txt").write_text("mine")
  claim.release(tmp_path)
  assert (tmp_path / "notes.txt").exists()


def test_changes_are_named_old_and_new(tmp_path):
  claim.claim(tmp_path, CONFIG)
  changed = {"seed": 1, "learner": {"row_buckets": (8,), "b1": 0.9}, "objective": {"clip_low": 0.1}}
  with pytest.raises(claim.WorkdirError) as error:
    claim.claim(tmp_path, changed)
  assert "(learner.row_buckets: [8, 16] -> [8]; objective.clip_low: None -> 0.1; seed: 0 -> 1)" in str(error.value)


def test_many_changes_are_counted(tmp_path):
  claim.claim(tmp_path, {f"f{i}": 0 for i in range(8)})
  with pytest.raises(claim.WorkdirError, match="and 3 more"):
    claim.claim(tmp_path, {f"f{i}": 1 for i in range(8)})


def test_other_files_are_left_alone(tmp_path):
  for name in "abcd":
    (tmp_path / name).write_text("")
  with pytest.raises(claim.WorkdirError, match=r"found a, b, c, \.\.\. but no config\.json"):
    claim.claim(tmp_path, CONFIG)
  assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "\x00\xff"])
def test_a_damaged_marker(tmp_path, text):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(claim.WorkdirError, match="is not the config of a run"):
    claim.claim(tmp_path, CONFIG)
  assert (tmp_path / "config.json").read_text() == text


@pytest.mark.parametrize(
  ("text", "finished"), [(None, False), ("{", False), ("[]", False), ('{"status": "running"}', False), ('{"status": "finished"}', True)]
)
def test_is_finished(tmp_path, text, finished):
  if text is not None:
    (tmp_path / "summary.json").write_text(text)
  assert claim.is_finished(tmp_path) is finished


def test_suffixes_are_names_of_one_folder_and_differ():
  texts = [{}, {"seed": "1"}, {"seed": "2"}, {"task.data_dir": "/a/b"}, {"a": "x" * 100}, {"a": "x" * 101}]
  suffixes = [command_line.suffix(text) for text in texts]
  assert len(set(suffixes)) == len(texts)
  assert all("/" not in suffix and " " not in suffix and len(suffix) <= 80 for suffix in suffixes)


def test_a_second_writer_is_refused_until_the_first_has_ended(tmp_path):
  workdir = tmp_path / "run"
  claim.claim(workdir, {"seed": 0})
  hold = "import pathlib, sys, time; from jaxrl_llm.workdir import claim; claim.lock(pathlib.Path(sys.argv[1])); print('held', flush=True)"
  holder = subprocess.Popen([sys.executable, "-c", hold + "; time.sleep(60)", str(workdir)], stdout=subprocess.PIPE, text=True)
  try:
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(claim.WorkdirError, match=f"process {holder.pid} on .* is writing there; wait until it ends"):
      claim.lock(workdir)
  finally:
    holder.kill()  # A kill leaves no lock behind.
    holder.wait()
  claim.lock(workdir)
  claim.unlock(workdir)
  claim.lock(workdir)
  claim.unlock(workdir)
  assert not claim.claim(workdir, {"seed": 0})


LATER = {"seed": 0, "num_steps": 8, "learner": {"row_buckets": (8, 16), "b1": 0.9}, "rollout": {"num_prompts": 8}}


def test_an_allowed_change_keeps_the_previous_config_and_can_be_undone(tmp_path):
  claim.claim(tmp_path, LATER)
  longer = LATER | {"num_steps": 16, "rollout": {"num_prompts": 16}}
  assert not claim.claim(tmp_path, longer, allow_changes=True)
  assert claim.changes(tmp_path, longer) == {"num_steps": (8, 16), "rollout.num_prompts": (8, 16)}
  assert claim.change(tmp_path, LATER, attempt=2) is None, "equal settings are no change"
  assert claim.change(tmp_path, longer, attempt=2) == "config.1.json"
  assert claim.change(tmp_path, LATER, attempt=3) == "config.2.json"
  read = lambda name: json.loads((tmp_path / name).read_text())["num_steps"]
  assert (read("config.json"), read("config.1.json"), read("config.2.json")) == (8, 8, 16)
  claim.change_back(tmp_path, "config.2.json")
  assert read("config.json") == 16 and not (tmp_path / "config.2.json").exists()
  (line,) = (tmp_path / "config_changes.jsonl").read_text().splitlines()
  changed = {"num_steps": [8, 16], "rollout.num_prompts": [8, 16]}
  assert json.loads(line) == {"attempt": 2, "before": "config.1.json", "changes": changed}


def test_a_change_that_is_never_allowed_is_refused_with_its_reason(tmp_path):
  claim.claim(tmp_path, LATER)
  message = "config.seed: found 1, expected 0 as at the start of the run, because everything drawn so far"
  with pytest.raises(claim.WorkdirError, match=message):
    claim.check_claim(tmp_path, LATER | {"seed": 1, "num_steps": 9}, allow_changes=True)
  assert json.loads((tmp_path / "config.json").read_text())["num_steps"] == 8
