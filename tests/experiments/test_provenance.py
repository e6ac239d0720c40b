"""Tests of `experiments.provenance`: evidence that rules are older than a run."""

import importlib
import json
import pathlib

import pytest

from experiments import provenance
from experiments.claims.claim import CLAIMS, folder_of
from experiments.claims.staleness import rules

FILE = pathlib.Path(rules.__file__)
STUDIES = sorted({claim.study for claim in CLAIMS.values()})


def git(*words):
  """Returns the output of a git command; skips the test if there is no history."""
  text = provenance._git(*words)
  if text is None:
    pytest.skip("there is no git history")
  return text


def test_a_record_names_the_code_and_the_time():
  recorded = provenance.record(rules)
  assert recorded["rules"] == provenance.hash_of(FILE.read_bytes()) and recorded["started"].endswith("+00:00") and recorded["cores"] >= 1
  assert recorded["commit"] in ("", git("rev-parse", "HEAD"))


def test_only_an_older_commit_with_these_rules_is_trusted():
  commit = git("log", "-1", "--format=%H", "--", str(FILE))
  text = provenance._git("show", f"{commit}:{FILE.relative_to(provenance.ROOT).as_posix()}", strip=False)
  good = {"commit": commit, "changed": False, "rules": provenance.hash_of(text.encode()), "started": "2100-01-01T00:00:00+00:00"}
  assert provenance.doubt(good, FILE) == ""
  assert provenance.doubt(good | {"commit": ""}, FILE) == "no commit was recorded"
  assert provenance.doubt(good | {"changed": True}, FILE) == "tracked files differed from the commit"
  assert provenance.doubt(good | {"rules": "0"}, FILE) == "the commit contains a different experiments/claims/staleness/rules.py"
  assert provenance.doubt(good | {"also": {"README.md": "0"}}, FILE) == "the commit contains a different README.md"
  assert provenance.doubt(good | {"started": "2000-01-01T00:00:00+00:00"}, FILE) == "the commit is newer than the run"
  assert provenance.doubt(good | {"commit": "0" * 40}, FILE) is None, "a history that lacks the commit shows nothing"


def test_a_study_resumes_only_with_the_rules_and_files_it_started_with(tmp_path):
  path = tmp_path / "new" / "started.json"
  first = provenance.begin(path, rules, FILE)
  assert provenance.begin(path, rules, FILE) == first == json.loads(path.read_text())
  name = FILE.relative_to(provenance.ROOT).as_posix()
  for other in ({"rules": "0"}, {"also": {name: "0"}}):
    path.write_text(json.dumps(first | other))
    with pytest.raises(SystemExit, match=f"^error: {name}: changed since the study was started at 2"):
      provenance.begin(path, rules, FILE)


@pytest.mark.parametrize("study", STUDIES)
def test_results_that_name_a_commit_had_their_rules_before_the_run(study):
  claim = next(claim for claim in CLAIMS.values() if claim.study == study)
  results, rules = json.loads((folder_of(claim) / "results.json").read_text()), importlib.import_module(f"{study}.rules")
  records = [run["provenance"] for run in (results, results.get("second", {})) if "provenance" in run]
  # Without a record, the run is from before 2026-11-25; the page says "not recorded".
  for recorded in records:
    doubt = provenance.doubt(recorded, pathlib.Path(rules.__file__))
    if doubt is None:
      pytest.skip("there is no git history")
    assert not doubt
