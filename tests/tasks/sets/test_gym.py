"""Tasks of reasoning-gym by name: their problems at a level, in the form that verifiers need."""

from fractions import Fraction

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.rewards.gym import read_entry
from jaxrl_llm.tasks.sets import gym

SOME = ("countdown", "graph_color", "prime_factorization", "chain_sum")


@pytest.mark.parametrize("name", SOME)
def test_an_entry_is_read_back_unchanged(name):
  """This includes tuples, with which some verifiers compare, and which JSON turns into lists."""
  dataset = gym._dataset(name, None, "{}", size=2, seed=3)
  for entry in dataset:
    row = gym._row({"gym": name, "settings": "{}", "level": 0, "id": "0"} | entry)
    restored = read_entry(row, "entry")
    assert restored == {key: entry[key] for key in ("question", "answer", "metadata")}
    if entry["answer"] is not None:
      assert row["answer"] == entry["answer"] and dataset.score_answer(row["answer"], restored) == 1.0


def test_values_that_json_lacks():
  metadata = {"grid": ((1, 2), [3, (4,)]), "tuple": {1: "a", (2, 3): None}, "items": [], "empty": {}, "half": Fraction(1, 2)}
  entry = {"question": "?", "answer": None, "metadata": metadata}
  row = gym._row({"gym": "x", "settings": "{}", "level": 0, "id": "0"} | entry)
  assert read_entry(row, "entry") == entry and row["answer"] == ""
  assert type(read_entry(row, "entry")["metadata"]["half"]) is Fraction


def test_word_problems_with_fractions(tmp_path):
  """Entry 7 of this generator has one among the values that it was made from."""
  task = tasks.make("gym:gsm_symbolic", size=64, data_dir=tmp_path)
  assert task.report.kept == 64


def test_a_task(tmp_path):
  task = tasks.make("gym:chain_sum", size=20, levels=(0, 2), data_dir=tmp_path)
  assert task.name == "gym:chain_sum" and task.rewards == ("gym",)
  rows = [*task.train, *task.test]
  assert {row["level"] for row in rows} == {0, 2} and len(rows) == task.report.kept <= 40 and len(task.test)
  assert all(read_entry(row, "entry")["metadata"]["source_dataset"] == row["gym"] == "chain_sum" for row in rows)
  assert rows[0]["prompt"].endswith("\n\nGive the final answer between <answer> and </answer>.")
  hard = [len(row["question"]) for row in rows if row["level"] == 2]
  assert max(hard) > max(len(row["question"]) for row in rows if row["level"] == 0)
  other = tasks.make("gym:chain_sum", size=20, config='{"min_terms": 6, "max_terms": 6}', data_dir=tmp_path, reward="exact_match")
  assert all(row["question"].count("+") + row["question"].count(" - ") == 5 for row in other.train) and other.rewards == ("exact_match",)


@pytest.mark.parametrize(
  "name, settings, words",
  [
    ("gym:chainsum", {}, r"task.name: found 'gym:chainsum', expected one of reasoning-gym's 105 tasks; did you mean 'gym:chain_sum'\?"),
    ("gym:composite", {}, "task.name: found 'gym:composite'"),
    ("gym:coin_flip", {}, "task.name: the verifier of gym:coin_flip accepts wrong answers; set task.reward"),
    ("gym:chain_sum", {"config": '{"min_term": 1}'}, "task.config: found 'min_term', expected settings of .* did you mean 'min_terms'"),
    ("gym:chain_sum", {"config": "{"}, "task.config: found '{' .* expected an object in JSON"),
    ("gym:chain_sum", {"config": "[]"}, "task.config: .* expected an object"),
    ("gym:chain_sum", {"config": '{"min_terms": 0}'}, r"task.config: gym:chain_sum does not take .*min_terms must be positive"),
    ("gym:chain_sum", {"levels": (99,)}, "task.levels: found 99, expected levels of gym:chain_sum, 0 to "),
    ("gym:acre", {"levels": (1,)}, "task.levels: found 1, but gym:acre has no curriculum"),
    (
      "gym:knight_swap",
      {"levels": (0,)},
      "task.levels: gym:knight_swap does not take the settings of its curriculum at level 0",
    ),
    ("gym:chain_sum", {"size": 1}, "task.size: found 1, expected a whole number of at least 2"),
    ("gym:chain_sum", {"path": "x"}, "task.path: found 'x', expected None, because task gym:chain_sum does not read it"),
  ],
)
def test_one_line_for_each_invalid_setting(name, settings, words, tmp_path):
  with pytest.raises(ValueError, match=words) as caught:
    tasks.make(name, data_dir=tmp_path, **settings)
  assert "\n" not in str(caught.value) and list(tmp_path.iterdir()) == []


def test_without_the_package(monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
  assert list(tasks.task_problems("gym:chain_sum", {})) == [
    "tasks gym:NAME need the package reasoning-gym: pip install 'jaxrl_llm[tasks]'"
  ]


def test_names():
  assert len(gym.names()) == 105 and "gym:countdown" in gym.names()
