"""The summary of an evaluation."""

import json
import subprocess
import sys

import numpy as np
import pytest

from jaxrl_llm.evaluation import Estimate, per_problem, summarise, table, to_json

REWARDS = np.array([[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
COMMON = dict(lengths=np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), stopped=np.array([[True] * 4, [True, True, True, False]]))
ANSWERS = [["2", "3", "2.0", "2"], ["1", "1", None, "4"]]


def test_a_summary_by_hand():
  metrics = ["pass@k:k=2&n=4", "avg@n:n=4", "maj@n:n=4"]
  results = summarise(metrics, REWARDS, answers=ANSWERS, levels=np.array([5, 2]), **COMMON)
  assert [x.name for x in results.metrics] == metrics and [x.problems for x in results.metrics] == [2, 2, 2]
  assert [x.value for x in results.metrics] == pytest.approx([(1 + 1 / 2) / 2, 0.5, 0.5])
  assert all(x.low <= x.value <= x.high for x in results.metrics)
  assert list(results.levels.items()) == [(2, (0.25, 1)), (5, (0.75, 1))]
  assert (results.truncation_rate, results.mean_tokens) == (0.125, 4.5)
  assert (results.problems, results.samples, results.failed) == (2, 4, {})


def test_failed_samples_leave_plain_json():
  rewards = np.where(REWARDS == 1, 1.0, np.nan)
  results = summarise(["avg@n:n=4", "pass@k:k=4&n=4"], rewards, causes=["timeout", "raised", "timeout"], **COMMON)
  assert results.failed == {"timeout": 2, "raised": 1}
  assert results.metrics[1] == Estimate("pass@k:k=4&n=4", None, None, None, 0)
  result = json.loads(json.dumps(to_json(results), allow_nan=False))
  assert result["metrics"]["avg@n:n=4"]["value"] == 1
  shown = table(results)
  assert "failed: timeout" in shown and "nan" not in shown


def test_bad_input():
  with pytest.raises(ValueError, match="metrics: found none"):
    summarise([], REWARDS, **COMMON)
  with pytest.raises(ValueError, match="maj@n:n=4: found no extracted answers"):
    summarise(["maj@n:n=4"], REWARDS, **COMMON)
  with pytest.raises(ValueError, match="avg@n: found n=8, expected 1 to 4"):
    per_problem("avg@n:n=8", REWARDS)


def test_the_package_needs_no_jax():
  code = "import sys, jaxrl_llm.evaluation; print('jax' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
