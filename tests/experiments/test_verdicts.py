"""Published verdicts are read and compared with the rewards'."""

import json

import pytest

from experiments.benchmarks import grader_times
from experiments.verdicts import measure


def write(path, *rows):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def checkouts(tmp_path):
  solution = lambda text, right: {"is_correct": right, "solution": text}
  write(
    tmp_path / "grade_school_math/data/example_model_solutions.jsonl",
    {
      "question": "?",
      "ground_truth": "2 + 2\nA: 4",
      "6b": solution("So 4\nA: 4", True),
      "175b": solution("A: 5", False),
    },
  )
  write(
    tmp_path / "evaluation/data/eval_rm_maj_example/math_cot_100.jsonl",
    {
      "idx": 7,
      "question": "?",
      "gt": "10{,}000",
      "code": [r"\boxed{10000}", r"\boxed{1}", r"\boxed{2}"],
      "score": [False, True, False],
    },
  )
  write(
    tmp_path / "data/test.jsonl", *({"id": i, "question": "?", "answer": "C", "options": ["C"]} for i in "12")
  )
  for path in ("Gemini/Gemini-Pro-CoT", "Qwen/Qwen-VL-Max-CoT"):
    rows = [
      {"id": "1", "response": r"\boxed{C}", "correct": True},
      {"id": "2", "response": None, "correct": False},
    ]
    write(tmp_path / f"outputs/closed-source/{path}.jsonl", *rows)
  return tmp_path


def test_counts_and_disagreements(checkouts, capsys, tmp_path):
  flags = [f"--{name}={checkouts}" for name in measure.SETS]
  assert measure.main([*flags, "--show", f"--json={tmp_path / 'results.json'}"]) == 0
  sets = json.loads((tmp_path / "results.json").read_text())["sets"]
  assert sets["gsm8k"] == {"final_number": dict(right=1, wrong=1, only_here=0, only_there=0, failed=0)}
  assert sets["math"] == {"maths": dict(right=1, wrong=2, only_here=1, only_there=1, failed=0)}
  assert sets["mathvision"] == {"choice": dict(right=2, wrong=2, only_here=0, only_there=0, failed=0)}
  shown = capsys.readouterr().out.splitlines()
  assert [json.loads(line)[1:3] for line in shown if line.startswith("[")] == [
    ["right here only", "7, 0"],
    ["right there only", "7, 1"],
  ]
  assert "| math | `maths` | 3 | 1 | 1 (50.00 % of the wrong) | 1 (100.00 % of the right) |" in shown


@pytest.mark.parametrize(
  "flags, message", [([], "expected one of --gsm8k"), (["--math=nowhere"], "found no file nowhere")]
)
def test_bad_flags_get_one_line(capsys, flags, message):
  assert measure.main(flags) == 2
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1


def test_responses_of_the_benchmark_are_fixed_and_different():
  for reward in grader_times.REWARDS:
    made = grader_times.responses(reward, 50, seed=1)
    assert made == grader_times.responses(reward, 50, seed=1) != grader_times.responses(reward, 50, seed=2)
    assert len(set(made)) == 50


def test_another_folder_than_a_checkout_is_refused(tmp_path):
  with pytest.raises(ValueError, match="--against: found .*, expected a checkout of this repository"):
    grader_times.compare([tmp_path], count=1, repeats=1)
