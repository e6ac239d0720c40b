"""Problems are right, the teacher errs at the specified rate, and no test problem is trained on."""

import ast
import hashlib
import operator
import re
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks.sets import arithmetic

SOURCES = ("train", "test", "demonstrations")
GOLDEN = ["7+8=15\n15-5=10\n#10", "7+8=5\n5-5=10\n#10", "7+8=14\n14-5=-9\n#-9", "7+8=15\n15-5=12\n#12"]
GOLDEN_PROBLEMS = "57b267007dbd9c08"
STEP = re.compile(r"(0|-?[1-9]\d*)([+-])(\d)=(0|-?[1-9]\d*)")


def evaluate_by_ast(question):
  """Evaluates a sum of digits with Python's own parser."""
  def value(node):
    if isinstance(node, ast.BinOp):
      return {ast.Add: operator.add, ast.Sub: operator.sub}[type(node.op)](value(node.left), value(node.right))
    return node.value
  return value(ast.parse(question, mode="eval").body)


def read_working(row):
  """Parses a working into (left, sign, term, result) per step and the stated answer.

  Any other form is an error.
  """
  *lines, last = row["response"].split("\n")
  steps = []
  for line in lines:
    left, sign, term, result = STEP.fullmatch(line).groups()
    steps.append((int(left), sign, int(term), int(result)))
  assert last.startswith("#")
  return steps, int(last[1:])


def is_wrong(step):
  left, sign, term, result = step
  return (left + term if sign == "+" else left - term) != result


def test_splits_are_disjoint(task):
  train, test, taught = ({row["question"] for row in getattr(task, name)} for name in SOURCES)
  assert not test & train and not test & taught
  assert taught == train
  assert len(train) == len(task.train) and len(test) == len(task.test)
  assert len(task.demonstrations) == arithmetic.DEMONSTRATIONS_PER_PROBLEM * len(train)


def test_sizes(task):
  for level, total in ((1, 200), (2, 4000), (3, 4000)):
    train, test = (sum(row["level"] == level for row in rows) for rows in (task.train, task.test))
    assert train + test == total
    assert 0.06 < test / total < 0.14


@pytest.mark.parametrize("name", SOURCES)
def test_rows(task, name):
  for row in getattr(task, name):
    assert row.keys() == {"question", "answer", "level", "prompt", "response"}
    assert {type(row[key]) for key in ("question", "answer", "prompt", "response")} == {str} and type(row["level"]) is int
    assert re.fullmatch(r"\d([+-]\d)+", row["question"]) and len(row["question"]) == 2 * row["level"] + 1
    assert row["answer"] == str(evaluate_by_ast(row["question"]))
    assert row["prompt"] == row["question"] + "\n"
    assert bool(row["response"]) == (name == "demonstrations")


def test_a_careful_teacher_is_right(task):
  for row in task.test:
    steps, answer = read_working({"response": arithmetic.working(row["question"])})
    assert not any(map(is_wrong, steps))
    assert str(answer) == row["answer"]


def test_every_working_has_the_form_and_carries_on_from_its_own_values(task):
  for row in task.demonstrations:
    steps, answer = read_working(row)
    assert "".join([str(steps[0][0]), *(f"{sign}{term}" for _, sign, term, _ in steps)]) == row["question"]
    for before, after in zip(steps, steps[1:], strict=False):
      assert after[0] == before[3]
    assert answer == steps[-1][3]


def test_the_teacher_errs_in_a_third_of_the_steps_independently(task):
  wrong = {}  # [demonstration, step] by level.
  for level in arithmetic.LEVELS:
    wrong[level] = np.array([[is_wrong(s) for s in read_working(row)[0]] for row in task.demonstrations if row["level"] == level])
  assert wrong[1].mean() == pytest.approx(1 / 3, abs=0.055)  # 708 steps: three standard errors.
  for level in (2, 3):
    np.testing.assert_allclose(wrong[level].mean(axis=0), 1 / 3, atol=0.015)
    both = wrong[level][:, 0] & wrong[level][:, 1]
    assert both.mean() == pytest.approx(1 / 9, abs=0.01)


def test_final_answers_of_the_teacher(task):
  # (2/3)^n and a little more, because two slips of the same size can cancel.
  for level, low, high in ((1, 0.61, 0.72), (2, 0.43, 0.49), (3, 0.29, 0.35)):
    rows = [row for row in task.demonstrations if row["level"] == level]
    assert low < np.mean([str(read_working(row)[1]) == row["answer"] for row in rows]) < high


def test_slips_are_plausible(task):
  sizes = set()
  for row in task.demonstrations:
    for left, sign, term, result in read_working(row)[0]:
      right = left + term if sign == "+" else left - term
      if right not in (result, -result):
        sizes.add(result - right)
  assert sizes == {-10, -2, -1, 1, 2, 10}


def test_demonstrations_of_a_problem_differ(task):
  responses = {}
  for row in task.demonstrations:
    responses.setdefault(row["question"], set()).add(row["response"])
  assert np.mean([len(different) > 1 for different in responses.values()]) > 0.85


