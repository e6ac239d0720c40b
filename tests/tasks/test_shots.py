"""Few-shot prompts: solved problems in front of every prompt, which are not trained on."""

import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks.pipeline import encode_demonstrations, example_iterator
from tests.tasks.written import write_lines

ROWS = [
  {"question": f"{a}+{b}=", "answer": str(a + b), "why": f"{a} and {b} are {a + b}", "level": a} for a in range(1, 9) for b in range(9)
]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
  root = tmp_path_factory.mktemp("shots")
  path = write_lines(root / "sums.jsonl", ROWS)
  return lambda name="file", **settings: tasks.make(name, data_dir=root, **({"path": path} if name == "file" else {}) | settings)


def test_prompts_begin_with_solved_problems_that_are_not_trained_on(make):
  plain, task = make(), make(shots=3)
  prefix = task.train[0]["prompt"].removesuffix(task.train[0]["question"])
  shown = prefix.split("\n")[:-1]
  assert len(shown) == 3 and all(eval(line.replace("=", "==")) for line in shown)
  asked = [line[: line.index("=") + 1] for line in shown]
  before = [row["question"] for row in plain.train]
  assert set(asked) <= set(before) and [row["question"] for row in task.train] == [q for q in before if q not in asked]
  for split in ("train", "test"):
    assert all(row["prompt"] == prefix + row["question"] for row in getattr(task, split))
  assert [row["question"] for row in task.test] == [row["question"] for row in plain.test] and task.test[:2] == list(task.test)[:2]
  assert task.fingerprint not in (plain.fingerprint, None) and make(shots=3).fingerprint == task.fingerprint
  assert next(example_iterator(task.train, batch_size=2, seed=0))[0]["prompt"].startswith(prefix)
  assert make(shots=0).fingerprint == plain.fingerprint


def test_a_demonstration_is_the_solution_and_a_template_frames_it(make):
  task = make(shots=2, shot_template="Q: {question}\nA: {solution} (level {level})\n\n", response_column="why", level_column="level")
  first, second, question = task.train[0]["prompt"].split("\n\n")
  assert " are " in first and first.startswith("Q: ") and "(level " in second and question == task.train[0]["question"]
  assert len(task.demonstrations) == len(task.train)
  (shown,) = encode_demonstrations(task.demonstrations[:1], task.tokenizer)
  assert len(shown.prompt) == 1 + len(task.demonstrations[0]["prompt"])


def test_varied_shots_are_drawn_for_each_problem_from_its_level(make):
  plain, task = make(level_column="level"), make(shots=3, vary_shots=True, level_column="level")
  known, prefixes = {row["question"]: row for row in plain.train}, set()
  for split in ("train", "test"):
    assert [row["question"] for row in getattr(task, split)] == [row["question"] for row in getattr(plain, split)]
    for row in getattr(task, split):
      *shown, question = row["prompt"].split("\n")
      assert question == row["question"] and len(set(shown)) == 3 and all(eval(line.replace("=", "==")) for line in shown)
      asked = [known[line[: line.index("=") + 1]] for line in shown]
      assert all(other["level"] == row["level"] and other["question"] != question for other in asked)
      prefixes.add(tuple(shown))
  assert len(prefixes) > len(task.train) / 2
  assert task.train[3]["prompt"] == make(shots=3, vary_shots=True, level_column="level").train[3]["prompt"]
  fingerprints = {made.fingerprint for made in (plain, task, make(shots=3, level_column="level"), make(shots=2, vary_shots=True))}
  assert len(fingerprints) == 4 and None not in fingerprints


def test_varied_shots_come_from_all_levels_if_one_has_too_few(tmp_path, make):
  path = write_lines(tmp_path / "few.jsonl", [row | {"level": index} for index, row in enumerate(ROWS)])
  task = make(path=path, shots=2, vary_shots=True, level_column="level")
  assert all(len(row["prompt"].split("\n")) == 3 for row in task.train)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"shots": 80}, "config.task.shots: found 80, expected fewer than the "),
    ({"shots": 1, "shot_template": "{qestion}"}, "task.shot_template: found {qestion}, expected one of the columns"),
    ({"shots": 1, "shot_template": "no column"}, "task.shot_template: found 'no column', expected a column in it"),
  ],
)
def test_invalid_shots_are_refused(make, settings, message):
  with pytest.raises(ValueError) as error:
    make(**settings)
  assert message in str(error.value) and "\n" not in str(error.value)


def test_other_problems_are_tested_with_shots_of_their_own(make):
  task = make(shots=2, levels=(1, 2, 3), test_levels=(7, 8), level_column="level")
  assert {row["level"] for row in task.train} <= {1, 2, 3} and {row["level"] for row in task.test} <= {7, 8}
  test_lines = task.test[0]["prompt"].split("\n")
  assert len(test_lines) == 3 and all(line[0] in "78" for line in test_lines)
  assert make(levels=(1,), level_column="level", test_levels=(2,)).fingerprint != make(levels=(1,), level_column="level").fingerprint


@pytest.mark.slow
def test_parts_of_a_mixture_have_shots_of_their_own(data_dir):
  task = tasks.make("mixture", parts=("arithmetic", "products"), shots=1, data_dir=data_dir)
  signs = {row["task"]: row["prompt"].split("\n")[0] for row in task.train}
  assert "*" in signs["products"] and "*" not in signs["arithmetic"]
