"""Table of the laptop job: the gain of a run, paired by problem."""

import pytest

from experiments import laptop_job
from jaxrl_llm.evaluation import SampleRow, write_samples


def evaluation(workdir, step, scores):
  other = dict(prompt="", response="", answer=None, gold="", parts={}, cause=None, num_tokens=1, stopped=True)
  rows = [
    SampleRow(id=name, sample=i, score=score, **other)
    for name, of_problem in scores.items()
    for i, score in enumerate(of_problem)
  ]
  (workdir / "evaluations").mkdir(exist_ok=True)
  write_samples(workdir / "evaluations" / f"step-{step}.jsonl", rows)


def test_the_gain_is_paired_by_problem(tmp_path):
  assert laptop_job.gain(tmp_path) == ""
  evaluation(tmp_path, 0, {"a": [0.0, 1.0], "b": [0.0, None], "c": [1.0, 1.0]})
  assert laptop_job.gain(tmp_path) == ""
  evaluation(tmp_path, 9, {"c": [0.0, 0.0], "a": [0.0, 0.0], "b": [0.0, 0.0]})
  evaluation(tmp_path, 18, {"c": [1.0, 1.0], "a": [1.0, 0.0], "b": [0.5, 0.5]})
  # The differences are 0, 50 and 0 points: the last evaluation is that of step 18, not of step 9.
  assert laptop_job.gain(tmp_path).startswith("+16.7 [+0.0, +")


def test_evaluations_of_other_problems_have_no_gain(tmp_path):
  evaluation(tmp_path, 0, {"a": [0.0]})
  evaluation(tmp_path, 9, {"b": [1.0]})
  with pytest.raises(ValueError, match=r"step-9\.jsonl: found other problems than in step-0\.jsonl"):
    laptop_job.gain(tmp_path)
