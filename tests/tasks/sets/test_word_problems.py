"""Word problems have one numeric answer, right solutions, and splits that share no problem."""

import hashlib
import re
import sys

import pytest

from jaxrl_llm import rewards, tasks
from jaxrl_llm.tasks.files.storage import split_of
from jaxrl_llm.tasks.sets import word_problems
from jaxrl_llm.text_types import Completion

pytest.importorskip("reasoning_gym")
GOLDEN = "77416f45834657c5"


@pytest.fixture(scope="module")
def rows():
  return word_problems.generate_rows()


@pytest.fixture(scope="module")
def word_task(tmp_path_factory):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(word_problems, "NUM_PROBLEMS", 400)
    yield tasks.make("gsm_symbolic", data_dir=tmp_path_factory.mktemp("words"))


def test_sizes(rows):
  for split, least in (("train", 2000), ("test", 256)):
    levels = [row["level"] for question, row in rows.items() if split_of(question) == split]
    assert len(levels) > least
    assert all(levels.count(level) > least / 5 for level in word_problems.LEVELS)


def test_every_problem(rows):
  for question, row in rows.items():
    assert row.keys() == {"question", "answer", "level", "response"} and row["question"] == question
    assert re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", row["answer"])
    assert row["level"] in word_problems.LEVELS
    steps = sum("=" in line for line in row["response"].split("\n"))
    assert row["level"] == min(steps, 5) or (row["level"] == 1 and steps == 2)
    if row["level"] == 1:
      assert max(int(n) for n in re.findall("[0-9]+", f"{question} {row['response']}")) <= 50 and len(question) < 400
    assert question.strip() == question and "Give the result" not in question


def test_the_generators_solution_is_right(rows):
  verify = rewards.make("final_number")
  for row in list(rows.values())[:1000]:
    assert row["response"].split("\n")[-1] == f"#### {row['answer']}"
    completion = Completion(text=row["response"], token_ids=(), num_tokens=0, stopped=True)
    assert verify(completion, row) == 1.0
    assert verify(completion, row | {"answer": f"{row['answer']}1"}) == 0.0


def test_splits(word_task):
  train, test, shown = ({row["question"] for row in getattr(word_task, name)} for name in ("train", "test", "demonstrations"))
  assert train and test and not train & test and shown == train
  assert len(train) == len(word_task.train) and len(test) == len(word_task.test)
  for name in ("train", "test", "demonstrations"):
    for row in getattr(word_task, name):
      assert row["prompt"] == f"{row['question']}\nAnswer with a number after ####."
      assert bool(row["response"]) == (name == "demonstrations")


def test_levels(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match=r"^task.levels: found \(0,\), expected one or more of \(1, 2, 3, 4, 5\)$"):
    tasks.make("gsm_symbolic", levels=(0,), data_dir=tmp_path)
  monkeypatch.setattr(word_problems, "NUM_PROBLEMS", 60)
  assert {row["level"] for row in tasks.make("gsm_symbolic", levels=(2, 5), data_dir=tmp_path).train} == {2, 5}


def test_golden(rows):
  """A change here needs a new VERSION; otherwise old copies on disk stay in use.

  Each process hashes strings in its own way, so this also detects an order that depends on hashes.
  """
  text = "\n".join(f"{row['question']}|{row['answer']}|{row['response']}" for row in rows.values())
  assert hashlib.sha256(text.encode()).hexdigest()[:16] == GOLDEN


def test_the_missing_package_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "reasoning_gym", None)
  with pytest.raises(ImportError, match=r"^task gsm_symbolic needs the package reasoning-gym: pip install 'jaxrl_llm\[tasks\]'$"):
    word_problems.generate_rows()


@pytest.mark.parametrize("change", [
  {"question": "How many?"}, {"answer": "1/2"}, {"metadata": {"answer_cot": "1 + 1 = 2\n2 + 0 = 2"}},
  {"metadata": {"answer_cot": "2\n#### 2"}},
])  # fmt: skip
def test_another_generator_is_refused(change, monkeypatch):
  import reasoning_gym

  problem = {"question": f"1 + 1?{word_problems._GENERATOR_REQUEST}", "answer": "2"}
  problem["metadata"] = {"answer_cot": "1 + 1 = 2\n2 + 0 = 2\n#### 2.0"}
  monkeypatch.setattr(reasoning_gym, "create_dataset", lambda name, **settings: [problem])
  row = {"question": "1 + 1?", "answer": "2", "level": 1, "response": "1 + 1 = 2\n2 + 0 = 2\n#### 2"}
  assert word_problems.generate_rows() == {"1 + 1?": row}
  monkeypatch.setattr(reasoning_gym, "create_dataset", lambda name, **settings: [problem | change])
  with pytest.raises(ValueError, match=r"^task gsm_symbolic: found a problem of another form .*expected release 0.1.25$"):
    word_problems.generate_rows()
