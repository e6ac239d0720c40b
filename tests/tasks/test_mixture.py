"""Parts occur in their shares, each with its own verifier, in an order that survives a resume."""

import collections
import functools
import itertools
import json
import pathlib
import pickle

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks import mixture, pipeline
from jaxrl_llm.tasks.files.report import Report
from jaxrl_llm.tasks.mixture import MixedRows
from jaxrl_llm.text_types import Completion

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
PARTS = [[{"question": f"{name}{i}"} for i in range(size)] for name, size in (("a", 70), ("b", 400), ("c", 90))]
ROWS = MixedRows(PARTS, (0.5, 0.3, 0.2))


def stream(rows=ROWS, batch_size=4, seed=0):
  return pipeline.example_iterator(rows, batch_size=batch_size, seed=seed)


def take(iterator, n):
  return [row["question"] for batch in itertools.islice(iterator, n) for row in batch]


def test_shares_hold_everywhere_in_the_stream():
  seen = take(stream(), 120)
  for start in (0, 100, 270):
    counts = collections.Counter(question[0] for question in seen[start : start + 200])
    assert all(abs(counts[name] - share) <= 2 for name, share in (("a", 100), ("b", 60), ("c", 40))), counts
  ours = [question for question in seen if question[0] == "a"]
  # The part has epochs of its own.
  assert all(len(set(ours[i : i + 70])) == 70 for i in (0, 70, 140))
  assert seen[:40] != take(stream(seed=1), 10)


@pytest.mark.parametrize("batch_size", [1, 4, 20])
def test_the_order_does_not_depend_on_the_batch(batch_size):
  assert take(stream(batch_size=batch_size), 40 // batch_size) == take(stream(), 10)


def test_a_stream_resumes_from_its_state():
  whole, iterator = take(stream(), 30), stream()
  take(iterator, 11)
  state = json.loads(json.dumps(iterator.get_state()))
  resumed = stream()
  resumed.set_state(state)
  assert take(resumed, 19) == whole[44:]


def test_rows_are_the_parts_one_after_the_other():
  assert len(ROWS) == 560 and [row["question"] for row in ROWS] == [row["question"] for part in PARTS for row in part]
  assert [ROWS[i] for i in (0, 69, 70, 469, 470, -1)] == [PARTS[0][0], PARTS[0][69], PARTS[1][0], PARTS[1][399], PARTS[2][0], PARTS[2][89]]
  assert ROWS[68:72] == [*PARTS[0][68:], *PARTS[1][:2]]
  for index in (560, -561):
    with pytest.raises(IndexError):
      ROWS[index]
  with pytest.raises(ValueError, match="found parts of 1, 0 rows"):
    stream(MixedRows([[{}], []], (1, 1)))


BAD_PARTS = {
  (): "none",
  ("a=0",): "'a=0'",
  ("a=x",): "'a=x'",
  ("a=inf",): "'a=inf'",
  ("a", "a=2"): "'a' twice",
  ("=1",): "'=1'",
}


@pytest.mark.parametrize("parts, words", BAD_PARTS.items())
def test_invalid_parts_are_refused(parts, words):
  with pytest.raises(ValueError, match=f"^task.parts: found {words}"):
    mixture.parse_parts(parts)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
  return tasks.make("mixture", parts=("gsm8k=0.25", "math=0.75"), source=str(FIXTURES), data_dir=tmp_path_factory.mktemp("data"))


def right(completion, example):
  return float(completion.text == example["answer"])


def test_each_row_has_its_own_verifier(both):
  assert both.name == "mixture" and both.rewards == ("final_number", "maths") and both.routed
  for rows in (both.train, both.test, both.demonstrations):
    assert {(row["task"], row["reward"]) for row in rows} == {("gsm8k", "final_number"), ("math", "maths")}
  verifier = pickle.loads(pickle.dumps(functools.partial(mixture.route, {"final_number": right, "maths": right})))
  assert verifier(Completion(text="60", token_ids=(), num_tokens=1, stopped=True), both.train[0]) == 1.0
  counts = collections.Counter(row["task"] for batch in itertools.islice(stream(both.train), 10) for row in batch)
  assert counts == {"gsm8k": 10, "math": 30}
  assert both.report == Report(read=9, kept=8, dropped={"duplicate question": 1}, first=both.report.first)


def test_test_problems_of_another_task(tmp_path):
  settings = {"source": FIXTURES / "dapo_math", "data_dir": tmp_path, "test_source": FIXTURES / "aime24"}
  task = tasks.make("dapo_math", test_name="aime24", **settings)
  assert [row["answer"] for row in task.test] == ["024", "015"] and task.name == "dapo_math" and task.rewards == ("maths",)
  assert not task.routed and task.report.read == 5 + 2
  task = tasks.make("dapo_math", test_name="gsm8k", **settings | {"test_source": FIXTURES / "gsm8k"})
  assert task.routed and task.rewards == ("maths", "final_number")
  assert {row["reward"] for row in task.train} == {"maths"} and {row["reward"] for row in task.test} == {"final_number"}


def test_test_problems_keep_verifiers_of_their_own(both, tmp_path):
  """Also if the first of them is the task's: the others must not be judged by it."""
  task = tasks.make("gsm8k", source=FIXTURES / "gsm8k", data_dir=tmp_path)
  assert task.rewards[0] == both.rewards[0] and not task.routed
  tested = mixture.with_test(task, both)
  assert tested.routed and tested.rewards == ("final_number", "maths")
  assert {row["reward"] for row in tested.test} == {"final_number", "maths"} and {row["reward"] for row in tested.train} == {"final_number"}


@pytest.mark.parametrize(
  "settings, words",
  [
    ({"parts": ("aime24",)}, "task.parts: aime24 has test problems only"),
    ({"parts": ("file",)}, "task.parts: found 'file', expected tasks that need no settings"),
    ({"parts": ("gsm9k",)}, "task.name: found 'gsm9k'.*did you mean 'gsm8k'"),
    ({"parts": ("gsm8k",), "levels": (1,)}, r"task.levels: found \(1,\) for a mixture"),
  ],
)
def test_impossible_mixtures_are_refused(settings, words, tmp_path):
  with pytest.raises(ValueError, match=words):
    tasks.make("mixture", source=str(FIXTURES), data_dir=tmp_path, **settings)