def test_lengths(task):
  """Everything fits the defaults of config/fields.py: prompts of 12 tokens, responses of 40."""
  for rows in (task.train, task.test):
    assert max(len(task.tokenizer.encode(row["prompt"], add_bos=True)) for row in rows) == 9
    assert max(len(arithmetic.working(row["question"])) + 1 for row in rows) <= 31
  assert max(len(row["response"]) + 1 for row in task.demonstrations) <= 40


@pytest.mark.exhaustive
def test_two_builds_are_the_same_bytes(task, data_dir, tmp_path):
  again = tasks.make("arithmetic", data_dir=tmp_path)
  assert again == task

  def digests(root):
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("*") if path.is_file()}

  assert digests(tmp_path) == digests(data_dir)
  assert len(digests(tmp_path)) == 5


def test_golden():
  """A change here needs a new VERSION; otherwise old copies on disk stay in use."""
  assert [arithmetic.working("7+8-5", error_rate=1 / 3, seed=seed) for seed in range(4)] == GOLDEN
  questions = [question for level in arithmetic.LEVELS for question in arithmetic.questions_of(level)]
  assert hashlib.sha256(" ".join(questions).encode()).hexdigest()[:16] == GOLDEN_PROBLEMS


@pytest.mark.slow
def test_hints_are_in_right_demonstrations_alone(task, data_dir):
  hinted = tasks.make("hinted_arithmetic", data_dir=data_dir)
  by_text = lambda rows: sorted((row["prompt"], row["response"]) for row in rows)
  for split in ("train", "test"):
    assert by_text(getattr(hinted, split)) == by_text(getattr(task, split))
  told = [row for row in hinted.demonstrations if " is " in row["question"]]
  assert by_text(x for x in hinted.demonstrations if " is " not in x["question"]) == by_text(task.demonstrations)
  problems = {row["question"]: row for row in task.train}
  assert len(told) == 2 * len(problems)
  for row in told:
    answer, _, question = row["question"].partition(" is ")
    assert row["answer"] == answer == problems[question]["answer"] and row["response"] == arithmetic.working(question)
    assert row["prompt"] == f"{row['question']}\n"


def test_needs_neither_tensorflow_nor_jax(tmp_path):
  program = """
import sys
from importlib.machinery import PathFinder

class Hidden(PathFinder):
  @classmethod
  def find_spec(cls, name, path=None, target=None):
    return None if name.split(".")[0] == "tensorflow" else super().find_spec(name, path, target)

sys.meta_path = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]
import jaxrl_llm.rewards
import jaxrl_llm.tasks.pipeline
from jaxrl_llm import tasks
from jaxrl_llm.tasks import arithmetic

arithmetic._PROBLEMS_PER_LEVEL = 50
task = tasks.make("arithmetic", data_dir=sys.argv[1])
jaxrl_llm.tasks.pipeline.prompt_lengths(task.train, task.tokenizer)
print(len(task.train) > 50, sorted({"tensorflow", "jax", "torch"} & set(sys.modules)))
"""
  result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
  # A build writes nothing to stdout.
  assert result.stdout == "True []\n", result.stderr


# ---- Process rewards, which judge each line of a working independently.

EOS = 258


def rewards_of(question, text, *, stopped=True):
  return arithmetic.step_rewards({"question": question}, [*text.encode(), *[EOS] * stopped])


@pytest.mark.parametrize("question", ["7+8-5", "0-9", "9-9+0-0"])
def test_a_right_working_earns_every_step(question):
  text = arithmetic.working(question)
  rewards = rewards_of(question, text)
  assert [reward for _, reward in rewards] == [1.0] * len(text.split("\n"))
  # The last token is the stop token.
  assert [end for end, _ in rewards] == [i for i, c in enumerate(text) if c == "\n"] + [len(text)]


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("7+8=14\n14-5=9\n#9", [0, 1, 1]),  # One slip, carried forward.
    ("7+8=15\n14-5=9\n#9", [1, 0, 1]),  # Starts from a result that was never reached.
    ("7+8=15\n15-5=10\n#11", [1, 1, 0]),
    ("7+8=15\n15-4=11\n#11", [1, 0, 1]),  # Not the problem's term.
    ("7+8=15\n#15", [1, 0]),  # A step is missing.
    ("7+8=15\n15-5=10\n10+0=10\n#10", [1, 1, 0, 0]),  # One too many.
    ("7+8=015\n15-5=10\n#10", [0, 1, 1]),  # Another spelling.
    # Without any result, the next line may start from the right one.
    ("7+8=x\n15-5=10\n#10", [0, 1, 1]),
    ("", [0]),
    ("\n\n\n", [0, 0, 0, 0]),
    ("7+8=" + "9" * 400, [0]),
  ],
)
def test_rewards_computed_by_hand(text, expected):
  assert [reward for _, reward in rewards_of("7+8-5", text)] == expected


def test_a_truncated_response_is_judged_as_far_as_it_goes():
  assert rewards_of("7+8-5", "7+8=15\n15-", stopped=False) == [(6, 1.0), (9, 0.0)]
  assert arithmetic.step_rewards({"question": "1+1"}, []) == []


def test_other_ids_than_bytes_never_make_a_line_right():
  ids = [*b"7+8=1", 256, *b"5\n"]
  assert arithmetic.step_rewards({"question": "7+8"}, ids)[0][1] == 0.0
